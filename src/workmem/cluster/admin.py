"""What a master says of itself over HTTP, and the one thing it is told: to move pages off a segment.

Its answers are not believed to be well formed: what cannot be read is an `AdminError`, never a traceback.
"""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from enum import StrEnum
from typing import TypeVar

import msgspec

ASK_S = 3.0
_BYTES_MAX = 16 * 2**20
_POLL_S = 0.1
_UNDER_WAY = {"CREATED", "PLANNING", "RUNNING"}
_SAMPLE = re.compile(r"^(\w+) (\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)$", re.MULTILINE)
T = TypeVar("T")


class AdminError(OSError):
    """A master does not answer, or not in a way that can be read."""


class Health(msgspec.Struct, frozen=True):
    """`/health`."""

    role: str = ""
    ha_state: str = ""
    service_ready: bool = False
    leader_address: str | None = None


class PoolSegment(msgspec.Struct, frozen=True):
    """A part of the pool, as its master sees it."""

    segment_name: str
    te_endpoint: str = ""
    protocol: str = ""
    status: str = ""
    size_bytes: int = 0
    allocator_used_bytes: int = 0
    client_id: str = ""

    @property
    def host(self) -> str:
        """The name that its owner goes by, without the port."""
        return self.segment_name.rpartition(":")[0] or self.segment_name


class _Segments(msgspec.Struct, frozen=True):
    segments: tuple[PoolSegment, ...] = ()


class _Job(msgspec.Struct, frozen=True):
    job_id: str = ""
    status_name: str = "CREATED"
    succeeded_units: int = 0
    failed_units: int = 0
    blocked_units: int = 0
    message: str = ""


class DrainResult(StrEnum):
    """How it ended."""

    DONE = "done"
    NOWHERE = "nowhere to move pages to"
    PARTLY = "some pages stayed"
    LATE = "not done in time"


class Drained(msgspec.Struct, frozen=True):
    """What became of a segment's pages, in objects of the pool."""

    result: DrainResult
    moved: int = 0
    stayed: int = 0
    message: str = ""


class Admin:
    """A master's HTTP server at `url`. Every method blocks for `ASK_S` at most and raises AdminError."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def health(self) -> Health:
        """Whether it serves, and as what."""
        return self._read("/health", Health)

    def segments(self) -> tuple[PoolSegment, ...]:
        """All parts of the pool, by name."""
        found = self._read("/get_segments_detail", _Segments).segments
        return tuple(sorted(found, key=lambda one: one.segment_name))

    def metrics(self) -> dict[str, float]:
        """Counts and sizes without labels, by name."""
        text = self._ask("GET", "/metrics").decode(errors="replace")
        return {name: float(value) for name, value in _SAMPLE.findall(text)}

    def drain(self, segment: str, timeout_s: float) -> Drained:
        """Have the master move all pages off `segment`. Given up, and told to stop, after `timeout_s`."""
        others = [
            one.segment_name for one in self.segments() if one.segment_name != segment and one.status == "OK"
        ]
        if not others:
            return Drained(DrainResult.NOWHERE)
        body = {"segments": [segment], "target_segments": others, "max_concurrency": 8}
        job = self._read("/api/v1/drain_jobs", _Job, body)
        query = "?" + urllib.parse.urlencode({"job_id": job.job_id})
        until = time.monotonic() + timeout_s
        while True:
            job = self._read(f"/api/v1/drain_jobs/query{query}", _Job)
            stayed = job.failed_units + job.blocked_units
            if job.status_name not in _UNDER_WAY:
                result = DrainResult.PARTLY if stayed else DrainResult.DONE
                return Drained(result, job.succeeded_units, stayed, job.message)
            if time.monotonic() >= until:
                self._ask("POST", f"/api/v1/drain_jobs/cancel{query}", b"")
                return Drained(DrainResult.LATE, job.succeeded_units, stayed, job.message)
            time.sleep(_POLL_S)

    def _read(self, path: str, kind: type[T], body: object = None) -> T:
        sent = None if body is None else msgspec.json.encode(body)
        said = self._ask("GET" if sent is None else "POST", path, sent)
        try:
            return msgspec.json.decode(said, type=kind)
        except msgspec.MsgspecError as error:
            raise AdminError(f"{self.url}{path} answers what cannot be read: {error}") from error

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        # The pattern of the setting lets http:// through and nothing else; proxies know nothing of a private network.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            request = urllib.request.Request(self.url + path, data=body, method=method)  # noqa: S310
            request.add_header("Content-Type", "application/json")
            with opener.open(request, timeout=ASK_S) as answer:
                return answer.read(_BYTES_MAX)
        except urllib.error.HTTPError as error:
            with error:
                # A page of another server has lines.
                said = " ".join(error.read(200).decode(errors="replace").split())
            raise AdminError(f"{self.url}{path} answers {error.code}: {said}") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise AdminError(f"no answer from {self.url}: {error}") from error
