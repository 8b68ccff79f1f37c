"""From a name in the settings, or a number in a page header, to a codec; and what that does to identity."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from workmem.core.errors import ConfigError
from workmem.core.layout import KVLayout
from workmem.store.codecs.approximate import Fp8, Int8
from workmem.store.codecs.contract import Codec, UnreadableError
from workmem.store.codecs.raw import Raw

ZSTD_ID = 1
_BUILT_IN: tuple[Codec, ...] = (Raw(), Int8(), Fp8())
CODEC_NAMES = ("raw", "zstd", "int8", "fp8")
_MARK = "stored-"
"""Begins the part of `quantization` that a tier added."""
_ORDER = "LKNHD"
"""Page order that scales by channel and by row are defined for."""


def codec_by_name(name: str, path: str) -> Codec:
    """The codec that the setting at `path` names. Raises ConfigError on an unknown one, or a missing extra."""
    if name == "zstd":
        try:
            return _zstd()
        except ImportError as problem:
            raise ConfigError(
                f"{path}: 'zstd' needs the package zstandard; install it with: pip install zstandard"
            ) from problem
    for codec in _BUILT_IN:
        if codec.name == name:
            return codec
    raise ConfigError(f"{path}: {name!r} is no codec; choose one of {', '.join(CODEC_NAMES)}")


def codec_by_id(number: int) -> Codec:
    """The codec that a page header names. Raises UnreadableError, a miss, on one this process does not have."""
    if number == ZSTD_ID:
        try:
            return _zstd()
        except ImportError as problem:
            raise UnreadableError(
                "page is compressed with zstd, and the package zstandard is not installed"
            ) from problem
    for codec in _BUILT_IN:
        if codec.id == number:
            return codec
    raise UnreadableError(f"page is stored by codec {number}, which this version does not know")


def stored_layout(layout: KVLayout, codec: Codec) -> KVLayout:
    """The layout to register pages under when a tier keeps them with `codec`.

    Exact codecs leave it alone, so their pages and raw ones are each other's hits. An approximate one adds
    its name to `quantization`, hence another namespace root and other keys: a page that was ever rounded cannot
    be a hit for who asked for exact ones. Raises ConfigError where `codec` cannot read the page order.
    """
    if codec.exact:
        return layout
    if layout.page_order != _ORDER:
        raise ConfigError(
            f"$.store: codec {codec.name!r} needs pages in the order {_ORDER}, these are {layout.page_order!r}; "
            "choose raw or zstd"
        )
    kept = "" if layout.quantization == "none" else f"{layout.quantization}+"
    return msgspec.structs.replace(layout, quantization=f"{kept}{_MARK}{codec.name}")


def is_kept_by(layout: KVLayout, codec: Codec) -> bool:
    """Whether pages of `layout` are those that the approximate `codec` may keep."""
    return layout.quantization.rpartition("+")[2] == f"{_MARK}{codec.name}"


def is_approximate(layout: KVLayout) -> bool:
    """Whether pages of `layout` may have been rounded in a tier."""
    return layout.quantization.rpartition("+")[2].startswith(_MARK)


@lru_cache(maxsize=1)
def _zstd() -> Codec:
    # Here and not above: the package is an extra.
    from workmem.store.codecs.zstd import Zstd  # noqa: PLC0415

    return Zstd()
