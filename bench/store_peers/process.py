"""A store under test as a process, seen from the controller."""

from __future__ import annotations

import json
from typing import Any

from systems import Worker, WorkerFailed


class StoreWorker(Worker):
    """Speaks the language of `driver.py`."""

    def ask(self, timeout_s: float, **request: Any) -> dict[str, Any]:
        """One request, its answer. Raises WorkerFailed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._read(timeout_s)
        if "error" in answer:
            raise WorkerFailed(answer["error"])
        return answer["done"]
