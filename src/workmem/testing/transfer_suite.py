"""What every mover has to pass. Subclass the suite, say how to make an endpoint, and let pytest collect it.

class TestMyMover(TransferSuite):
    def make(self, **more: Any) -> Endpoint:
        return Endpoint(MyMover(), **more)
"""

# ruff: noqa: D102 - the names of tests say what they are about

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

from workmem.core.errors import CapacityError, TransferError
from workmem.testing.tier_bench import require
from workmem.testing.transfer_faults import FlippingMover, GatedMover, LossyChannel
from workmem.testing.waiting import wait_until
from workmem.transfer.contract import Access, Memory, Outcome, Part
from workmem.transfer.endpoint import Endpoint
from workmem.transfer.layers import LayerPlan, LayerReader, LayerWriter
from workmem.transfer.messages import Answer, Arrived, Finished, Notify, Opened, Revoke
from workmem.transfer.moving import Moving
from workmem.transfer.region import Region, RemoteWindow
from workmem.transfer.shared_memory import allocate
from workmem.transfer.window import Window

WAIT_S = 10.0
SIZE = 2**18
_SHORT_S = 0.1


class Side(NamedTuple):
    """An endpoint with some memory of its own."""

    endpoint: Endpoint
    memory: memoryview
    region: Region


