"""What comes by the socket is bounded and checked: nonsense ends its connection and nothing else."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
from array import array
from contextlib import suppress

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workmem.core.keys import BlockKey
from workmem.core.outcomes import MissReason, TierName
from workmem.store.contract import BlockId, SaveState
from workmem.store.host import messages, steering, upkeep_messages, wire
from workmem.store.host.client import HostStore
from workmem.store.host.wire import PREFIX, ErrorCode, Kind, Malformed, Refused
from workmem.store.selector import PurgeSelector
from workmem.testing.pages import SMALL, Chain, namespace, read_all
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

KEYS = st.lists(st.binary(min_size=32, max_size=32).map(BlockKey), max_size=70)
NUMBERS = st.integers(0, 2**64 - 1)
REASONS = st.sampled_from(wire.REASONS)
CHAIN = Chain(namespace("small"), 4)


class Raw:
    """A connection that has said hello and may now say anything."""

    def __init__(self, path, *, version: int = wire.VERSION, hello: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(10)
        self.socket.connect(str(path))
        if hello:
            body = struct.pack("<8sHxxI", wire.MAGIC, version, os.getpid())
            self.send(Kind.HELLO, body)
            self.welcome, fds, _, _ = socket.recv_fds(self.socket, 4096, 2)
            for fd in fds:
                os.close(fd)

    def send(self, kind: int, body: bytes, *, length: int | None = None) -> None:
        try:
            self.socket.sendall(PREFIX.pack(len(body) if length is None else length, kind, 7) + body)
        except OSError:
            return  # The server has hung up already.

    def answer(self) -> tuple[int, bytes] | None:
        """(kind, body) of the next reply; None when the server hung up."""
        data = b""
        try:
            while len(data) < PREFIX.size or len(data) < PREFIX.size + PREFIX.unpack_from(data)[0]:
                part = self.socket.recv(65536)
                if not part:
                    return None
                data += part
        except ConnectionResetError:
            return None
        return PREFIX.unpack_from(data)[1], data[PREFIX.size :]

    def __enter__(self):
        return self

    def __exit__(self, *failure: object) -> None:
        self.socket.close()


@pytest.fixture
def served(host):
    host.serve(ssd=0)
    CHAIN.save(host.client())
    return host


def bodies() -> dict[Kind, bytes]:
    """One sound request of each kind."""
    blocks = [CHAIN.block(0)]
    return {
        Kind.REGISTER: msgspec.json.encode(CHAIN.space),
        Kind.LOOKUP: CHAIN.root + b"".join(CHAIN.keys),
        Kind.LEASE: messages.pack_lease(CHAIN.root, 10.0, "owner", CHAIN.keys),
        Kind.RENEW: messages.pack_renew(5.0, [1, 2]),
        Kind.RELEASE: messages.pack_ids([1]),
        Kind.QUARANTINE: messages.pack_quarantine(1, 0),
        Kind.RESERVE: messages.pack_reserve(CHAIN.root, blocks),
        Kind.COMMIT: messages.pack_ids([1]),
        Kind.ABORT: messages.pack_ids([1]),
        Kind.FINISHED: messages.pack_ids([1]),
        Kind.FLUSH: messages.pack_seconds(0.0),
        Kind.GAUGES: b"",
        Kind.AUDIT: b"",
        Kind.PURGE: upkeep_messages.pack_purge(PurgeSelector(tenant="nobody"), is_rehearsal=True),
        Kind.SCRUB: upkeep_messages.pack_scrub(2**30),
        Kind.PIN: steering.pack_said(steering.PinHead(CHAIN.root, "owner", "pin", 0.1), CHAIN.keys),
        Kind.UNPIN: steering.pack_said(steering.UnpinHead("owner", "pin")),
        Kind.ANNOUNCE: steering.pack_said(steering.AnnounceHead(CHAIN.root, 1), CHAIN.keys),
        Kind.BIND: steering.pack_said(steering.BindHead(CHAIN.root, "group"), CHAIN.keys),
        Kind.QUOTA: steering.pack_said(steering.QuotaHead("nobody", TierName.DRAM, 0, None)),
        Kind.GOODBYE: b"",
    }


@st.composite
def nonsense(draw) -> tuple[int, bytes, int | None]:
    """A message that is random, or a sound one with bytes cut, added or changed, or a wrong length."""
    kind = draw(st.sampled_from(sorted(bodies())) | st.integers(0, 2**16 - 1))
    body = bytearray(bodies().get(kind, b"") if draw(st.booleans()) else draw(st.binary(max_size=300)))
    if body and draw(st.booleans()):
        del body[draw(st.integers(0, len(body) - 1)) :]
    if body and draw(st.booleans()):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    body += draw(st.binary(max_size=40))
    length = draw(st.none() | st.integers(0, 2**32 - 1)) if draw(st.booleans()) else None
    return kind, bytes(body), length


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.lists(nonsense(), min_size=1, max_size=6))
def test_nonsense_ends_its_connection_and_nothing_else(served, sent):
    with Raw(served.socket) as raw:
        for kind, body, length in sent:
            raw.send(kind, body, length=length)
        raw.socket.shutdown(socket.SHUT_WR)
        while raw.answer() is not None:
            pass
    served.store.audit()
    with Raw(served.socket) as raw:
        raw.send(Kind.LOOKUP, CHAIN.root + b"".join(CHAIN.keys))
        assert raw.answer()[0] == Kind.LOOKUP


def test_after_all_that_others_are_served(served):
    rng = random.Random(3)
    for _ in range(60):
        with Raw(served.socket, hello=rng.random() < 0.7) as raw:
            raw.send(rng.randrange(20), rng.randbytes(rng.randrange(200)))
    client = served.client()
    client.register(CHAIN.space)
    assert read_all(client, CHAIN.root, CHAIN.keys) == 4
    wait_until(lambda: client.gauges()["store_host_connections"] == 3)
    assert client.gauges()["store_host_malformed_total"] > 0
    client.audit()


@pytest.mark.parametrize(
    ("kind", "body", "length"),
    [
        (Kind.LOOKUP, b"x" * 33, None),
        (Kind.LOOKUP, b"", wire.BODY_BYTES_MAX + 1),
        (Kind.LEASE, messages.pack_lease(CHAIN.root, 10.0, "owner", CHAIN.keys)[:-1], None),
        (Kind.LEASE, messages.pack_lease(CHAIN.root, float("nan"), "owner", []), None),
        (Kind.LEASE, messages.pack_lease(CHAIN.root, -1.0, "owner", []), None),
        (Kind.COMMIT, b"1234567", None),
        (Kind.RESERVE, CHAIN.root, None),
        (Kind.SETTLED, b"", None),
        (Kind.HELLO, b"", None),
        (999, b"", None),
        (Kind.REGISTER, b"{}", None),
        (
            Kind.REGISTER,
            msgspec.json.encode(namespace("odd", SMALL)).replace(b'"layers":4', b'"layers":-4'),
            None,
        ),
        (
            Kind.REGISTER,
            msgspec.json.encode(namespace("odd", SMALL)).replace(b'"layers":4', b'"layers":0'),
            None,
        ),
    ],
)
def test_malformed_requests_are_hung_up_on(served, kind, body, length):
    with Raw(served.socket) as raw:
        raw.send(kind, body, length=length)
        assert raw.answer() is None


def test_a_stranger_before_hello_is_hung_up_on(served):
    with Raw(served.socket, hello=False) as raw:
        raw.send(Kind.GAUGES, b"")
        assert raw.answer() is None


def test_another_version_is_told_so(served, monkeypatch):
    with Raw(served.socket, version=wire.VERSION + 1) as raw:
        _, kind, _ = PREFIX.unpack_from(raw.welcome)
        assert kind == Kind.ERROR
        refused = messages.unpack_error(memoryview(raw.welcome)[PREFIX.size :])
        assert refused.code is ErrorCode.VERSION
        assert "run the same workmem on both ends" in str(refused)
    monkeypatch.setattr(messages, "pack_hello", lambda pid: struct.pack("<8sHxxI", wire.MAGIC, 9, pid))
    with pytest.raises(Refused, match=f"version {wire.VERSION}, not 9"):
        HostStore(served.socket)


def test_a_server_that_talks_nonsense_is_a_miss(host, tmp_path):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(host.socket))
    listener.listen()

    def answer():
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(PREFIX.pack(5, Kind.HELLO, 0) + b"hello")

    thread = threading.Thread(target=answer)
    thread.start()
    client = host.client(attaches=False)
    client.register(CHAIN.space)
    assert client.lookup(CHAIN.root, CHAIN.keys).reason is MissReason.UNAVAILABLE
    thread.join(10)
    listener.close()
    assert not client.is_attached


def test_whatever_has_a_name_has_a_code():
    assert set(wire.REASONS) == {None, *MissReason}
    assert set(wire.TIERS) == set(TierName)
    assert set(wire.STATES) == {None, *SaveState}


@given(keys=KEYS, owner=st.text(max_size=60), ttl=st.floats(0.001, 1e8))
def test_lease_requests_survive_the_wire(keys, owner, ttl):
    root, stated, name, found = messages.unpack_lease(
        memoryview(messages.pack_lease(b"r" * 32, ttl, owner, keys))
    )
    assert (root, stated, list(found)) == (b"r" * 32, ttl, keys)
    assert owner.encode().startswith(name.encode()[: len(owner.encode())]) or name == owner


@given(
    pages=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=50),
    reason=REASONS,
    number=NUMBERS,
)
def test_lease_replies_survive_the_wire(pages, reason, number):
    offsets, generations = array("Q", [p[0] for p in pages]), array("Q", [p[1] for p in pages])
    leased = messages.unpack_leased(
        memoryview(messages.pack_leased(number, 3.5, len(pages), reason, offsets, generations))
    )
    assert (leased.id, leased.ttl_s, leased.ready, leased.failed) == (number, 3.5, len(pages), reason)
    assert list(leased.numbers) == [*offsets, *generations]


@given(
    blocks=st.lists(
        st.tuples(st.binary(min_size=32, max_size=32), st.integers(0, 2**32 - 1)), min_size=1, max_size=9
    )
)
def test_reservations_survive_the_wire(blocks):
    made = [BlockId(BlockKey(key), key[::-1], (1, 2, 3, 4), depth) for key, depth in blocks]
    body = memoryview(messages.pack_reserve(b"r" * 32, made, "research"))
    assert messages.unpack_reserve(body, 4) == (made, "research")
    states = [SaveState.STORED, None, SaveState.DROPPED, *[None] * (len(blocks) - 1)]
    reserved = messages.unpack_reserved(
        memoryview(messages.pack_reserved(4, 2.0, states, list(range(len(states))))), len(states)
    )
    assert (reserved.first, list(reserved.states), list(reserved.offsets)) == (
        4,
        states,
        list(range(len(states))),
    )


@given(body=st.binary(max_size=200))
def test_replies_of_any_bytes_are_read_or_refused(body):
    view = memoryview(body)
    readers = [
        messages.unpack_welcome,
        messages.unpack_error,
        messages.unpack_registered,
        messages.unpack_found,
        messages.unpack_leased,
        messages.unpack_renewed,
        messages.unpack_settled,
        messages.unpack_seconds,
        lambda raw: messages.unpack_reserved(raw, 3),
        lambda raw: messages.unpack_states(raw, 3),
        lambda raw: messages.unpack_reserve(raw, 4),
        messages.unpack_ids,
    ]
    for read in readers:
        # Anything else it raises fails the test.
        with suppress(Malformed):
            read(view)
