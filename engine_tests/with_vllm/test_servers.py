"""Two vLLM servers on one host's store, asked over HTTP: whatever fails, each request is answered, and rightly.

One of them is started with our command; the other by hand, with a configuration that says nothing of failed loads,
which vLLM takes for `fail`. They compute in fp32, so that an answer is the same whatever was loaded.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import Host, prompt, tiny_model, until
from serving import Answer, Server, by_command, by_hand, free_port

from workmem.engines.vllm.hashes import block_hashes
from workmem.store.host.client import HostStore
from workmem.store.host.place import is_served
from workmem.store.selector import PurgeSelector
from workmem.testing.faulty_device import FaultPlan

pytestmark = pytest.mark.timeout(600)

MODEL = "tiny"
SIZE, BLOCKS = 32, 6
LENGTH = BLOCKS * SIZE + 1
LOAD_S = 1.5
SETTINGS = {"vllm.load_s": str(LOAD_S), "vllm.deny_s": "0.001", "vllm.prefetch_share": "0"}
POOL_TOKENS = 40 * SIZE


class Case(NamedTuple):
    """What happens to the pages of a prompt, and how many blocks are loaded all the same. None: that is a matter of time."""

    name: str
    where: str
    loaded: int | None
    streams: bool = False

    @property
    def ids(self) -> list[int]:
        return prompt(LENGTH, 100 + CASES.index(self))

    @property
    def keys(self) -> list[bytes]:
        return block_hashes(self.ids, SIZE, salt=self.name)


CASES = [
    Case("nothing fails", "dram", BLOCKS),
    Case("nothing fails in a stream", "dram", BLOCKS, streams=True),
    Case("the first page is corrupt", "dram", 0),
    Case("the first page is corrupt in a stream", "dram", 0, streams=True),
    Case("a middle page is corrupt", "dram", 3),
    Case("a middle page is corrupt in a stream", "dram", 3, streams=True),
    Case("the last page is corrupt", "dram", BLOCKS - 1),
    Case("all are purged between lookup and load", "dram", 0),
    Case("a lookup is not answered in time", "dram", None),
    Case("nothing fails below dram", "ssd", BLOCKS),
    Case("the first page on the disk is corrupt", "ssd", 0),
    Case("the first page on the disk is corrupt in a stream", "ssd", 0, streams=True),
    Case("a middle page on the disk is corrupt", "ssd", 3),
    Case("a middle page on the disk is corrupt in a stream", "ssd", 3, streams=True),
    Case("the disk cannot read the first page", "ssd", 0),
    Case("all are purged before the disk is read", "ssd", 0),
    Case("the disk is slower than anybody waits", "ssd", 0),
    Case("the disk is slower than anybody waits in a stream", "ssd", 0, streams=True),
]


class Pair:
    """The store, and both servers."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.faults = FaultPlan()
        self.host = Host(folder, self.faults)
        self.host.start()
        self.events, self.replay = free_port(), free_port()
        self.slow = folder / "slow"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.events}",
            "replay_endpoint": f"tcp://127.0.0.1:{self.replay}",
        }
        words = [
            *("--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
            *("--block-size", str(SIZE), "--num-gpu-blocks-override", str(POOL_TOKENS // SIZE)),
            *("--max-model-len", "1024", "--max-num-batched-tokens", "256"),
        ]
        self.first = Server(
            by_hand(
                model,
                self.host.socket,
                *words,
                *("--kv-events-config", json.dumps(events)),
                settings=SETTINGS,
                kv_connector="SlowSaves",
                kv_connector_module_path="slow_saves",
            ),
            folder,
            "first",
            SLOW_SAVES=str(self.slow),
        )
        self.second = Server(by_command(model, self.host.socket, *words, settings=SETTINGS), folder, "second")
        self.wanted: dict[str, list[int]] = {}

    def ask(self, case: Case, server: Server | None = None, **more: object) -> Answer:
        return (server or self.second).complete(case.ids, model=MODEL, salt=case.name, **more)

    def attached(self, servers: int = 2) -> None:
        """Each has two connections that read."""
        until(lambda: self.host.census("connections") >= 2 * servers, "never attached again")

    def forgotten(self) -> None:
        """Neither server has anything itself."""
        for server in (self.first, self.second):
            until(server.reset, "blocks are never given back")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = tiny_model(tmp_path_factory.mktemp("tiny"))
    # Not pytest's folder: the address of a socket is short.
    with tempfile.TemporaryDirectory(prefix="wm-") as name:
        made = Pair(Path(name), model)
        servers = (made.first, made.second)
        try:
            for server in servers:
                server.wait()
            yield made
        finally:
            for server in servers:
                server.stop()
            made.host.stop()


@pytest.fixture(scope="module")
def computed(pair: Pair) -> Pair:
    """Every prompt was computed by one of them, and all of it is in the store alone."""
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda case: pair.ask(case, pair.first), CASES))
    for case, answer in zip(CASES, answers, strict=True):
        assert answer.sources == {"computed": LENGTH}, case
        pair.wanted[case.name] = answer.tokens
    for case in CASES:
        until(lambda keys=case.keys: pair.host.holds(keys), "never saved")
    pair.host.settle()
    pair.forgotten()
    return pair


@pytest.fixture(scope="module")
def on_disk_alone(computed: Pair) -> Pair:
    computed.host.restart()
    computed.attached()
    computed.forgotten()
    return computed


def once(patch: pytest.MonkeyPatch, owner: object, name: str, act: Callable[[], None]) -> list[bool]:
    """Before the first call of a method. Tells whether there was one."""
    whole, seen = getattr(owner, name), [False]

    def acted(*given: object, **named: object) -> object:
        if not seen[0]:
            seen[0] = True
            act()
        return whole(*given, **named)

    patch.setattr(owner, name, acted)
    return seen


def steer(pair: Pair, case: Case, patch: pytest.MonkeyPatch) -> list[bool]:
    """Bring about what the case is called after. Tells whether it has happened, as far as that is known later."""
    host, name = pair.host, case.name
    bad = {"first": 0, "middle": 3, "last": BLOCKS - 1}
    store = host.store
    assert store is not None
    if "corrupt" in name:
        damage = host.damage_disk if case.where == "ssd" else host.damage
        damage(case.keys[next(index for word, index in bad.items() if word in name)])
    elif "purged" in name:
        return once(patch, store, "lease", lambda: store.purge(PurgeSelector(tenant=name)) and None)
    elif "not answered" in name:
        return once(patch, store, "lookup", lambda: time.sleep(1.5))
    elif "cannot read" in name or "slower" in name:
        place, happened = host.on_disk(case.keys[0]), [False]

        def act(path: Path, offset: int) -> None:
            if (path, offset) == place:
                happened[0] = True
                if "slower" in name:
                    time.sleep(LOAD_S + 1)
                else:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(pair.faults, "before_read", act)
        return happened
    return [True]


def check(pair: Pair, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        happened = steer(pair, case, patch)
        answer = pair.ask(case, streams=case.streams)
    assert happened[0], "nobody met it"
    assert answer.status == 200, answer.said
    assert answer.tokens == pair.wanted[case.name]
    if not case.streams:
        assert sum(answer.sources.values()) == LENGTH
        if case.loaded is not None:
            assert answer.sources["computed"] == LENGTH - case.loaded * SIZE
    # What was computed instead is vLLM's own by now, and nothing that was not.
    assert pair.ask(case).tokens == pair.wanted[case.name]


@pytest.mark.parametrize("case", [case for case in CASES if case.where == "dram"], ids=lambda case: case.name)
def test_what_one_computed_is_right_at_the_other_whatever_fails(computed: Pair, case: Case):
    check(computed, case)


@pytest.mark.parametrize("case", [case for case in CASES if case.where == "ssd"], ids=lambda case: case.name)
def test_what_the_disk_alone_has_is_right_whatever_fails(on_disk_alone: Pair, case: Case):
    check(on_disk_alone, case)


def test_a_prompt_that_vllm_refuses_leaves_nothing_of_ours(computed: Pair):
    """Longer than all of its memory; it had no room for the answer either."""
    before = computed.second.metric("vllm:workmem_pages_offered_total")
    for length in (POOL_TOKENS + SIZE, 1024):
        refused = computed.second.complete(prompt(length, 5), model=MODEL)
        assert refused.status == 400, refused.said
    assert computed.second.metric("vllm:workmem_pages_offered_total") == before
    until(lambda: computed.host.census("leases") == 0, "a lease is left behind")
    # The longest that it takes is served, and all that fits into its memory comes back.
    ids = prompt(1016, 6)
    wanted = computed.second.complete(ids, model=MODEL)
    assert wanted.status == 200
    until(lambda: computed.host.holds(block_hashes(ids, SIZE)), "never saved")
    computed.forgotten()
    again = computed.first.complete(ids, model=MODEL)
    assert again.tokens == wanted.tokens
    assert again.sources == {"dram": 992, "computed": 24}


def test_the_live_tree_is_that_of_the_engine(computed: Pair):
    """`workmem index watch`, which comes late, beside a server at work."""
    ids = prompt(LENGTH, 7)
    computed.first.complete(ids, model=MODEL, session_id="agent-7")
    command = [
        *(sys.executable, "-m", "workmem", "index", "watch", "--json", "--every", "0.2", "--seconds", "60"),
        *("--endpoint", f"e=tcp://127.0.0.1:{computed.events}"),
        *("--replay", f"tcp://127.0.0.1:{computed.replay}"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        ours: list[dict] = []
        try:
            for index, line in enumerate(watching.stdout):
                (engine,) = json.loads(line)["engines"]
                ours = [one for one in stretches(engine["view"]) if "agent-7" in one["sessions"]]
                if [set(one["places"]) for one in ours] == [{"GPU", "CPU"}]:
                    break
                # What was saved is published with a step.
                computed.first.complete(prompt(20, 1000 + index), model=MODEL, n=1)
            else:
                raise AssertionError(f"never seen: {ours}")
        finally:
            watching.kill()
    assert engine["state"] == "live"
    assert ours[0]["tokens"] == BLOCKS * SIZE
    assert ours[0]["start"] == ids[: len(ours[0]["start"])]


def stretches(view: dict) -> Iterator[dict]:
    todo = list(view["contexts"])
    while todo:
        one = todo.pop()
        yield one
        todo += one["below"]


def test_a_store_process_that_stands_still_and_is_killed_under_both(computed: Pair):
    """Stopped, then killed, with requests of both servers under way; its successor has what was on the disk."""
    pair, host = computed, computed.host
    known = [case for case in CASES if case.loaded == BLOCKS]
    host.settle()
    host.stop()
    process = served_apart(host)
    try:
        for how in (signal.SIGSTOP, signal.SIGKILL):
            if how is signal.SIGKILL:
                process.send_signal(signal.SIGCONT)
                until(lambda: attached_to(pair), "never attached again")
            pair.forgotten()
            with ThreadPoolExecutor(4) as threads:
                asked = [
                    (case, threads.submit(pair.ask, case, server))
                    for case in known[:2]
                    for server in (pair.first, pair.second)
                ]
                time.sleep(0.02)
                process.send_signal(how)
                for case, answer in asked:
                    said = answer.result(120)
                    assert said.status == 200, said.said
                    assert said.tokens == pair.wanted[case.name]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        host.start()
    pair.attached()
    pair.forgotten()
    for server in (pair.first, pair.second):
        found = pair.ask(known[-1], server)
        assert found.tokens == pair.wanted[known[-1].name]
        assert found.sources["computed"] == 1


def served_apart(host: Host) -> subprocess.Popen[bytes]:
    said = {
        "store.host.socket": host.socket,
        "store.dram.bytes": "256MiB",
        "store.ssd.path": host.folder / "ssd",
        "store.ssd.bytes": "1GiB",
        "store.ssd.keep_free": "0",
    }
    sets = [word for path, value in said.items() for word in ("--set", f"{path}={value}")]
    process = subprocess.Popen([sys.executable, "-m", "workmem", "store", "serve", *sets])
    until(lambda: is_served(host.socket), "the store does not start")
    return process


def attached_to(pair: Pair) -> bool:
    """Both find what it has."""
    with HostStore(pair.host.socket) as client:
        # Two of each server, and this one's.
        return client.gauges().get("store_host_connections", 0) >= 5


def test_no_side_of_either_went_off(pair: Pair):
    for server in (pair.first, pair.second):
        assert server.metric("vllm:workmem_off") == 0
        assert server.metric("vllm:workmem_bugs_total") == 0


def test_one_that_is_killed_while_it_saves_leaves_the_other_and_no_torn_page(computed: Pair):
    """The last of all: `kill -9` for every process of it, with half of a page in the store's memory."""
    pair, host = computed, computed.host
    ids = prompt(512 + 1, 8)
    keys = block_hashes(ids, SIZE)
    wanted = pair.first.complete(ids, model=MODEL)
    until(lambda: host.holds(keys), "never saved")
    pair.slow.touch()
    half = pair.slow.with_suffix(".half")
    other = prompt(LENGTH, 9)
    threading.Thread(target=fails_quietly, args=(pair.first, other), daemon=True).start()
    until(half.exists, "nothing is being saved")
    assert host.census("reservations") > 0
    assert pair.second.complete(prompt(LENGTH, 10), model=MODEL).status == 200
    pair.first.kill()
    until(lambda: host.census("reservations") == 0, "what it had reserved is never given back")
    assert host.census("stranded_frames") == 0
    assert not host.holds(block_hashes(other, SIZE)[:1]), "half a page is a hit"
    host.store.audit()
    cold = pair.second.complete(other, model=MODEL)
    assert cold.sources == {"computed": LENGTH}
    until(lambda: host.holds(block_hashes(other, SIZE)), "the other one saves nothing any more")
    until(pair.second.reset, "blocks are never given back")
    again = pair.second.complete(other, model=MODEL)
    assert again.tokens == cold.tokens
    assert again.sources == {"dram": BLOCKS * SIZE, "computed": 1}
    longer = pair.second.complete(ids, model=MODEL)
    assert longer.tokens == wanted.tokens
    assert longer.sources == {"dram": 512, "computed": 1}
    host.settle()
    host.store.audit()


def fails_quietly(server: Server, ids: list[int]) -> None:
    """Its server will be killed."""
    try:
        server.complete(ids, model=MODEL)
    except OSError:
        return
