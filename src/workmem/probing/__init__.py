"""Asking a running server, by small requests, what it does with a prompt that comes again."""
