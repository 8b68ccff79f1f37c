"""The share of a disk that the ssd tier may fill."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workmem.core.errors import ConfigError
from workmem.store.tiers.free_space import (
    FreeSpace,
    KeepFree,
    parse_keep_free,
    read_free_space,
    usable_bytes,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("5%", KeepFree(share=0.05)),
        (" 2.5 % ", KeepFree(share=0.025)),
        ("0%", KeepFree()),
        ("100%", KeepFree(share=1.0)),
        ("20GiB", KeepFree(bytes=20 * GIB)),
        (4096, KeepFree(bytes=4096)),
        ("0", KeepFree()),
    ],
)
def test_share_or_size(value, expected):
    assert parse_keep_free(value) == expected


@pytest.mark.parametrize("value", ["101%", "five%", "-1%", "", "%", -1])
def test_anything_else_names_the_setting(value):
    with pytest.raises(ConfigError, match=r"^\$\.store\.ssd\.keep_free: "):
        parse_keep_free(value, "$.store.ssd.keep_free")


@pytest.mark.parametrize(
    ("used", "free", "keep", "expected"),
    [
        (0, 90, KeepFree(share=0.05), 8),
        (0, 9, KeepFree(share=0.05), 4),
        (3, 5, KeepFree(share=0.05), 3),
        (8, 2, KeepFree(share=0.05), 5),
        (2, 0, KeepFree(share=0.05), 0),
        (8, 0, KeepFree(), 8),
        (0, 12, KeepFree(bytes=10 * GIB), 2),
        (0, 100, KeepFree(share=1.0), 0),
    ],
)
def test_the_tier_takes_what_is_left_beside_what_stays_free(used, free, keep, expected):
    space = FreeSpace(100 * GIB, free * GIB)
    assert usable_bytes(8 * GIB, used * GIB, space, keep) == expected * GIB


@given(
    configured=st.integers(0, 2**44),
    used=st.integers(0, 2**44),
    total=st.integers(0, 2**46),
    free=st.integers(0, 2**46),
    share=st.floats(0, 1),
    kept=st.integers(0, 2**44),
)
def test_filling_what_is_usable_leaves_what_must_stay_free(configured, used, total, free, share, kept):
    space, keep = FreeSpace(total, free), KeepFree(share, kept)
    usable = usable_bytes(configured, used, space, keep)
    assert 0 <= usable <= configured
    if usable > 0:
        assert free - (usable - used) >= keep.of(total)


def test_reading_the_disk(tmp_path):
    space = read_free_space(tmp_path)
    assert 0 < space.free_bytes <= space.total_bytes
    with pytest.raises(OSError, match="No such file"):
        read_free_space(tmp_path / "none")
