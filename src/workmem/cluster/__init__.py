"""A pool of memory that hosts share: its master, its segments, who is alive, and what is wrong with it."""
