"""What may be listened on without a password, and what is refused in words."""

from __future__ import annotations

import ipaddress

import pytest

from workmem.cluster.addresses import (
    OwnAddress,
    is_own,
    is_reached,
    own_addresses,
    refuse_public,
    refuse_public_device,
)
from workmem.cluster.config import ClusterConfig
from workmem.cluster.hosting import Hosting
from workmem.core.errors import ConfigError


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "10.0.0.2", "172.16.3.4", "192.168.1.1", "fd00::7", "100.64.0.9"]
)
def test_private_addresses_are_taken(host):
    refuse_public("host", host, allowed=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "8.8.8.8", "2001:4860:4860::8888", ""])
def test_public_and_wildcard_addresses_are_refused_unless_told(host):
    with pytest.raises(ConfigError) as refused:
        refuse_public("admin_host", host, allowed=False)
    said = str(refused.value)
    assert said.startswith("$.cluster.admin_host: ")
    assert repr(host) in said
    assert "cluster.allow_public=true" in said
    assert "'10.0.0.2'" in said
    refuse_public("admin_host", host, allowed=True)


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 64, "a\0b"])
def test_a_name_without_an_address_is_refused_whatever_is_allowed(host):
    with pytest.raises(ConfigError, match=r"has no address") as refused:
        refuse_public("host", host, allowed=True)
    assert str(refused.value).startswith(f"$.cluster.host: {host!r} ")


@pytest.mark.parametrize("address", ["a..b:50051", "127.0.0.1:port", "10.0.0.1:"])
def test_nobody_is_reached_at_what_is_no_address(address):
    assert not is_reached(address)


def test_memory_of_a_host_with_a_public_address_is_refused_unless_told():
    mixed = [OwnAddress("lo", "127.0.0.1"), OwnAddress("eth0", "10.0.0.2"), OwnAddress("eth1", "8.8.8.8")]
    with pytest.raises(
        ConfigError, match=r"\$\.cluster\.segment_bytes: .*8\.8\.8\.8 \(eth1\) is public.*12300-17000"
    ):
        refuse_public_device(mixed, allowed=False)
    refuse_public_device(mixed, allowed=True)
    refuse_public_device(mixed[:2], allowed=False)


def test_a_host_knows_its_own_addresses():
    assert "127.0.0.1" in {found.address for found in own_addresses()}
    assert is_own(ipaddress.ip_address("127.0.0.1"))
    assert not is_own(ipaddress.ip_address("198.51.100.77"))


@pytest.mark.parametrize("key", ["host", "admin_host"])
def test_nothing_starts_on_every_address(key):
    with pytest.raises(ConfigError, match=rf"\$\.cluster\.{key}: '0\.0\.0\.0' is every address"):
        Hosting(ClusterConfig(port=0, admin_port=0, **{key: "0.0.0.0"}), lambda text: None)


@pytest.mark.parametrize("settings", [{"port": 0, "admin_port": 0}, {"port": 0}])
@pytest.mark.parametrize("key", ["host", "admin_host"])
def test_an_address_of_another_host_is_refused(key, settings):
    said = rf"\$\.cluster\.{key}: '10\.9\.9\.9' is no address of this host"
    with pytest.raises(ConfigError, match=said):
        Hosting(ClusterConfig(allow_public=True, **settings, **{key: "10.9.9.9"}), lambda text: None)


def test_nothing_to_run_is_refused():
    with pytest.raises(ConfigError, match=r"\$\.cluster\.segment_bytes: is 0"):
        Hosting(ClusterConfig(master="127.0.0.1:1", segment_bytes=0), lambda text: None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"master": "10.0.0.1:50051", "etcd": "10.0.0.5:2379"}, "master = 'etcd://10.0.0.5:2379'"),
        ({"master": "10.0.0.1"}, "neither host:port nor etcd://host:port"),
        ({"master": "10.0.0.1:99999"}, "neither host:port"),
    ],
)
def test_what_contradicts_itself_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        ClusterConfig(**settings)
