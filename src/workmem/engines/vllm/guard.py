"""Our own bug must never be the engine's: what fails inside a hook switches workmem off there, and vLLM goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

log = logging.getLogger("vllm.workmem")
"""Below vLLM's own logger: what is outside it, nobody sees."""

T = TypeVar("T")


class Guard:
    """Calls hooks. After the first exception `off` says why, and no hook does anything any more.

    `at_off` is called then, before the engine goes on.
    """

    def __init__(self, side: str, at_off: Callable[[], object] = lambda: None) -> None:
        self._side = side
        self._at_off = at_off
        self.off = ""
        self.errors = 0

    def turn_off(self, why: str) -> None:
        """Do nothing from now on."""
        if not self.off:
            self.off = why
            self._at_off()
            log.error("workmem is off in vLLM's %s: %s; vLLM goes on without it", self._side, why)

    def call(self, hook: Callable[[], T], otherwise: T) -> T:
        """What `hook` returns; `otherwise` where it fails or has failed before."""
        return otherwise if self.off else self.always(hook, otherwise)

    def always(self, hook: Callable[[], T], otherwise: T) -> T:
        """As `call`, but also where something has failed before: of what vLLM waits for, or has to be told."""
        try:
            return hook()
        except Exception as error:  # plugin boundary: vLLM would end the engine
            # Once: what is called all the same may fail in every step from now on.
            if not self.off:
                self.errors += 1
                log.exception("workmem met a bug of its own in vLLM's %s", self._side)
                self.turn_off(f"{type(error).__name__}: {error}")
            return otherwise
