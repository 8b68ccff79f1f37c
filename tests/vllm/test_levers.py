"""What hints do to the store and to the engine's pool, under the small engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import SIZE, FakeVllm, Request

from workmem.core.errors import ClientError
from workmem.engines.vllm import facts
from workmem.engines.vllm.config import VllmConfig
from workmem.engines.vllm.facts import Scope
from workmem.engines.vllm.levers import SESSIONS_MAX, Session, Sessions
from workmem.store.config import DramConfig, SsdConfig, StoreConfig
from workmem.store.host.client import HostStore
from workmem.store.host.server import HostServer
from workmem.store.host.session import HostLimits
from workmem.store.store import Store

PROMPT = list(range(100, 100 + 6 * SIZE + 1))


def opened(folder: Path) -> Store:
    ssd = SsdConfig(path=str(folder), bytes="16MiB", scrub_bytes_per_s=0, io="buffered")
    return Store(StoreConfig(dram=DramConfig(bytes="1MiB"), ssd=ssd))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = opened(tmp_path / "ssd")
    yield made
    made.audit()
    made.close()


@pytest.fixture
def engine(store: Store) -> Iterator[FakeVllm]:
    made = FakeVllm(store, 32, VllmConfig(load_s=5.0, pin_ttl_max_s=100))
    yield made
    made.close()


def ask(engine: FakeVllm, name: str, *actions: dict[str, object], session: str = "", salt: str | None = None):
    params = {"workmem": {"session_id": session, "actions": list(actions)}}
    request = Request(name, PROMPT, kv_transfer_params=params, cache_salt=salt)
    engine.add(request)
    engine.run()
    assert request.answer is not None
    return request.answer["workmem"].get("hints")


def action(kind: str, **payload: object) -> dict[str, object]:
    return {"action_id": kind, "action_type": kind, "payload": payload}


def pins(store: Store) -> float:
    return store.gauges()["store_pins"]


def test_a_request_without_hints_hears_of_none(engine):
    assert ask(engine, "a") is None


@pytest.mark.parametrize("kind", ["Retain", "Share"])
def test_the_store_keeps_what_is_retained_until_it_is_demoted(engine, store, kind):
    said = action(kind, ttl_s=50, **({"group": "g"} if kind == "Share" else {}))
    assert ask(engine, "a", said, session="s") == [{"id": kind, "outcome": "accepted"}]
    assert pins(store) == 1
    ask(engine, "b", action("Demote"), session="s")
    # A group's is not the session's.
    assert pins(store) == (kind == "Share")


def test_a_time_that_is_too_long_is_cut(engine):
    (told,) = ask(engine, "a", action("Retain", ttl_s=1e9), session="s")
    assert told["outcome"] == "clipped"
    assert "100 s" in told["why"]
    (told,) = ask(engine, "b", action("Retain", ttl_s=float("nan")), session="s")
    assert told["outcome"] in ("clipped", "rejected")


def test_a_session_is_brought_to_dram_by_its_name_and_let_go_in_time(tmp_path):
    before = opened(tmp_path / "ssd")
    first = FakeVllm(before, 32)
    ask(first, "a", session="s")
    assert before.flush(5)
    keys = first.side.levers._sessions.get(("", "session/s"))
    first.close()
    before.close()
    after = opened(tmp_path / "ssd")
    second = FakeVllm(after, 32)
    second.side.levers._sessions.set(("", "session/s"), keys)
    other = Request(
        "b",
        PROMPT[::-1],
        kv_transfer_params={"workmem": {"actions": [action("Prefetch", session="s", ttl_s=9)]}},
    )
    second.add(other)
    assert second.side._prefetching.held_bytes == 6 * second.side._prefetching._page_bytes
    second.run()
    assert other.answer["workmem"]["hints"] == [{"id": "Prefetch", "outcome": "accepted"}]
    second.side.levers._clock = lambda: 1e12
    second.side.levers.steps([])
    assert second.side._prefetching.held_bytes == 0
    second.close()
    after.audit()
    after.close()


def test_nobody_reaches_the_session_of_another_tenant(engine):
    ask(engine, "a", session="s", salt="one")
    for kind in ("Prefetch", "Demote"):
        (told,) = ask(engine, kind, action(kind, session="s"), session="t", salt="two")
        assert told["outcome"] == "missing"


def test_sessions_are_bounded():
    known = Sessions()
    for number in range(SESSIONS_MAX + 10):
        known.set(("", str(number)), Session(None, ()))
    assert len(known) == SESSIONS_MAX
    assert known.get(("", "0")) is None


def test_pins_give_way_to_a_request_that_is_none_of_ours(engine):
    """One whose adapter nobody can tell apart."""
    from test_pins import Pool, turn

    pool = Pool()
    levers = engine.side.levers
    levers.bind(pool, longest_tokens=4 * SIZE, step_tokens=SIZE)
    mine = turn(pool, 6)
    levers.pins.pin(("", "session/s"), "", mine, ttl_s=1000)
    pool.free_blocks([pool.blocks[number] for number in mine])
    stranger = Request("x", list(range(13 * SIZE)))
    assert engine.side.match(stranger, 0) == (0, False)
    assert levers.pins.held == 0


@pytest.fixture
def shared(store: Store, tmp_path: Path) -> Iterator[FakeVllm]:
    """Over the host's store, which checks what it is told."""
    server = HostServer(store, tmp_path / "s.sock", HostLimits(), lambda _: None)
    client = HostStore(tmp_path / "s.sock")
    made = FakeVllm(client, 32, VllmConfig(load_s=5.0))
    yield made
    made.close()
    client.close()
    server.close()


@pytest.mark.parametrize("kind", ["Pin", "Retain", "Share", "Demote"])
@pytest.mark.parametrize("salt", ["s" * 4096, "\0" * 400, "\ud800"], ids=["long", "odd", "no text"])
def test_no_salt_and_no_name_of_a_request_is_a_bug_of_ours(shared, kind: str, salt: str):
    """They are the clients' to choose, and the store refuses names that are too long."""
    said = action(kind, ttl_s=50, **({"group": "g" * 256} if kind == "Share" else {}))
    (told,) = ask(shared, "request \ud800" * 100, said, salt=salt)
    assert told["outcome"] in ("accepted", "clipped")
    (told,) = ask(shared, "b", said, session="s" * 256, salt=salt)
    assert told["outcome"] in ("accepted", "clipped")


def test_contexts_of_a_salt_that_is_a_book_are_computed_and_not_kept(shared):
    request = Request("a", PROMPT, cache_salt="s" * 5000)
    shared.add(request)
    shared.run()
    assert request.state == "done"
    assert request.answer is None
    assert shared.side.counts["pages_offered"] == 0


def test_what_the_store_refuses_is_an_outcome(engine, monkeypatch):
    def refuses(*_: object, **__: object) -> None:
        raise ClientError("no")

    monkeypatch.setattr(engine.side._store, "pin", refuses)
    assert ask(engine, "a", action("Retain")) == [{"id": "Retain", "outcome": "rejected", "why": "no"}]


def test_scopes_are_bounded_and_those_used_last_are_known(engine, monkeypatch):
    monkeypatch.setattr(facts, "SCOPES_MAX", 3)
    names, registered = engine.side._namespaces, []
    register = engine.side._store.register
    monkeypatch.setattr(
        engine.side._store, "register", lambda space: registered.append(space.tenant_salt) or register(space)
    )
    for salt in "abcadabce":
        names.of(Scope(salt=salt))
    assert "".join(registered) == "abcdbce"
    assert len(names._known) == 3
