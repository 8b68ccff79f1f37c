"""Which addresses are safe to listen on where nobody is asked for a password."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

import msgspec

from workmem.core.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_SIOCGIFADDR = 0x8915
_REACH_S = 2.0
_IF_INET6 = Path("/proc/net/if_inet6")
DATA_PORTS = "12300-17000"
"""Where Mooncake's clients pick their ports."""


class OwnAddress(msgspec.Struct, frozen=True):
    """An address of this host and the network device that has it."""

    device: str
    address: str


def resolve(host: str) -> list[Address]:
    """Addresses that `host` stands for, none where it has none. May ask the name server."""
    if not host:
        return [ipaddress.IPv4Address(0)]
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):  # ValueError: no name at all, such as 'a..b'.
        return []
    return sorted({ipaddress.ip_address(str(entry[4][0]).split("%")[0]) for entry in found}, key=str)


def is_public(address: Address) -> bool:
    """Whether anybody on the internet may reach it, unless a firewall is in between."""
    return address.is_global and not address.is_multicast


def refuse_public(key: str, host: str, *, allowed: bool) -> None:
    """Raises ConfigError where `host`, set by `cluster.key`, is public, every address of this host, or nothing."""
    found = resolve(host)
    if not found:
        raise ConfigError(f"$.cluster.{key}: {host!r} has no address; write this host's, as in '10.0.0.2'")
    if allowed:
        return
    for address in found:
        if address.is_unspecified:
            raise ConfigError(
                f"$.cluster.{key}: {host!r} is every address of this host, and whoever reaches one reads and removes all "
                "pages; write the address of a network that only your hosts reach, as in '10.0.0.2' "
                "(or, behind a firewall, set cluster.allow_public=true)"
            )
        if is_public(address):
            said = repr(host) if str(address) == host else f"{host!r} ({address})"
            raise ConfigError(
                f"$.cluster.{key}: {said} is a public address, and whoever reaches it reads and removes all pages; "
                "write the address of a network that only your hosts reach, as in '10.0.0.2' "
                "(or, behind a firewall, set cluster.allow_public=true)"
            )


def refuse_public_device(addresses: Iterable[OwnAddress], *, allowed: bool) -> None:
    """Raises ConfigError where this host has a public address: a segment listens on all of them, whatever it is told."""
    found = public_ones(addresses)
    if found and not allowed:
        raise ConfigError(
            f"$.cluster.segment_bytes: a segment listens on every address of this host, and {said_of(found)} is public; "
            f"close TCP ports {DATA_PORTS} there and set cluster.allow_public=true, "
            "or give no memory from this host (cluster.segment_bytes=0)"
        )


def public_ones(addresses: Iterable[OwnAddress]) -> list[OwnAddress]:
    """Those that anybody may reach."""
    return [found for found in addresses if is_public(ipaddress.ip_address(found.address))]


def said_of(addresses: Iterable[OwnAddress]) -> str:
    """For people."""
    return ", ".join(f"{found.address} ({found.device})" for found in addresses)


def own_addresses() -> list[OwnAddress]:
    """Addresses of this host's network devices: the first IPv4 address of each, and every IPv6 address."""
    found: list[OwnAddress] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, device in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", device.encode()[:15]))
            except OSError:
                continue  # It has none.
            found.append(OwnAddress(device, socket.inet_ntoa(answer[20:24])))
    if _IF_INET6.exists():
        for line in _IF_INET6.read_text(encoding="ascii").splitlines():
            words = line.split()
            found.append(OwnAddress(words[-1], str(ipaddress.IPv6Address(int(words[0], 16)))))
    return found


def is_own(address: Address) -> bool:
    """Whether this host can listen on it."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind((str(address), 0))
    except OSError:
        return False
    return True


def is_reached(address: str) -> bool:
    """Whether something takes connections at `address` (host:port); False for anything else."""
    host, _, port = address.rpartition(":")
    if not host or "://" in host:
        return False
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except (OSError, ValueError):  # ValueError: no name, or no port.
        return False
    return True
