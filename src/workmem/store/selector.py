"""Which namespaces to purge, in words that travel: between processes, from a command line, in a request."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Self

import msgspec
from msgspec import Meta

from workmem.core.errors import ConfigError
from workmem.core.layout import Namespace

if TYPE_CHECKING:
    from workmem.store.catalog import Space

SHOWN_DIGITS = 8
"""Hex digits of a digest that stands for a name. A salt is a secret that may be short: they tell no more."""
_ROOT_DIGITS_MIN = 8
_HEX = frozenset("0123456789abcdef")

Name = Annotated[str, Meta(max_length=512)]


class PurgeSelector(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The namespaces that every field fits which is set. Call it with a namespace to ask.

    Raises ConfigError where no field is set, or one cannot fit anything.
    """

    tenant: Name | None = None
    """Salt of the tenant, or the digest that `workmem store stat` shows for it. "" is the one without a name."""
    model: Name | None = None
    """Fingerprint of the weights, or the digest shown for it."""
    epoch: int | None = None
    """Epoch of the weights."""
    root: Annotated[str, Meta(max_length=64)] | None = None
    """First hex digits of the namespace's root, at least 8."""
    everything: bool = False
    """All namespaces; alone."""

    def __post_init__(self) -> None:
        named = [value for value in (self.tenant, self.model, self.epoch, self.root) if value is not None]
        if self.everything == bool(named):
            raise ConfigError("name a tenant, a model, an epoch or a root to purge; or everything, alone")
        if self.root is not None and (len(self.root) < _ROOT_DIGITS_MIN or not _HEX.issuperset(self.root)):
            raise ConfigError(
                f"root {self.root!r}: give at least {_ROOT_DIGITS_MIN} hex digits, in lower case, "
                "of what `workmem store stat` shows"
            )

    def __call__(self, namespace: Namespace) -> bool:
        """Whether `namespace` is one of them."""
        return (
            (self.tenant is None or _names(self.tenant, namespace.tenant_salt))
            and (self.model is None or _names(self.model, namespace.model_fingerprint))
            and (self.epoch is None or self.epoch == namespace.weights_epoch)
            and (self.root is None or namespace.root().hex().startswith(self.root))
        )


class Purged(msgspec.Struct, frozen=True, kw_only=True):
    """What a purge took out, or would take."""

    namespaces: int
    blocks: int
    """Each once, whichever tiers held it."""
    bytes: int
    """Of their pages' payload."""

    @classmethod
    def of(cls, spaces: Iterable[Space]) -> Self:
        """Count what `spaces` hold. Those that hold nothing do not count."""
        held = [(len(space.rows), space.layout.page_bytes) for space in spaces if space.rows]
        return cls(
            namespaces=len(held),
            blocks=sum(blocks for blocks, _ in held),
            bytes=sum(blocks * size for blocks, size in held),
        )


def shown_digest(name: str) -> str:
    """What stands for the name of a model, an adapter or a tenant where it is not to be told; "" for ""."""
    return hashlib.sha256(b"workmem.shown\0" + name.encode()).hexdigest()[:SHOWN_DIGITS] if name else ""


def _names(given: str, name: str) -> bool:
    return given == name or (given != "" and given == shown_digest(name))
