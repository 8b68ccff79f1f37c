"""A segment of the pool on this host: the process that owns it, started, heard, ended."""

from __future__ import annotations

import subprocess
import sys
import threading

import msgspec

from workmem.cluster.config import ClusterConfig
from workmem.cluster.owner import Word
from workmem.core.units import parse_bytes

_END_S = 10.0


class SegmentProcess:
    """One at a time; `start` begins another after it ended."""

    def __init__(self, config: ClusterConfig, master: str) -> None:
        self.size_bytes = parse_bytes(config.segment_bytes, "$.cluster.segment_bytes")
        self._options = {
            "master": master,
            "host": config.host,
            "segment": self.size_bytes,
            "protocol": config.protocol,
            "devices": config.devices,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._heard = threading.Event()
        self._word = Word()

    @property
    def name(self) -> str:
        """What the master calls it; empty until it has joined."""
        return self._word.segment

    @property
    def problem(self) -> str:
        """Why it did not join, in its own words; empty where it did, or ended without a word."""
        return self._word.problem

    @property
    def pid(self) -> int:
        """Of the process, 0 where there is none."""
        return self._process.pid if self._process else 0

    @property
    def is_running(self) -> bool:
        """It has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Of the last process."""
        return self._process.poll() if self._process else None

    def start(self) -> None:
        """Begin; `wait` says when it has joined."""
        self._reap()
        self._heard, self._word = threading.Event(), Word()
        self._process = subprocess.Popen(  # noqa: S603  our own program
            [sys.executable, "-m", "workmem.cluster.owner", msgspec.json.encode(self._options).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C is for us: pages are moved first.
            start_new_session=True,
        )
        listener = threading.Thread(
            target=self._listen, args=(self._process, self._heard), name="workmem-segment", daemon=True
        )
        listener.start()

    def wait(self, timeout_s: float) -> bool:
        """Until it has said something. True where it has joined."""
        self._heard.wait(timeout_s)
        return bool(self.name)

    def stop(self) -> None:
        """Close its input, which ends it: the master learns of it at once. Kill one that does not end."""
        self._reap()

    def _reap(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _listen(self, process: subprocess.Popen[bytes], heard: threading.Event) -> None:
        assert process.stdout is not None
        with process.stdout as said:
            for line in said:
                # Its libraries write to the same place.
                if process is self._process and not heard.is_set() and line.startswith(b'{"segment"'):
                    self._word = msgspec.json.decode(line, type=Word)
                    heard.set()
        heard.set()
