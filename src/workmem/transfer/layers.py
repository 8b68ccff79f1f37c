"""A context that travels layer by layer: one is on its way while the next is computed, or loaded.

Both ends know the same `LayerPlan`: a list of pages, all of one size, and where in a page each layer lies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from workmem.transfer.contract import Outcome, Part
from workmem.transfer.endpoint import Endpoint
from workmem.transfer.moving import Moving
from workmem.transfer.region import Region, RemoteWindow
from workmem.transfer.window import Window


class LayerPlan(NamedTuple):
    """`pages` lie in a window one behind the other; `spans` say where in a page each layer begins and ends."""

    pages: int
    page_bytes: int
    spans: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """Bytes of the window."""
        return self.pages * self.page_bytes


class LayerWriter:
    """Sends layers as they are ready, in any order, each once."""

    def __init__(
        self, endpoint: Endpoint, window: RemoteWindow, region: Region, plan: LayerPlan, pages: Sequence[int]
    ) -> None:
        """`pages` are offsets in `region`. The memory stays as it is until `is_over`."""
        self._endpoint, self._window, self._region = endpoint, window, region
        self._plan, self._pages = plan, tuple(pages)
        self._movings: list[Moving] = []

    def send(self, layer: int, within_s: float) -> Moving:
        """Begin to send this layer of all pages, and come back at once."""
        start, end = self._plan.spans[layer]
        parts = [
            Part(page + start, number * self._plan.page_bytes + start, end - start)
            for number, page in enumerate(self._pages)
        ]
        moving = self._endpoint.write(self._window, self._region, parts, within_s)
        self._movings.append(moving)
        return moving

    def finish(self) -> Outcome:
        """Wait for what was sent, and give the window back. DONE where all of it arrived; else the first that did not."""
        outcomes = [outcome for moving in self._movings for outcome in moving.wait()]
        self._endpoint.finish(self._window)
        return next((outcome for outcome in outcomes if outcome is not Outcome.DONE), Outcome.DONE)

    @property
    def is_over(self) -> bool:
        """Whether the pages are one's own again."""
        return all(moving.is_over for moving in self._movings)


class LayerReader:
    """The other end: computes with a layer as soon as that one is there."""

    def __init__(self, window: Window, plan: LayerPlan) -> None:
        self._window, self._plan = window, plan

    def wait(self, layer: int, within_s: float) -> Outcome:
        """Whether this layer of all pages is there, and what was sent."""
        until = time.monotonic() + within_s
        start, end = self._plan.spans[layer]
        for number in range(self._plan.pages):
            offset = number * self._plan.page_bytes + start
            outcome = self._window.wait(offset, end - start, until - time.monotonic())
            if outcome is not Outcome.DONE:
                return outcome
        return Outcome.DONE
