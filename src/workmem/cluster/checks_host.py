"""Checks of this host: what is installed, what it is called, who can reach it."""

from __future__ import annotations

import ipaddress

from workmem.cluster.addresses import DATA_PORTS, is_public, public_ones, said_of
from workmem.cluster.findings import Case, Finding, is_loopback, note, ok, wrong
from workmem.core.units import format_bytes, parse_bytes

_CPU_BUILD = "mooncake-transfer-engine-non-cuda"
_DATA_PORTS = range(12300, 17001)


def libraries(case: Case) -> Finding:
    """What Mooncake needs of the system."""
    missing = case.here.missing_libraries
    if missing:
        return wrong(
            "libraries",
            f"not there: {', '.join(missing)}",
            f"on Debian and Ubuntu: apt-get install {' '.join(missing)}",
        )
    return ok("libraries", "all that Mooncake needs of the system are there")


def build(case: Case) -> Finding:
    """The right build of Mooncake, one of it, and it loads."""
    builds = case.here.builds
    said = ", ".join(f"{name} {version}" for name, version in builds.items())
    if not builds:
        return wrong("build", "Mooncake is not installed", "pip install 'workmem[mooncake]'")
    if len(builds) > 1:
        return wrong(
            "build",
            f"{said}: they overwrite each other's files",
            "pip uninstall all of them, then install one",
        )
    if case.here.import_problem:
        wanted = (
            "is for another machine" if not case.here.missing_libraries else "wants for libraries (see above)"
        )
        return wrong(
            "build",
            f"{said} does not load: {case.here.import_problem}",
            f"where it {wanted}: {_CPU_BUILD} without a GPU, mooncake-transfer-engine for CUDA 12, its -cuda13 for CUDA 13",
        )
    if case.here.has_gpu and _CPU_BUILD in builds:
        return note(
            "build",
            f"{said} on a host with a GPU: it loads, and knows nothing of the GPU's memory",
            "for CUDA 12 mooncake-transfer-engine, for CUDA 13 its -cuda13, in its place",
        )
    return ok("build", f"{said} loads")


def address(case: Case) -> Finding:
    """The name that this host goes by leads others to it."""
    host = case.config.host
    names = {host, *([case.store.host] if case.store else [])}
    if not case.host_addresses:
        return wrong(
            "address", f"cluster.host {host!r} has no address", "set cluster.host to this host's address"
        )
    if not case.host_is_own:
        return wrong(
            "address",
            f"cluster.host {host!r} is no address of this host: peers would go elsewhere",
            "set cluster.host to one that `ip address` lists",
        )
    local = sorted(name for name in names if is_loopback(name))
    if local and case.has_others:
        return wrong(
            "address",
            f"{', '.join(local)} leads each host to itself, and other hosts take part",
            "set cluster.host, and host in store.below.options, to this host's address on their network",
        )
    strays = sorted({one.segment_name for one in case.view.segments if is_loopback(one.host)})
    if strays and len({one.host for one in case.view.segments}) > 1:
        return wrong(
            "address",
            f"segments {', '.join(strays)} name no host: others read their own memory in its place",
            "set cluster.host on the hosts that they belong to",
        )
    if local:
        return note("address", f"{host}: for this host alone", "set cluster.host before another host joins")
    return ok("address", f"{host} is this host's")


def bind(case: Case) -> Finding:
    """Nobody else reaches what has no password."""
    opened = sorted(
        f"{name.removeprefix('mooncake_')} {port}"
        for one in case.masters
        for name, port in _everywhere(one.flags)
    )
    if opened:
        return wrong(
            "bind",
            f"a master listens on every address of this host: {', '.join(opened)}",
            "start it with `workmem cluster up`, or with --rpc_address and --metrics_host of a network of your own",
        )
    public = public_ones(case.here.addresses)
    listening = [port for port in case.here.open_ports if port in _DATA_PORTS]
    if public and listening:
        return wrong(
            "bind",
            f"{said_of(public)} is public, and data ports are open on every address: {', '.join(map(str, listening))}",
            f"close TCP ports {DATA_PORTS} in the firewall to all but your hosts",
        )
    if any(is_public(ipaddress.ip_address(one)) for one in case.host_addresses):
        return wrong(
            "bind",
            f"cluster.host {case.config.host!r} is public",
            "set it to an address that only your hosts reach",
        )
    if listening:
        return note(
            "bind",
            f"data ports are open on every address, none of them public: {', '.join(map(str, listening))}",
            f"let only your hosts reach TCP ports {DATA_PORTS}; nothing asks for a password, and a tenant's salt is none",
        )
    return ok("bind", "nothing of Mooncake is open to the world")


