"""The embedded engine: PyTorch, `transformers` model definitions, our own paged KV. See `engine`."""
