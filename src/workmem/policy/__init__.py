"""Decisions as pure code: data in, decision out."""
