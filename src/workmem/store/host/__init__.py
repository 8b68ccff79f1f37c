"""One pool for all processes of a host: a server that owns the store, and clients that map its arena."""
