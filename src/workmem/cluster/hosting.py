"""What a host does in a pool, from start to end: what died is started again, what leaves moves its pages first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from workmem.cluster.addresses import is_reached, own_addresses, refuse_public, refuse_public_device
from workmem.cluster.admin import Admin, AdminError, Drained, DrainResult
from workmem.cluster.config import ClusterConfig
from workmem.cluster.master import MasterProcess
from workmem.cluster.segment import SegmentProcess
from workmem.cluster.view import admin_urls
from workmem.core.errors import ConfigError, TransferError
from workmem.core.units import format_bytes, parse_bytes

_LOOK_S = 0.25
_PAUSE_MIN_S = 0.5
_PAUSE_MAX_S = 30.0
_WELL_S = 60.0
"""One that ran for so long failed for another reason than the start."""
Say = Callable[[str], None]


class _Restarts:
    """How long to wait before the next: longer each time it dies young."""

    def __init__(self) -> None:
        self._pause_s = _PAUSE_MIN_S
        self._began = time.monotonic()
        self._due: float | None = None

    def began(self) -> None:
        """It runs."""
        self._began, self._due = time.monotonic(), None

    def died(self) -> float | None:
        """Seconds until the next start; None where that is known already."""
        if self._due is not None:
            return None
        now = time.monotonic()
        self._pause_s = _PAUSE_MIN_S if now - self._began > _WELL_S else min(_PAUSE_MAX_S, 2 * self._pause_s)
        self._due = now + self._pause_s
        return self._pause_s

    def is_due(self) -> bool:
        """Start it now."""
        return self._due is not None and time.monotonic() >= self._due


class Hosting:
    """A master, where this host is to have one, and a segment, where it gives memory."""

    def __init__(self, config: ClusterConfig, say: Say) -> None:
        """Raises ConfigError on addresses that anybody may reach, and on settings that cannot be."""
        refuse_unsafe(config)
        self._config = config
        self._say = say
        self._master = None if config.master else MasterProcess(config)
        self.master_address = self._master.address if self._master else config.master
        has_segment = parse_bytes(config.segment_bytes, "$.cluster.segment_bytes") > 0
        if not has_segment and self._master is None:
            raise ConfigError(
                "$.cluster.segment_bytes: is 0, and cluster.master names a master elsewhere, so that there is nothing to run; "
                "say how much memory this host gives, as in segment_bytes = '16GiB'"
            )
        self._segment = SegmentProcess(config, self.master_address) if has_segment else None
        self._told_pid = 0
        self._restarts = {name: _Restarts() for name in ("master", "segment")}

    @property
    def admin_urls(self) -> tuple[str, ...]:
        """Where masters can be asked."""
        if self._master is None:
            return admin_urls(self._config)
        own = self._master.admin.url
        return (own, *(url for url in self._config.admin_urls if url != own))

    @property
    def segment_name(self) -> str:
        """What the master calls this host's memory; empty where it gives none."""
        return self._segment.name if self._segment else ""

    @property
    def pids(self) -> dict[str, int]:
        """Processes by what they are."""
        parts = {"master": self._master, "segment": self._segment}
        return {name: part.pid for name, part in parts.items() if part is not None}

    def start(self) -> None:
        """Start what is missing and wait for it. Raises ConfigError and TransferError; what was started is stopped."""
        try:
            if self._master is not None:
                self._master.start()
                self._master.wait(self._config.start_s)
                self._restarts["master"].began()
                self._say(f"master at {self.master_address} (process {self._master.pid})")
            elif "://" not in self._config.master:
                self._await_master()
            if self._segment is not None:
                self._join(self._segment)
        except BaseException:
            self._end()
            raise

    def tend(self, stopped: threading.Event) -> None:
        """Start again what dies, until `stopped`."""
        while not stopped.wait(_LOOK_S):
            if self._master is not None and not self._master.is_running and self._may_start("master"):
                self._master.start()
                self._say(f"master at {self.master_address} again (process {self._master.pid})")
            if self._segment is not None:
                self._tend_segment(self._segment)

    def stop(self) -> None:
        """Move pages to other hosts, then end."""
        try:
            if self._segment is not None and self._segment.name and self._segment.is_running:
                self._say(self._drained(self._segment.name))
        finally:
            self._end()

    def _await_master(self) -> None:
        until = time.monotonic() + self._config.start_s
        while not is_reached(self._config.master):
            if time.monotonic() >= until:
                raise TransferError(
                    f"nobody answers at {self._config.master} within {self._config.start_s:g} s: start a master there with "
                    "`workmem cluster up`, let this host through its firewall, or correct cluster.master"
                )
            time.sleep(_LOOK_S)

    def _tend_segment(self, segment: SegmentProcess) -> None:
        if not segment.is_running and self._may_start("segment"):
            segment.start()
        elif segment.name and segment.pid != self._told_pid:
            self._tell(segment)

    def _tell(self, segment: SegmentProcess) -> None:
        self._told_pid = segment.pid
        self._say(f"segment {segment.name} of {format_bytes(segment.size_bytes)} (process {segment.pid})")

    def _join(self, segment: SegmentProcess) -> None:
        until = time.monotonic() + self._config.start_s
        why = ""
        while True:
            segment.start()
            if segment.wait(max(0.1, until - time.monotonic())):
                break
            why = segment.problem or why or _silent(segment.exit_code)
            segment.stop()
            if "$.store.below" in why:
                raise ConfigError(why.replace("$.store.below.tier", "$.cluster.segment_bytes"))
            if time.monotonic() >= until:
                raise TransferError(
                    f"this host's segment cannot join the pool of {self.master_address} within {self._config.start_s:g} s: {why}. "
                    "What Mooncake wrote above says more; give what this host has (cluster.segment_bytes, cluster.protocol, "
                    "cluster.devices), or more time (cluster.start_s)"
                )
            time.sleep(_LOOK_S)
        self._restarts["segment"].began()
        self._tell(segment)

    def _may_start(self, name: str) -> bool:
        restarts = self._restarts[name]
        pause_s = restarts.died()
        if pause_s is not None:
            self._say(f"the {name} ended; it is started again in {pause_s:g} s")
        if not restarts.is_due():
            return False
        restarts.began()
        return True

    def _drained(self, segment: str) -> str:
        if self._master is not None and not self._config.etcd:
            return "the pool ends with its master: pages are not moved"
        problem = "no master serves"
        for url in self.admin_urls:
            admin = Admin(url)
            try:
                if admin.health().service_ready:
                    return _said_of(admin.drain(segment, self._config.drain_s))
            except AdminError as error:
                problem = str(error)
        return f"pages are not moved ({problem}; cluster.admin_urls says where masters answer)"

    def _end(self) -> None:
        if self._segment is not None:
            self._segment.stop()
        if self._master is not None:
            self._master.stop()


def refuse_unsafe(config: ClusterConfig) -> None:
    """Raises ConfigError where anybody may reach what would be started."""
    allowed = config.allow_public
    refuse_public("host", config.host, allowed=allowed)
    gives = parse_bytes(config.segment_bytes, "$.cluster.segment_bytes") > 0
    if not config.master:
        refuse_public("admin_host", config.admin_host, allowed=allowed)
    if gives:
        refuse_public_device(own_addresses(), allowed=allowed)


def _silent(exit_code: int | None) -> str:
    return "it has not answered" if exit_code is None else f"it ended without a word (exit code {exit_code})"


def _said_of(drained: Drained) -> str:
    if drained.result is DrainResult.NOWHERE:
        return "no other host gives memory: pages are not moved"
    why = f" ({drained.message})" if drained.message else ""
    rest = (
        f", {drained.stayed} stayed: {drained.result}{why}" if drained.result is not DrainResult.DONE else ""
    )
    return f"{drained.moved} objects moved to other hosts{rest}"
