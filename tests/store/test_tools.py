"""`workmem store`: true numbers, damage found and named, nothing changed by looking, nothing told across tenants."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from workmem.cli.main import main
from workmem.core.errors import ConfigError, IntegrityError
from workmem.core.layout import KVLayout, Namespace
from workmem.store.device import Access
from workmem.store.tools.export import export
from workmem.store.tools.folder_view import read_folder
from workmem.store.tools.gc import collect
from workmem.store.tools.listing import blocks_of, find_chain, find_space
from workmem.store.tools.read_only import ReadOnlyDevice
from workmem.store.tools.stat import stat_of
from workmem.store.tools.verify import verify
from workmem.testing.pages import SLICED, SMALL, Chain, namespace, page_bytes, read_all

pytestmark = pytest.mark.timeout(120)

SECRET = "tenant-secret-salt"
PRIVATE = Namespace(model_fingerprint="private-model", layout=SMALL, tenant_salt=SECRET, adapter="lora-7")
EXTENT = 4096 + SMALL.page_bytes


def run(*words: str) -> int:
    return main(["store", *words])


def files_of(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def filled(kit):
    """A closed store with three namespaces: 6, 2 and 3 blocks."""
    store = kit.open()
    for chain in (Chain(namespace(), 6), Chain(namespace("big", SLICED), 2), Chain(PRIVATE, 3)):
        chain.save(store)
    store.close()
    return kit.folder


def flip(folder: Path, segment: int, offset: int) -> None:
    file = folder / "segments" / f"{segment:010d}.seg"
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 0x10]))


def test_stat_counts_pages_and_bytes_live_and_dead(kit):
    chain = Chain(namespace(), 4)
    store = kit.open()
    chain.save(store)
    lease = store.lease(chain.root, chain.keys[3:], owner="t", ttl_s=10)
    lease.quarantine(0)
    lease.release()
    store.close()
    found = stat_of(read_folder(kit.folder), show_names=True)
    assert (found.pages, found.live_bytes, found.dead_bytes) == (3, 3 * EXTENT, 4096 + EXTENT)
    assert found.segment_bytes == sum(file.stat().st_size for file in (kit.folder / "segments").iterdir())
    assert found.journal_bytes == (kit.folder / "journal").stat().st_size
    # A namespace, four puts and a delete; a namespace and three puts are what counts.
    assert (found.records, found.live_records, found.dead_records) == (6, 4, 2)
    (space,) = found.spaces
    assert (space.pages, space.bytes, space.model, space.tenant) == (3, 3 * EXTENT, "model", "")
    assert space.layout == "fp32 4x2x16, 4 tokens"
    assert found.holder == ""


def test_looking_changes_nothing_and_needs_no_lock(filled, capsys):
    before = files_of(filled)
    root = Chain(namespace(), 1).root.hex()[:12]
    for words in (
        ["stat"],
        ["ls", "--root", root],
        ["verify"],
        ["stat", "--json"],
        ["ls", "--root", root, "--json"],
    ):
        assert run(words[0], str(filled), *words[1:]) == 0
    assert files_of(filled) == before
    assert "not open" in capsys.readouterr().out


def test_looking_beside_a_running_store(kit, capsys):
    chain = Chain(namespace(), 5)
    store = kit.open()
    chain.save(store)
    assert run("stat", str(kit.folder)) == 0
    assert f"open in process {os.getpid()}" in capsys.readouterr().out
    assert run("verify", str(kit.folder)) == 0
    assert run("gc", str(kit.folder)) == 2
    assert f"in use by process {os.getpid()}" in capsys.readouterr().err
    assert read_all(store, chain.root, chain.keys) == 5


def test_names_of_tenants_are_shown_only_where_asked(filled, capsys):
    root = PRIVATE.root().hex()
    assert run("stat", str(filled)) == 0
    assert run("stat", str(filled), "--json") == 0
    assert run("ls", str(filled), "--root", root[:10], "--json") == 0
    assert run("export", str(filled), "--root", root[:10], "--out", str(filled / "out")) == 0
    told = capsys.readouterr().out + (filled / "out.json").read_text()
    for name in (SECRET, "private-model", "lora-7"):
        assert name not in told
    assert root[:12] in told
    assert run("stat", str(filled), "--show-names") == 0
    told = capsys.readouterr().out
    assert SECRET in told
    assert "private-model" in told


def test_ls_lists_blocks_behind_their_parents(kit, capsys):
    trunk = Chain(namespace(), 2)
    branches = [Chain(namespace(), 2, seed=seed, behind=trunk) for seed in (1, 2)]
    store = kit.open()
    for chain in branches:
        chain.save(store)
    store.close()
    assert run("ls", str(kit.folder), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["root"] == trunk.root.hex()
    assert found["of"] == 6
    keys = [block["key"] for block in found["blocks"]]
    assert keys[:2] == [key.hex() for key in trunk.keys]
    tails = [[key.hex() for key in chain.keys[2:]] for chain in branches]
    assert [keys[2:4], keys[4:]] in (tails, tails[::-1])
    assert [block["depth"] for block in found["blocks"]] == [0, 1, 2, 3, 2, 3]
    assert {block["tokens"] for block in found["blocks"]} == {4}
    assert len({(block["segment"], block["offset"]) for block in found["blocks"]}) == 6
    assert run("ls", str(kit.folder), "--limit", "2") == 0
    assert "4 more" in capsys.readouterr().out


def test_a_prefix_that_fits_none_or_several_says_so(filled, capsys):
    assert run("ls", str(filled)) == 2
    assert "fits more than one namespace" in capsys.readouterr().err
    assert run("ls", str(filled), "--root", "zz") == 2
    assert "fits no namespace" in capsys.readouterr().err
    view = read_folder(filled)
    with pytest.raises(ConfigError, match="fits 6 blocks"):
        find_chain(find_space(view, namespace().root().hex()[:10]), "")


@pytest.mark.parametrize("where", ["header", "payload", "padding of the header"])
def test_verify_finds_a_flipped_bit_and_names_the_page(filled, capsys, where):
    view = read_folder(filled)
    space = find_space(view, namespace().root().hex())
    page = list(blocks_of(space))[4]
    distance = {"header": 70, "payload": 4096 + 1234, "padding of the header": 3000}[where]
    flip(filled, page.segment, page.offset + distance)
    assert run("verify", str(filled), "--json") == 1
    told = capsys.readouterr()
    verdict = json.loads(told.out)
    assert verdict["pages"] == 10
    (damage,) = verdict["damage"]
    assert (damage["key"], damage["segment"], damage["offset"]) == (
        page.key.hex()[:12],
        page.segment,
        page.offset,
    )
    assert "1 damaged" in told.err
    assert run("verify", str(filled)) == 1
    assert page.key.hex()[:12] in capsys.readouterr().out


def test_verify_of_a_sound_store_reads_every_page(filled, capsys):
    view = read_folder(filled)
    heard: list[int] = []
    verdict = verify(view, on_read=heard.append)
    assert (verdict.pages, verdict.left, verdict.damage) == (11, 0, [])
    assert sum(heard) == verdict.bytes == stat_of(view, show_names=False).live_bytes
    assert run("verify", str(filled)) == 0
    assert "11 of 11 pages are what was written" in capsys.readouterr().out


def test_verify_tells_pages_that_left_from_damage(kit):
    chain = Chain(namespace(), 3)
    store = kit.open()
    chain.save(store)
    stale = read_folder(kit.folder)
    lease = store.lease(chain.root, chain.keys, owner="t", ttl_s=10)
    for index in range(3):
        lease.quarantine(index)
    lease.release()
    store.close()
    kit.open().close()
    assert list((kit.folder / "segments").iterdir()) == []
    verdict = verify(stale)
    assert (verdict.pages, verdict.left, verdict.damage) == (0, 3, [])


def test_verify_names_segments_that_are_gone_or_foreign(filled):
    view = read_folder(filled)
    (number,) = view.segments
    file = filled / "segments" / f"{number:010d}.seg"
    raw = file.read_bytes()
    file.write_bytes(b"\xff" + raw[1:])
    problems = [damage.problem for damage in verify(read_folder(filled)).damage]
    assert problems == [f"the whole segment is left out: segment {number} carries another file's header"]
    file.unlink()
    damage = verify(read_folder(filled)).damage
    assert len(damage) == 11
    assert all("No such file" in found.problem for found in damage)


def test_gc_takes_dead_pages_and_records_out_and_keeps_the_rest(kit, capsys):
    keep, drop = Chain(namespace(), 20, seed=1), Chain(namespace(), 20, seed=2)
    store = kit.open()
    for index in range(20):
        for chain in (keep, drop):
            store.register(chain.space)
            store.save(chain.root, chain.writes(indices=[index]))
    assert store.flush(20)
    lease = store.lease(drop.root, drop.keys, owner="t", ttl_s=10)
    for index in range(20):
        lease.quarantine(index)
    lease.release()
    store.close()
    done = collect(kit.folder)
    assert done.segment_bytes == (4096 + 40 * EXTENT, 4096 + 20 * EXTENT)
    assert done.records[1] == 21
    assert done.records[0] >= 61
    assert done.damaged == 0
    assert stat_of(read_folder(kit.folder), show_names=False).dead_bytes == 4096
    again = kit.open()
    again.register(keep.space)
    assert read_all(again, keep.root, keep.keys) == 20
    assert again.lookup(drop.root, drop.keys).blocks == 0
    again.close()
    assert run("gc", str(kit.folder)) == 0
    assert "records: 21 -> 21" in capsys.readouterr().out


def test_gc_strikes_damaged_pages_out_and_removes_files_of_others(filled, capsys):
    view = read_folder(filled)
    page = list(blocks_of(find_space(view, namespace().root().hex())))[2]
    flip(filled, page.segment, page.offset + 4096)
    (filled / "segments" / "0000000099.seg").write_bytes(b"what is this")
    assert run("gc", str(filled)) == 0
    assert "1 damaged pages were struck out" in capsys.readouterr().out
    assert not (filled / "segments" / "0000000099.seg").exists()
    after = read_folder(filled)
    verdict = verify(after)
    assert (verdict.pages, verdict.damage, after.page_count) == (10, [], 10)


@pytest.mark.parametrize("ending", ["", ".npy"])
def test_export_reads_back_with_numpy(filled, tmp_path, capsys, ending):
    chain = Chain(namespace(), 6)
    words = [
        "--root",
        chain.root.hex()[:16],
        "--key",
        chain.keys[3].hex()[:16],
        "--out",
        f"{tmp_path}/out{ending}",
    ]
    assert run("export", str(filled), *words) == 0
    assert "4 pages" in capsys.readouterr().out
    array = np.load(tmp_path / "out.npy")
    about = json.loads((tmp_path / "out.json").read_text())
    assert array.shape == (4, 4, 2, 4, 2, 16)
    assert array.dtype == np.float32
    assert about["axes"] == ["block", "layer", "key or value", "token", "head", "dim"]
    for index, block in enumerate(about["blocks"]):
        assert array[index].tobytes() == page_bytes(chain.keys[index], SMALL)
        assert block["key"] == chain.keys[index].hex()
        assert tuple(block["tokens"]) == chain.block(index).tokens
    assert about["namespace"]["layout"] == msgspec.to_builtins(SMALL)


def test_export_of_bfloat16_gives_its_bits(kit, tmp_path):
    layout = KVLayout(dtype="bf16", layers=2, kv_heads=2, head_dim=16, block_tokens=4)
    chain = Chain(namespace("half", layout), 2)
    store = kit.open()
    chain.save(store)
    store.close()
    view = read_folder(kit.folder)
    space = find_space(view, "")
    array_file, _ = export(view, space, list(blocks_of(space)), tmp_path / "half", show_names=False)
    array = np.load(array_file)
    assert (array.shape, array.dtype) == ((2, 2, 2, 4, 2, 16), np.uint16)
    assert array[1].tobytes() == page_bytes(chain.keys[1], layout)
    assert (array.astype("uint32") << 16).view("float32").shape == array.shape


def test_export_of_a_damaged_page_leaves_no_file(filled, tmp_path):
    view = read_folder(filled)
    space = find_space(view, PRIVATE.root().hex())
    pages = list(blocks_of(space))
    flip(filled, pages[1].segment, pages[1].offset + 4096)
    with pytest.raises(IntegrityError, match="not what was written"):
        export(view, space, pages, tmp_path / "out", show_names=False)
    assert list(tmp_path.glob("out.*")) == []


def test_what_is_no_store_says_so(tmp_path, capsys):
    for command in ("stat", "ls", "verify", "gc"):
        assert run(command, str(tmp_path / "none")) == 2
        assert "none does not exist: a server makes its store" in capsys.readouterr().err
        assert run(command, str(tmp_path)) == 2
        assert f"{tmp_path} is no store" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "FORMAT").write_text('{"format":1,"store_id":"00"}')
    with pytest.raises(ConfigError, match="has format 1"):
        read_folder(tmp_path)


def test_a_journal_torn_at_its_end_is_read_up_to_there(filled):
    whole = read_folder(filled)
    with (filled / "journal").open("ab") as stream:
        stream.write(b"BTCH and then the power went")
    torn = read_folder(filled)
    assert torn.torn_bytes == 28
    assert (torn.page_count, torn.journal_bytes) == (whole.page_count, whole.journal_bytes)
    assert verify(torn).damage == []


def test_the_configured_folder_is_the_default(filled, capsys):
    assert run("stat", "--set", f"store.ssd.path={filled}") == 0
    assert str(filled) in capsys.readouterr().out


def test_a_read_only_device_refuses_every_change(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    device = ReadOnlyDevice()
    file = device.open(tmp_path / "file", Access.UPDATE, direct=False)
    file.truncate(0)
    file.sync()
    with pytest.raises(OSError, match="Read-only"):
        file.writev([memoryview(b"x")], 0)
    file.close()
    for change in (
        lambda: device.open(tmp_path / "new", Access.CREATE, direct=False),
        lambda: device.unlink(tmp_path / "file"),
        lambda: device.rename(tmp_path / "file", tmp_path / "other"),
    ):
        with pytest.raises(OSError, match="Read-only"):
            change()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"abc"


def test_the_command_runs_as_a_process(filled):
    done = subprocess.run(
        [sys.executable, "-m", "workmem", "store", "verify", str(filled)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "11 of 11" in done.stdout
