"""Recorded requests, replayed against a simulated prefix cache: what is lost, why, and what repairs it."""