class TransferSuite(ABC):
    """The contract of `workmem.transfer.contract`, between two endpoints of one process."""

    @abstractmethod
    def make(self, **more: Any) -> Endpoint:
        """An endpoint; `more` are further arguments of it, and `mover` one that wraps what it would have."""

    def memory(self, size: int = SIZE) -> Memory:
        """Memory that the mover takes."""
        return allocate(size)

    @contextmanager
    def side(self, **more: Any) -> Generator[Side]:
        """Closed at the end."""
        memory = self.memory()
        endpoint = self.make(**more)
        try:
            yield Side(endpoint, memory.view, endpoint.register(memory))
        finally:
            require(endpoint.close(WAIT_S), "the endpoint does not close")

    @contextmanager
    def pair(self, **more: Any) -> Generator[tuple[Side, Side]]:
        """The owner of windows, and who uses them; `more` is for the latter."""
        with self.side() as owner, self.side(**more) as user:
            owner.memory[:] = bytes(SIZE)
            user.memory[:] = bytes(range(256)) * (SIZE // 256)
            yield owner, user

    def test_what_is_written_is_there_when_it_is_done(self) -> None:
        with self.pair() as (owner, user):
            window, there = opened(owner, user, 4096, 8192, Access.WRITE)
            parts = [Part(0, 4096, 4096), Part(10_000, 0, 1000), Part(20_001, 1000, 7)]
            moving = user.endpoint.write(there, user.region, parts, WAIT_S)
            require(moving.wait() == (Outcome.DONE,) * 3, f"a write is {moving.wait()}")
            for part in parts:
                require(window.wait(part.there, part.size, WAIT_S) is Outcome.DONE, "it did not arrive")
                theirs = owner.memory[4096 + part.there :][: part.size]
                require(theirs == user.memory[part.here :][: part.size], "it arrived as something else")
            require(
                window.wait(1007, 2, 0) is Outcome.TIMED_OUT, "a byte that was not written counts as there"
            )
            require(bytes(owner.memory[:4096]) == bytes(4096), "it wrote outside its window")
            require(moving.wait_over(WAIT_S), "it does not end")
            user.endpoint.finish(there)
            require(window.close(WAIT_S) is Outcome.DONE, "the window is not free")

    def test_what_is_read_is_what_lies_there(self) -> None:
        with self.pair() as (owner, user):
            owner.memory[:] = user.memory[::-1].tobytes()
            window, there = opened(owner, user, 512, 65536, Access.READ)
            parts = [Part(0, 0, 30_000), Part(40_000, 30_001, 35_535)]
            moving = user.endpoint.read(there, user.region, parts, WAIT_S)
            require(moving.wait() == (Outcome.DONE,) * 2, f"a read is {moving.wait()}")
            for part in parts:
                mine = user.memory[part.here :][: part.size]
                require(mine == owner.memory[512 + part.there :][: part.size], "other bytes came")
            require(window.close(0) is Outcome.DONE, "a reader keeps memory from its owner")
            late = user.endpoint.read(there, user.region, parts, WAIT_S).wait()
            require(late == (Outcome.REFUSED,) * 2, f"what was closed is read, and is {late}")

    def test_memory_of_larger_items_is_refused(self) -> None:
        with self.side() as mine:
            memory = self.memory(4096)
            wide = Memory(cast("memoryview", memory.view.cast("f")), memory.fd)
            flat = Memory(memory.view[::2], memory.fd)
            fixed = Memory(memory.view.toreadonly(), memory.fd)
            for wrong in (wide, flat, fixed):
                require(raises(TransferError, partial(mine.endpoint.register, wrong)), "it is taken")

    def test_what_lies_outside_is_refused_and_moves_nothing(self) -> None:
        with self.pair() as (owner, user):
            _, there = opened(owner, user, 0, 4096, Access.WRITE)
            for part in (
                Part(0, 4000, 97),
                Part(0, -1, 4),
                Part(-1, 0, 4),
                Part(SIZE - 4, 0, 5),
                Part(0, 0, 0),
                Part(0, 0, -4),
            ):
                moving = user.endpoint.write(there, user.region, [Part(0, 8, 8), part], WAIT_S)
                require(moving.wait() == (Outcome.REFUSED,) * 2, f"{part} is {moving.wait()}")
                require(moving.is_over, "what never began is not over")
            require(
                user.endpoint.read(there, user.region, [Part(0, 0, 8)], WAIT_S).wait() == (Outcome.REFUSED,),
                "read",
            )
            require(bytes(owner.memory[:4096]) == bytes(4096), "it wrote")
            for offset, size in ((-1, 8), (0, 0), (SIZE, 1)):
                wrong = (owner.region, offset, size, Access.WRITE)
                require(raises(TransferError, partial(owner.endpoint.grant, *wrong)), "it is granted")

    def test_a_byte_is_written_once(self) -> None:
        with self.pair() as (owner, user):
            _, there = opened(owner, user, 0, 4096, Access.WRITE)
            first = user.endpoint.write(there, user.region, [Part(0, 100, 100)], WAIT_S)
            again = user.endpoint.write(there, user.region, [Part(0, 199, 10)], WAIT_S)
            twice = user.endpoint.write(there, user.region, [Part(0, 300, 10), Part(0, 305, 10)], WAIT_S)
            require(first.wait() == (Outcome.DONE,), "a write failed")
            require(again.wait() == (Outcome.REFUSED,), "a byte was written twice")
            require(twice.wait() == (Outcome.REFUSED,) * 2, "a batch wrote a byte twice")

    def test_a_ticket_lets_one_in_once(self) -> None:
        with self.pair() as (owner, user):
            window, _ = opened(owner, user, 0, 4096, Access.WRITE)
            require(user.endpoint.open(window.ticket, WAIT_S) is Outcome.REFUSED, "it was opened twice")
            closed = owner.endpoint.grant(owner.region, 0, 64, Access.WRITE)
            require(closed.close(0) is Outcome.DONE, "a window that nobody opened is not free")
            require(user.endpoint.open(closed.ticket, WAIT_S) is Outcome.REFUSED, "a closed one was opened")
            require(
                raises(TransferError, lambda: user.endpoint.open(b"nonsense", WAIT_S)), "nonsense is a ticket"
            )

    def test_a_region_that_is_gone_is_not_registered(self) -> None:
        with self.pair() as (owner, user):
            _, there = opened(owner, user, 0, 4096, Access.WRITE)
            require(owner.endpoint.unregister(owner.region) is Outcome.REFUSED, "it went under a window")
            extra = user.endpoint.register(self.memory(4096))
            require(user.endpoint.unregister(extra) is Outcome.DONE, "it does not go")
            require(user.endpoint.unregister(extra) is Outcome.NOT_REGISTERED, "it went twice")
            moving = user.endpoint.write(there, extra, [Part(0, 0, 8)], WAIT_S)
            require(moving.wait() == (Outcome.NOT_REGISTERED,), f"it is {moving.wait()}")
            require(
                raises(TransferError, lambda: user.endpoint.grant(extra, 0, 8, Access.READ)), "it is granted"
            )

    def test_a_region_that_is_registered_later_is_reached(self) -> None:
        with self.pair() as (owner, user):
            opened(owner, user, 0, 64, Access.WRITE)
            memory = self.memory(8192)
            later = Side(owner.endpoint, memory.view, owner.endpoint.register(memory))
            _, there = opened(later, user, 4096, 4096, Access.WRITE)
            moving = user.endpoint.write(there, user.region, [Part(0, 0, 4096)], WAIT_S)
            require(moving.wait() == (Outcome.DONE,), f"it is {moving.wait()}")
            require(memory.view[4096:] == user.memory[:4096], "other bytes arrived")

    def test_bytes_that_change_on_the_way_are_corrupt(self) -> None:
        gate = GatedMover()
        with self.pair(mover=gate.around) as (owner, user):
            window, there = opened(owner, user, 0, 4096, Access.WRITE)
            gate.shut()
            moving = user.endpoint.write(there, user.region, [Part(0, 0, 4096)], WAIT_S)
            require(gate.wait_begun(1, WAIT_S), "it does not begin")
            user.memory[77] ^= 1
            gate.open()
            require(moving.wait() == (Outcome.CORRUPT,), f"it is {moving.wait()}")
            require(window.wait(0, 4096, WAIT_S) is Outcome.CORRUPT, "its owner believes it")

    def test_a_copy_that_differs_from_its_source_is_corrupt(self) -> None:
        with self.pair(mover=FlippingMover) as (owner, user):
            _, there = opened(owner, user, 0, 4096, Access.READ)
            moving = user.endpoint.read(there, user.region, [Part(0, 0, 100), Part(200, 100, 100)], WAIT_S)
            require(moving.wait() == (Outcome.CORRUPT, Outcome.DONE), f"it is {moving.wait()}")

    def test_a_deadline_is_kept_and_memory_waits_for_the_end(self) -> None:
        gate = GatedMover()
        with self.pair(mover=gate.around) as (owner, user):
            window, there = opened(owner, user, 0, 4096, Access.WRITE)
            gate.shut()
            moving = user.endpoint.write(there, user.region, [Part(0, 0, 4096)], 5 * _SHORT_S)
            require(gate.wait_begun(1, WAIT_S), "it does not begin")
            require(moving.wait() == (Outcome.TIMED_OUT,), f"it is {moving.wait()}")
            require(not moving.is_over, "memory that is being read from is given back")
            require(user.endpoint.unregister(user.region) is Outcome.REFUSED, "it went under a batch")
            other = user.endpoint.write(there, user.region, [Part(0, 0, 1)], WAIT_S)
            require(other.wait() == (Outcome.TIMED_OUT,), "a peer that is late costs a deadline again")
            require(
                window.close(_SHORT_S) is Outcome.TIMED_OUT, "memory that is being written to is given back"
            )
            require(owner.endpoint.quarantined_bytes == 4096, "nobody counts it")
            gate.open()
            wait_until(lambda: window.is_free, WAIT_S)
            require(moving.wait_over(WAIT_S), "it does not end")
            require(moving.wait() == (Outcome.TIMED_OUT,), "an outcome has changed")
            require(owner.endpoint.quarantined_bytes == 0, "it is still counted")

    def test_nothing_lands_in_a_window_once_it_is_free(self) -> None:
        gate = GatedMover()
        with self.pair(mover=gate.around) as (owner, user):
            window, there = opened(owner, user, 0, 4096, Access.WRITE)
            gate.shut()
            first = user.endpoint.write(there, user.region, [Part(0, 0, 2048)], WAIT_S)
            queued = user.endpoint.write(there, user.region, [Part(0, 2048, 2048)], WAIT_S)
            require(gate.wait_begun(1, WAIT_S), "it does not begin")
            require(window.close(_SHORT_S) is Outcome.TIMED_OUT, "it is free with a write under way")
            gate.open()
            wait_until(lambda: window.is_free, WAIT_S)
            owner.memory[:4096] = b"\xee" * 4096
            require(first.wait() == (Outcome.REFUSED,), f"what came too late is {first.wait()}")
            require(queued.wait() == (Outcome.REFUSED,), f"what was queued is {queued.wait()}")
            last = user.endpoint.write(there, user.region, [Part(0, 0, 8)], WAIT_S)
            require(last.wait() == (Outcome.REFUSED,), f"what began later is {last.wait()}")
            require(bytes(owner.memory[:4096]) == b"\xee" * 4096, "a late write landed in memory of others")
            require(window.wait(0, 1, 0) is Outcome.REFUSED, "a closed window is waited for")

    def test_a_window_that_is_closed_while_it_is_opened_is_closed_at_both_ends(self) -> None:
        slow = LossyChannel("delay", Opened)
        with self.side(wrap=slow.around) as owner, self.side() as user:
            owner.memory[:] = bytes(SIZE)
            user.memory[:] = b"\xee" * SIZE
            window = owner.endpoint.grant(owner.region, 0, 4096, Access.WRITE)
            with ThreadPoolExecutor(1) as threads:
                opening = threads.submit(user.endpoint.open, window.ticket, WAIT_S)
                wait_until(lambda: window.peer is not None, WAIT_S)
                # This overtakes the answer.
                require(window.close(WAIT_S) is Outcome.DONE, "it is not free")
                there = opening.result()
            assert isinstance(there, RemoteWindow)
            moving = user.endpoint.write(there, user.region, [Part(0, 0, 4096)], WAIT_S)
            require(moving.wait() == (Outcome.REFUSED,), f"it is {moving.wait()}")
            require(bytes(owner.memory[:4096]) == bytes(4096), "it wrote into memory of others")

    def test_quarantine_is_bounded(self) -> None:
        gate = GatedMover()
        with self.side(quarantine_bytes_max=8192) as owner, self.side(mover=gate.around) as user:
            window, there = opened(owner, user, 0, 8000, Access.WRITE)
            gate.shut()
            user.endpoint.write(there, user.region, [Part(0, 0, 8)], WAIT_S)
            require(gate.wait_begun(1, WAIT_S), "it does not begin")
            window.close(0)
            more = (owner.region, 8192, 4096, Access.WRITE)
            require(raises(CapacityError, lambda: owner.endpoint.grant(*more)), "there is no bound")
            gate.open()
            wait_until(lambda: window.is_free, WAIT_S)
            owner.endpoint.grant(*more).close(0)

    def test_who_has_memory_back_is_told_once(self) -> None:
        told: list[int] = []
        with self.pair() as (owner, user):
            window = owner.endpoint.grant(owner.region, 0, 64, Access.WRITE, freed=lambda: told.append(1))
            there = user.endpoint.open(window.ticket, WAIT_S)
            require(isinstance(there, RemoteWindow) and not told, "it is not open")
            window.close(WAIT_S)
            window.close(WAIT_S)
            require(told == [1], f"it was told {len(told)} times")

    def test_a_peer_that_closes_is_gone_and_leaves_memory_free(self) -> None:
        with self.side() as owner:
            with self.side() as user:
                window, _ = opened(owner, user, 0, 4096, Access.WRITE)
                ticket = owner.endpoint.grant(owner.region, 8192, 64, Access.WRITE)
            require(window.wait(0, 1, WAIT_S) is Outcome.PEER_GONE, "nobody hears of it")
            require(window.close(WAIT_S) is Outcome.DONE, "it keeps memory")
            ticket.close(0)
            with self.side() as other:
                _, there = opened(other, owner, 0, 64, Access.WRITE)
                late = other.endpoint.grant(other.region, 64, 64, Access.WRITE)
            require(there.peer.wait_gone(WAIT_S), "nobody hears of it")
            for_nothing = owner.endpoint.write(there, owner.region, [Part(0, 0, 8)], WAIT_S)
            require(for_nothing.wait() == (Outcome.PEER_GONE,), f"it is {for_nothing.wait()}")
            require(owner.endpoint.open(late.ticket, WAIT_S) is Outcome.PEER_GONE, "who is gone is found")

    def test_notices_arrive_once_and_in_order(self) -> None:
        with self.pair() as (owner, user):
            peer = user.endpoint.connect(owner.endpoint.address, WAIT_S)
            require(not isinstance(peer, Outcome), f"connecting is {peer}")
            assert not isinstance(peer, Outcome)
            for number in range(20):
                require(user.endpoint.notify(peer, b"%d" % number, WAIT_S) is Outcome.DONE, "it is lost")
            heard = [owner.endpoint.notice(WAIT_S) for _ in range(20)]
            require([one and one.body for one in heard] == [b"%d" % number for number in range(20)], "order")
            require(owner.endpoint.notice(0.001) is None, "one more came than was sent")
            require(user.endpoint.notify(peer, bytes(65537), WAIT_S) is Outcome.REFUSED, "it has no bound")
            assert heard[0] is not None
            require(owner.endpoint.notify(heard[0].peer, b"back", WAIT_S) is Outcome.DONE, "no way back")
            back = user.endpoint.notice(WAIT_S)
            require(back is not None and back.body == b"back", "it did not come back")

    def test_words_that_are_lost_late_or_twice_cost_time_and_no_byte(self) -> None:
        def held(kind: str, words: type[Any], side: str) -> None:
            lossy = LossyChannel(kind, words)
            more = {"wrap": lossy.around}
            with (
                self.side(**(more if side == "owner" else {})) as owner,
                self.side(**(more if side == "user" else {})) as user,
            ):
                user.memory[:] = bytes(range(256)) * (SIZE // 256)
                self._exchange(owner, user, lossy, f"{kind} {words.__name__} of the {side}")

        cases = [
            (kind, words, side)
            for kind in ("drop", "delay", "twice", "swap")
            for side, said in (("user", (Arrived, Finished, Notify)), ("owner", (Opened, Answer, Revoke)))
            for words in said
        ]
        # They wait more than they compute.
        with ThreadPoolExecutor(len(cases)) as threads:
            for ended in [threads.submit(held, *case) for case in cases]:
                ended.result()

    def _exchange(self, owner: Side, user: Side, lossy: LossyChannel, what: str) -> None:
        """One of everything while words get lost; then, with a channel that keeps them, all is as it should be."""
        window = owner.endpoint.grant(owner.region, 0, 4096, Access.WRITE)
        there = user.endpoint.open(window.ticket, _SHORT_S)
        if isinstance(there, RemoteWindow):
            moving = user.endpoint.write(there, user.region, [Part(0, 0, 4096)], _SHORT_S)
            (outcome,) = moving.wait()
            arrived = window.wait(0, 4096, _SHORT_S)
            require(outcome in {Outcome.DONE, Outcome.TIMED_OUT}, f"{what}: a write is {outcome}")
            require(
                outcome is not Outcome.DONE or arrived is Outcome.DONE, f"{what}: only one side believes it"
            )
            if arrived is Outcome.DONE:
                require(owner.memory[:4096] == user.memory[:4096], f"{what}: other bytes are believed")
            peer = there.peer
            sent = [user.endpoint.notify(peer, b"%d" % number, _SHORT_S) for number in range(3)]
            heard = [one.body for _ in range(4) if (one := owner.endpoint.notice(0.01))]
            require(heard == sorted(set(heard)), f"{what}: notices are {heard}")
            done = {b"%d" % number for number, found in enumerate(sent) if found is Outcome.DONE}
            require(done <= set(heard), f"{what}: {done} were said to arrive, and {heard} did")
            user.endpoint.finish(there)
        if window.close(_SHORT_S) is not Outcome.DONE:
            lossy.heal()
            # Asked again, where the question or the answer was lost.
            window.close(0)
            if isinstance(there, RemoteWindow):
                wait_until(lambda: window.is_free, WAIT_S)
        lossy.heal()

    def test_a_layer_travels_while_the_next_is_computed(self) -> None:
        gate = GatedMover()
        plan = LayerPlan(3, 4096, ((0, 1024), (1024, 3072), (3072, 4000), (4000, 4096)))
        with self.pair(mover=gate.around) as (owner, user):
            window, there = opened(owner, user, 0, plan.size, Access.WRITE)
            writer = LayerWriter(user.endpoint, there, user.region, plan, [40_000, 0, 20_000])
            reader = LayerReader(window, plan)
            overlaps: list[int] = []
            sent: list[Moving] = []
            gate.shut()
            for layer in range(4):
                # "Computing" a layer ends only once the one before is on its way, and has not arrived.
                if layer:
                    require(gate.wait_begun(layer, WAIT_S), f"layer {layer - 1} waits for layer {layer}")
                    overlaps.append(sum(not moving.is_over for moving in sent))
                    gate.let(1)
                    require(reader.wait(layer - 1, WAIT_S) is Outcome.DONE, f"layer {layer - 1} is not there")
                    require(reader.wait(layer, 0) is Outcome.TIMED_OUT, "a layer is there before it was sent")
                sent.append(writer.send(layer, WAIT_S))
            gate.open()
            require(overlaps == [1, 1, 1], f"under way while the next was computed: {overlaps}")
            require(writer.finish() is Outcome.DONE, "not all of it arrived")
            for page, offset in enumerate([40_000, 0, 20_000]):
                mine = user.memory[offset:][:4096]
                require(owner.memory[page * 4096 :][:4096] == mine, f"page {page} is another")
            require(window.close(WAIT_S) is Outcome.DONE and writer.is_over, "memory is not free")

    def test_many_threads_at_a_time(self) -> None:
        problems: list[str] = []

        def work(owner: Side, user: Side, number: int) -> None:
            base = number * 16384
            for turn in range(5):
                window, there = opened(owner, user, base, 16384, Access.WRITE)
                parts = [Part(base + at, at, 4096) for at in range(0, 16384, 4096)]
                found = user.endpoint.write(there, user.region, parts, WAIT_S).wait()
                if set(found) != {Outcome.DONE} or owner.memory[base:][:16384] != user.memory[base:][:16384]:
                    problems.append(f"thread {number}, turn {turn}: {found}")
                user.endpoint.finish(there)
                if window.close(WAIT_S) is not Outcome.DONE:
                    problems.append(f"thread {number}, turn {turn}: not free")

        with self.pair() as (owner, user):
            threads = [threading.Thread(target=work, args=(owner, user, number)) for number in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
        require(not problems, "; ".join(problems[:3]))

    def test_nobody_there_is_gone_within_the_deadline(self) -> None:
        with self.side() as mine:
            started = time.monotonic()
            address = (
                "unix:workmem-transfer-nobody" if mine.endpoint.address.startswith("unix:") else "127.0.0.1:1"
            )
            require(mine.endpoint.connect(address, WAIT_S) is Outcome.PEER_GONE, "somebody is there")
            require(time.monotonic() - started < WAIT_S / 2, "it takes the whole deadline")


def opened(owner: Side, user: Side, offset: int, size: int, access: Access) -> tuple[Window, RemoteWindow]:
    """A window that `owner` grants and `user` has open."""
    window = owner.endpoint.grant(owner.region, offset, size, access)
    there = user.endpoint.open(window.ticket, WAIT_S)
    require(isinstance(there, RemoteWindow), f"opening is {there}")
    assert isinstance(there, RemoteWindow)
    return window, there


def raises(kind: type[Exception], call: Any) -> bool:
    """Whether it does."""
    try:
        call()
    except kind:
        return True
    return False
