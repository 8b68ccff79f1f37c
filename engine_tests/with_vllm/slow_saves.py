"""Our connector, but that saving stands still in the middle of a page while a file says so: for test_servers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from workmem.plugins.vllm import WorkmemConnector


class SlowSaves(WorkmemConnector):
    """`SLOW_SAVES` names the file. It is renamed to `....half` once half of a page is written."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None
        blocks = self._worker._blocks
        copy, asked = blocks.copy_out, Path(os.environ["SLOW_SAVES"])

        def half(block: int, into: memoryview) -> tuple[int, ...]:
            if asked.exists():
                whole = bytearray(len(into))
                copy(block, memoryview(whole))
                into[: len(into) // 2] = whole[: len(into) // 2]
                asked.rename(asked.with_suffix(".half"))
                time.sleep(600)
            return copy(block, into)

        blocks.copy_out = half
