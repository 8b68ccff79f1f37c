"""`workmem index watch` shows what engines hold, as text and as JSON."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from workmem.cli import index_watch
from workmem.cli.index_tree import tree_of
from workmem.cli.main import main
from workmem.core.errors import ConfigError
from workmem.index.prefix_view import EngineView, view_of
from workmem.index.residency import Holder, Origin, ResidencyIndex

sys.path.insert(0, str(Path(__file__).parents[1] / "vllm"))
from fake_publisher import FakeSockets, Publisher, stored


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch) -> Publisher:
    made = Publisher()
    made.named = []

    def sockets(*where: str) -> FakeSockets:
        made.named.append(where)
        found = FakeSockets(made, can_replay=bool(where[1]))
        made.all_sockets = [*getattr(made, "all_sockets", []), found]
        return found

    monkeypatch.setattr(index_watch, "zmq_sockets", sockets)
    return made


def answering(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher answers whenever somebody waits."""

    def wait(self, timeout_s: float) -> None:
        for sockets in publisher.all_sockets:
            sockets.serve()

    monkeypatch.setattr("fake_publisher.FakeSocket.wait", wait)


def test_text_shows_contexts_places_and_sessions(publisher, monkeypatch, capsys):
    answering(publisher, monkeypatch)
    publisher.publish(stored([1, 2], session_id="agent-7"), stored([1], medium="STORAGE"))
    words = ["--endpoint", "pod0=tcp://h:1", "--replay", "tcp://h:2", "--topic", "kv", "--every", "0.05"]
    assert main(["index", "watch", *words, "--seconds", "0.2"]) == 0
    shown = capsys.readouterr().out
    assert "pod0 (live): blocks 2 in GPU, 1 in STORAGE" in shown
    assert "2 tokens (1 blocks)  GPU STORAGE  session agent-7" in shown
    assert publisher.named == [("tcp://h:1", "tcp://h:2", "kv")]


def test_json_is_a_line_for_each_change(publisher, capsys):
    publisher.publish(stored([1]))
    words = ["--endpoint", "tcp://h:1", "--every", "0.05", "--seconds", "0.2", "--json"]
    assert main(["index", "watch", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    (engine,) = msgspec.json.decode(lines[0])["engines"]
    assert engine["view"]["engine"] == "tcp://h:1"
    assert engine["is_partial"]


@pytest.mark.parametrize(
    "words",
    [
        {"endpoint": ("a", "b"), "replay": ("c",)},
        {"every": 0.0},
        {"lines": 0},
    ],
)
def test_what_makes_no_sense_is_refused(publisher, words):
    with pytest.raises(ConfigError):
        index_watch.watch(**words)


def test_only_so_many_lines_and_how_many_more():
    index = ResidencyIndex()
    for name in range(10):
        index.stored(Holder("e"), [name], tokens=[1, 2], block_tokens=2, origin=Origin(session="[red]"))
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(tree_of([(view_of(index, "e"), "live"), (EngineView("x", {}, []), "silent")], 3))
    text = console.export_text()
    assert text.count("2 tokens (1 blocks)") == 3
    assert "... 7 more" in text
    assert "[red]" in text
    assert "x (silent): blocks none" in text
    console.file.close()
