"""What is said about ways for bytes: which there are, and why not the others."""

from __future__ import annotations

import pytest

from workmem.core.errors import ConfigError, TransferError
from workmem.transfer import transports
from workmem.transfer.mooncake_engine import MooncakeMover
from workmem.transfer.transports import Device, known_transports, network_cards


def by_name(**more):
    return {transport.name: transport for transport in known_transports(**more)}


def cards_in(folder, **states):
    for name, state in states.items():
        port = folder / name / "ports" / "1"
        port.mkdir(parents=True)
        (folder / name / "device").mkdir()
        (folder / name / "device" / "numa_node").write_text("1\n")
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("200 Gb/sec (4X HDR)\n")
    return folder


def test_the_installed_build_has_tcp_and_says_what_it_lacks(tmp_path):
    found = by_name(cards=tmp_path)
    assert found["shared memory"].is_there
    assert found["tcp"].is_there
    assert not found["rdma"].is_there
    assert "no network card" in found["rdma"].why
    assert not found["nvmeof"].is_there
    assert "build" in found["nvmeof"].why
    order = [transport.is_there for transport in known_transports(tmp_path)]
    assert order == sorted(order, reverse=True)


def test_rdma_is_there_with_an_active_card_and_all_cards_are_told(tmp_path):
    cards = cards_in(tmp_path, mlx5_0="4: ACTIVE", mlx5_1="1: DOWN")
    found = by_name(cards=cards)["rdma"]
    assert found.is_there
    assert found.devices[0] == Device("mlx5_0", 1, "4: ACTIVE", "200 Gb/sec (4X HDR)")
    assert [device.name for device in network_cards(cards)] == ["mlx5_0", "mlx5_1"]


def test_rdma_is_not_there_while_its_cards_are_down(tmp_path):
    found = by_name(cards=cards_in(tmp_path, mlx5_0="1: DOWN"))["rdma"]
    assert not found.is_there
    assert "active" in found.why
    assert len(found.devices) == 1


def test_without_mooncake_shared_memory_is_left_and_the_rest_says_what_to_install(monkeypatch):
    def absent():
        raise ConfigError("pip install 'workmem[mooncake]'")

    monkeypatch.setattr(transports, "load_engine", absent)
    found = known_transports()
    assert [transport.name for transport in found if transport.is_there] == ["shared memory"]
    assert all("pip install" in transport.why for transport in found if not transport.is_there)


def test_a_protocol_that_the_build_lacks_is_refused():
    """Mooncake starts with any word for it."""
    with pytest.raises(TransferError, match="has no nvmeof; it has rdma, tcp"):
        MooncakeMover("127.0.0.1", "nvmeof")
