"""`Steering` as a client of the host's store has it: each call is one round trip."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from workmem.core.errors import TransferError
from workmem.core.keys import BlockKey
from workmem.core.outcomes import TierName
from workmem.policy.order import Prospect
from workmem.store.contract import PinResult
from workmem.store.host.steering import (
    AnnounceHead,
    BindHead,
    Head,
    PinHead,
    QuotaHead,
    UnpinHead,
    unpack_count,
)
from workmem.store.host.wire import Kind, Malformed


class RemoteSteering:
    """See `store.contract.Steering`. Advice is lost without a server, as blocks are; a quota says so.

    What was said does not outlive the server: its successor knows of no pin, group or quota.
    """

    def say(self, kind: Kind, head: Head, keys: Sequence[BlockKey] = (), *, root: bytes = b"") -> memoryview:
        """The reply. Raises TransferError without a server, ClientError for what cannot be asked."""
        raise NotImplementedError

    def pin(self, root: bytes, keys: Sequence[BlockKey], *, owner: str, name: str, ttl_s: float) -> PinResult:
        """See `Steering.pin`. It is the owner's and outlives this client."""
        try:
            reply = self.say(Kind.PIN, PinHead(root, owner, name, ttl_s), keys, root=root)
        except TransferError:
            return PinResult(blocks=0)
        try:
            return msgspec.json.decode(reply, type=PinResult)
        except msgspec.DecodeError as error:
            raise Malformed(f"a pin's reply that is none: {error}") from error

    def unpin(self, owner: str, name: str) -> bool:
        """See `Steering.unpin`."""
        try:
            return bytes(self.say(Kind.UNPIN, UnpinHead(owner, name))) == b"\x01"
        except TransferError:
            return False

    def announce(self, root: bytes, keys: Sequence[BlockKey], prospect: Prospect) -> int:
        """See `Steering.announce`."""
        try:
            return unpack_count(self.say(Kind.ANNOUNCE, AnnounceHead(root, int(prospect)), keys, root=root))
        except TransferError:
            return 0

    def bind(self, root: bytes, keys: Sequence[BlockKey], group: str) -> int:
        """See `Steering.bind`."""
        try:
            return unpack_count(self.say(Kind.BIND, BindHead(root, group), keys, root=root))
        except TransferError:
            return 0

    def set_quota(
        self, group: str, tier: TierName, *, floor_bytes: int = 0, ceiling_bytes: int | None = None
    ) -> None:
        """See `Steering.set_quota`. Raises TransferError without a server."""
        self.say(Kind.QUOTA, QuotaHead(group, tier, floor_bytes, ceiling_bytes))
