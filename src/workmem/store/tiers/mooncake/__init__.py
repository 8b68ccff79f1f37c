"""The remote tier: a pool of memory that hosts share, run by Mooncake.

How it stands below the store, what it promises and what it does not: docs/adr/0010-remote-tier.md.
"""
