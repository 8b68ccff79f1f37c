"""Agents at work over recorded conversations, to see what a working memory changes."""
