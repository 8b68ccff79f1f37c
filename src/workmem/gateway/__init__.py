"""The HTTP front: OpenAI-compatible, before one engine or before other servers."""
