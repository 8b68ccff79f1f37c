"""Stretches of bytes against a set of bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workmem.transfer.spans import Spans

STRETCHES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=20)


@given(STRETCHES, st.integers(0, 72), st.integers(1, 20))
def test_they_are_what_a_set_of_bytes_would_be(added, start, size):
    spans, model = Spans(), set()
    for first, length in added:
        spans.add(first, length)
        model |= set(range(first, first + length))
    asked = set(range(start, start + size))
    assert spans.touches(start, size) == bool(asked & model)
    assert spans.covers(start, size) == (asked <= model)
