"""Engines that compute: one folder per upstream."""
