from __future__ import annotations

import pytest

from workmem.core.errors import ConfigError
from workmem.core.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("512MiB", 512 * 2**20),
        ("2GiB", 2**31),
        ("1.5 KiB", 1536),
        ("10GB", 10**10),
        ("4096", 4096),
        (7, 7),
        ("3b", 3),
    ],
)
def test_sizes_as_people_write_them(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "MiB", "12 parsecs", "-1MiB", "1,5GiB", -3])
def test_unclear_size_names_its_path(text):
    with pytest.raises(ConfigError, match=r"^\$\.store\.dram\.bytes: "):
        parse_bytes(text, "$.store.dram.bytes")


@pytest.mark.parametrize(
    ("count", "text"), [(5, "5 B"), (1536, "1.5 KiB"), (2**31, "2.0 GiB"), (3 * 2**40, "3.0 TiB")]
)
def test_sizes_for_people(count, text):
    assert format_bytes(count) == text