def admin(case: Case) -> Finding:
    """Who can empty the pool."""
    reach = sorted(
        {
            one.flags.get("metrics_host", "0.0.0.0")  # noqa: S104  its default, which we warn of
            for one in case.masters
        }
        | {case.config.admin_host}
    )
    if all(is_loopback(host) for host in reach):
        return ok("admin", f"masters are asked on {', '.join(reach)} only")
    return note(
        "admin",
        f"whoever reaches {', '.join(host for host in reach if not is_loopback(host))} can list and remove all pages over HTTP",
        "let only hosts of the pool reach that port; or leave cluster.admin_host at 127.0.0.1, without moving pages when others leave",
    )


def transports(case: Case) -> Finding:
    """The ways that bytes can go from here, and why not the others."""
    there = [one.name for one in case.transports if one.is_there]
    missing: dict[str, list[str]] = {}
    for one in case.transports:
        if not one.is_there:
            missing.setdefault(one.why, []).append(one.name)
    found = f"bytes can go by {', '.join(there)}"
    found += "".join(f"; not by {', '.join(names)}: {why}" for why, names in missing.items())
    wanted = case.store.protocol if case.store else "tcp"
    if case.store and wanted not in there:
        return wrong(
            "transports",
            found,
            f"store.below.options says protocol = {wanted!r}: set it to one of them, or mend what is missing",
        )
    return ok("transports", found)


def rdma(case: Case) -> Finding:
    """How bytes travel, and what that asks of the host."""
    devices, config = case.here.rdma_devices, case.config
    if config.protocol == "tcp":
        if devices:
            return note(
                "rdma",
                f"tcp, though there is {', '.join(devices)}",
                "cluster.protocol=rdma, and protocol in store.below.options, are some times faster; what works over tcp is to be tried there anew",
            )
        return ok("rdma", "tcp, and no device for rdma")
    if not devices:
        return wrong("rdma", "cluster.protocol is rdma, and there is no device", "set cluster.protocol=tcp")
    unknown = sorted(set(filter(None, config.devices.split(","))) - set(devices))
    if unknown:
        return wrong(
            "rdma", f"cluster.devices names {', '.join(unknown)}", f"there are: {', '.join(devices)}"
        )
    size = parse_bytes(config.segment_bytes, "$.cluster.segment_bytes")
    if 0 <= case.here.memlock_bytes < size:
        return wrong(
            "rdma",
            f"{format_bytes(case.here.memlock_bytes)} may be locked, and the segment has {format_bytes(size)}",
            "raise it: LimitMEMLOCK=infinity in a unit, ulimit -l unlimited in a shell",
        )
    return ok("rdma", f"rdma over {config.devices or ', '.join(devices)}")


def names(case: Case) -> Finding:
    """What two processes call one block is the same."""
    if not case.here.names_agree:
        return wrong(
            "names",
            "a block's name depends on PYTHONHASHSEED here, or cannot be computed",
            "`workmem version` says what is installed; install it anew, the same on all hosts",
        )
    if case.store is None:
        return ok("names", "a block's name does not depend on PYTHONHASHSEED")
    return ok(
        "names",
        f"pool {case.store.pool!r}; names are digests over model, layout, adapter and tenant, whatever PYTHONHASHSEED is",
    )


def _everywhere(flags: dict[str, str]) -> list[tuple[str, str]]:
    wide = {"0.0.0.0", "::", ""}  # noqa: S104  what is warned of
    found: list[tuple[str, str]] = []
    if flags.get("rpc_address", "0.0.0.0") in wide:  # noqa: S104
        found.append(("rpc_port", flags.get("rpc_port", flags.get("port", "50051"))))
    if flags.get("metrics_host", "0.0.0.0") in wide:  # noqa: S104
        found.append(("metrics_port", flags.get("metrics_port", "9003")))
    return found
