"""Recorded requests, read from the forms in which people have them."""
