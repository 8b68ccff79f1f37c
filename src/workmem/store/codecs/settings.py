"""What `[store.ssd]` says about how pages are kept, as a codec, keys, and the identity that follows."""

from __future__ import annotations

from pathlib import Path

import msgspec

from workmem.core.errors import ConfigError
from workmem.core.layout import Namespace
from workmem.store.codecs.choose import codec_by_name, stored_layout
from workmem.store.codecs.contract import Codec
from workmem.store.codecs.sealing import Keyring, open_keyring
from workmem.store.config import SsdConfig, StoreConfig

_COMPRESSION = "$.store.ssd.compression"


def page_codec(config: StoreConfig) -> Codec:
    """The codec for new pages on ssd. Raises ConfigError on one that rounds where that was not asked for."""
    name = config.ssd.compression
    if name == "off" or config.below.tier != "ssd":
        return codec_by_name("raw", _COMPRESSION)
    codec = codec_by_name(name, _COMPRESSION)
    if not codec.exact and not config.ssd.approximate:
        raise ConfigError(
            f"{_COMPRESSION}: {codec.name!r} rounds what it keeps, so answers change a little; "
            "set store.ssd.approximate to true as well if that is wanted, or choose zstd, which is exact"
        )
    return codec


def page_keyring(config: SsdConfig) -> Keyring | None:
    """The keys that pages and journal are sealed under; None where they lie in the clear."""
    if not config.key_file:
        if config.older_key_files:
            raise ConfigError(
                "$.store.ssd.older_key_files: names keys to open pages with, but there is none to seal with; "
                "name a key file in store.ssd.key_file"
            )
        return None
    older = [Path(file).expanduser() for file in config.older_key_files]
    return open_keyring(Path(config.key_file).expanduser(), older, path="$.store.ssd.key_file")


def kept_namespace(namespace: Namespace, codec: Codec) -> Namespace:
    """What to register `namespace` as where a tier keeps pages with `codec`: itself, unless that rounds them.

    Raises ConfigError where the namespace promises results to the bit, which no rounded page can keep.
    """
    if codec.exact:
        return namespace
    if namespace.arithmetic:
        raise ConfigError(
            f"{_COMPRESSION}: {codec.name!r} rounds pages, and this namespace promises results to the bit; "
            "choose off or zstd, or serve without that promise"
        )
    return msgspec.structs.replace(namespace, layout=stored_layout(namespace.layout, codec))
