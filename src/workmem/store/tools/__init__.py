"""Looking at a store's folder from outside: what it holds, whether that is sound, and taking it out."""
