"""Accounts of a request add up."""

from workmem.core.generation import Usage
from workmem.core.outcomes import COMPUTED, MissReason, SourceRun


def test_cached_tokens_are_those_of_every_tier():
    sources = (
        SourceRun("vram", 64),
        SourceRun("dram", 32),
        SourceRun("ssd", 16),
        SourceRun(COMPUTED, 48, MissReason.COLD),
        SourceRun(COMPUTED, 5, MissReason.TAIL),
    )
    usage = Usage(prompt_tokens=165, completion_tokens=3, sources=sources)
    assert usage.cached_tokens == 64 + 32 + 16
