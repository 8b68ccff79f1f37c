"""Modules that a foreign host loads by name."""
