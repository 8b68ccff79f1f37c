"""Checks of the pool: how its masters were started, and what has become of it."""

from __future__ import annotations

import re

from workmem.cluster.findings import Case, Finding, note, ok, wrong
from workmem.cluster.here import Program
from workmem.cluster.view import store_view
from workmem.core.units import format_bytes
from workmem.store.tiers.mooncake.options import capacity_bytes
from workmem.transfer.mooncake_library import TIMEOUT_S

CLIENT_TTL_MIN_S = 30
_LEASE_MIN_S = 2.0 * TIMEOUT_S
_LEASE_MAX_S = 120.0
_WATERMARK_MAX = 0.8
_UNITS = {"": 0.001, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_CAPS = ("MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE", "MOONCAKE_OFFLOAD_MAX_PHYSICAL_BYTES")


def master(case: Case) -> Finding:
    """Somebody serves."""
    view = case.view
    if view.pool is None:
        whys = "; ".join(one.problem or f"{one.url} is {one.state}" for one in view.masters)
        if case.is_master_reached:
            return note(
                "master",
                f"{case.config.master} takes connections, and cannot be asked from here ({whys})",
                "run `workmem cluster doctor` on its host; pages are not moved when this host leaves",
            )
        return wrong(
            "master",
            f"none serves: {whys}",
            "`workmem cluster up` starts one; where it runs elsewhere, cluster.admin_urls says where it answers",
        )
    silent = [one.url for one in view.masters if not one.answers]
    if silent:
        return wrong(
            "master",
            f"no answer from {', '.join(silent)}",
            "start it again: the next one to fail leaves none",
        )
    said = ", ".join(f"{one.url} {one.role}" for one in view.masters)
    return ok("master", f"{said}; {len(view.segments)} segments, {view.pool.clients} clients")


def store(case: Case) -> Finding:
    """The store's settings fit the pool."""
    if case.store is None:
        return note(
            "store",
            "store.below is not a pool: what runs with this configuration uses none",
            "set store.below as `workmem cluster up` prints it",
        )
    if case.config.master and case.store.master != case.config.master:
        return wrong(
            "store",
            f"store.below.options has master {case.store.master!r}, and cluster.master is {case.config.master!r}",
            "name the same",
        )
    capacity = capacity_bytes(case.store)
    if case.view.pool is not None and capacity > case.view.pool.capacity_bytes:
        return wrong(
            "store",
            f"capacity in store.below.options is {format_bytes(capacity)}, and the pool has "
            f"{format_bytes(case.view.pool.capacity_bytes)}: stores fill it past its watermark",
            "set capacity to what the pool has, or let the hosts that are missing join",
        )
    return ok("store", f"pool {case.store.pool!r} of {case.store.master}, {format_bytes(capacity)}")


def sealing(case: Case) -> Finding:
    """Who reaches the pool does not read it, where that was asked for."""
    if case.store is None:
        return ok("sealing", "no pool to seal")
    found = store_view(case.store)
    if found.problem:
        return wrong("sealing", found.problem, "stores do not start with it; the same file on every host")
    if found.is_sealed:
        return ok(
            "sealing",
            f"what the store puts is encrypted under key {found.key_id}; others have to have the same",
        )
    if case.has_others:
        return note(
            "sealing",
            "what the store puts lies in the pool in the clear: KV of prompts, and tenants' salts",
            "key_file in store.below.options, the same on every host, where the pool's network is not yours alone",
        )
    return ok("sealing", "in the clear, on this host only")


def client_ttl(case: Case) -> Finding:
    """A busy process is not taken for dead."""
    short = [
        f"{seconds:g} s"
        for one in case.masters
        if (seconds := float(one.flags.get("client_ttl", "10"))) < CLIENT_TTL_MIN_S
    ]
    if not case.masters and not case.config.master and case.config.client_ttl_s < CLIENT_TTL_MIN_S:
        short = [f"{case.config.client_ttl_s} s (cluster.client_ttl_s)"]
    if short:
        return wrong(
            "client-ttl",
            f"a process is taken for dead after {', '.join(short)}: a busy one loses its pages",
            f"cluster.client_ttl_s of {CLIENT_TTL_MIN_S} or more",
        )
    if case.view.pool is not None and case.view.pool.came_back:
        return note(
            "client-ttl",
            f"{case.view.pool.came_back} times a process was taken for dead, or missed its master, and came back without its pages",
            "where no host was restarted, raise cluster.client_ttl_s",
        )
    return ok("client-ttl", f"{_of_masters(case)}, nobody was lost")


def lease(case: Case) -> Finding:
    """A page outlives its transfer, and not by much."""
    for seconds in [_seconds(one.flags.get("default_kv_lease_ttl", "10000")) for one in case.masters] or [
        float(case.config.lease_s)
    ]:
        if seconds < _LEASE_MIN_S:
            return wrong(
                "lease",
                f"a page that is read is held for {seconds:g} s, and a transfer may take {TIMEOUT_S:g} s after waiting as long",
                "cluster.lease_s of 10 or so",
            )
        if seconds > _LEASE_MAX_S:
            return wrong(
                "lease",
                f"a page that was read is held for {seconds:g} s: a pool that is read much has nothing to evict",
                "cluster.lease_s of 10 or so",
            )
    return ok("lease", "what is read is held for longer than its transfer takes")


def watermark(case: Case) -> Finding:
    """A burst of writes finds room."""
    late = [
        share
        for one in case.masters
        if (share := float(one.flags.get("eviction_high_watermark_ratio", "0.9"))) > _WATERMARK_MAX
    ]
    if not case.masters and not case.config.master and case.config.watermark > _WATERMARK_MAX:
        late = [case.config.watermark]
    if late:
        return wrong(
            "watermark",
            f"the master evicts from {max(late):.0%} on: a burst of puts is refused meanwhile",
            "cluster.watermark=0.7 and cluster.evict_share=0.25",
        )
    if case.view.pool is not None and case.view.pool.refused_puts:
        return note(
            "watermark",
            f"{case.view.pool.refused_puts} puts were refused for want of room (stores try again)",
            "where that grows: more memory, or less in cluster.watermark",
        )
    return ok("watermark", "eviction begins early, no put was refused")


def snapshots(case: Case) -> Finding:
    """Nobody relies on them."""
    on = [one for one in case.masters if one.on("enable_snapshot") or one.on("enable_snapshot_restore")]
    if on:
        return wrong(
            "snapshots",
            "a master writes snapshots: what is restored are pages that were just being read, and none else",
            "use etcd with the OpLog (cluster.etcd) where pages must outlive a master",
        )
    return ok("snapshots", "none")


def oplog(case: Case) -> Finding:
    """A new leader knows the pages."""
    blind = [one for one in case.masters if one.on("enable_ha") and not one.on("enable_oplog")]
    if blind or (case.config.etcd and not case.config.oplog):
        return wrong(
            "oplog",
            "masters are elected, and a new one begins with an empty pool",
            "cluster.oplog=true (--enable_oplog) on every master",
        )
    if any(one.on("enable_ha") for one in case.masters) or case.config.etcd:
        return ok("oplog", "a new leader knows the pages")
    if case.has_others and "://" not in case.config.master:
        return note(
            "oplog",
            "one master: when it is restarted the pool is empty, and fills again",
            "cluster.etcd on several hosts, where that costs too much",
        )
    return ok("oplog", "no election here")


def disk(case: Case) -> Finding:
    """Mooncake's own disk tier is whole, where there is one."""
    on = [one for one in case.masters if one.on("enable_offload")]
    both = [one for one in on if one.flags.get("root_fs_dir")]
    if both:
        return wrong(
            "disk",
            "a master has root_fs_dir and enable_offload: pages go the older way, and their files stay for ever",
            "take root_fs_dir out",
        )
    giving = [one for one in case.clients if one.on("enable_offload")]
    if on and not giving:
        return wrong(
            "disk",
            "a master offloads to disk, and no process here takes part: there is no disk tier",
            "take enable_offload out (pages on disk are [store.ssd]'s), or start mooncake_client with it",
        )
    if giving and case.masters and not on:
        return wrong(
            "disk",
            "mooncake_client offloads to disk, and the master does not",
            "--enable_offload=true on both",
        )
    bad = {path: why for path, why in case.offload_paths.items() if why}
    if giving and bad:
        return wrong(
            "disk",
            "; ".join(f"{path} {why}" for path, why in bad.items()),
            "name a folder that is there, not a link",
        )
    return ok("disk", "none of Mooncake's own" if not on else "offload is on at both ends")


def disk_cap(case: Case) -> Finding:
    """Its disk tier does not fill the disk."""
    free = [
        str(one.pid)
        for one in case.clients
        if one.on("enable_offload") and not any(name in one.variables for name in _CAPS)
    ]
    if free:
        return wrong(
            "disk-cap",
            f"process {', '.join(free)} may fill 90% of the disk",
            f"set {_CAPS[0]} (bytes) for it",
        )
    return ok("disk-cap", "nothing fills a disk unbounded")


def hard_pins(case: Case) -> Finding:
    """Hosts can leave."""
    stuck = [one.segment_name for one in case.view.segments if one.status in {"DRAINING", "DRAIN_FAILED"}]
    if stuck:
        return note(
            "hard-pins",
            f"pages are being moved off {', '.join(stuck)}",
            "where that does not end, somebody pinned pages for good (with_hard_pin); workmem never does: use soft pins with a time",
        )
    return ok("hard-pins", "no host waits to leave")


def wheel(case: Case) -> Finding:
    """What was asked for is in the build."""
    for one in case.masters:
        if one.on("enable_kv_events"):
            return wrong(
                "wheel",
                "a master is to publish KV events: builds from PyPI take that flag and do nothing",
                "take it out; stores of workmem hear of each other without",
            )
        backend = one.flags.get("ha_backend_type", "etcd")
        if one.on("enable_ha") and backend != "etcd":
            return wrong("wheel", f"election by {backend} is not in builds from PyPI", "cluster.etcd")
    return ok("wheel", "nothing is asked for that builds from PyPI lack")


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h|)", text.strip())
    return float(match[1]) * _UNITS[match[2]] if match else 0.0


def _of_masters(case: Case) -> str:
    masters: tuple[Program, ...] = case.masters
    if masters:
        return f"{min(float(one.flags.get('client_ttl', '10')) for one in masters):g} s"
    return "the master is on another host" if case.config.master else f"{case.config.client_ttl_s} s"
