"""Each thing that operators get wrong is found, by name, with what to do; and a sound pool is called sound."""

from __future__ import annotations

import msgspec
import pytest

from workmem.cli.main import main
from workmem.cluster import doctor
from workmem.cluster.addresses import OwnAddress
from workmem.cluster.admin import PoolSegment
from workmem.cluster.config import ClusterConfig
from workmem.cluster.doctor import CHECKS, case_of, examine
from workmem.cluster.findings import Case, Verdict
from workmem.cluster.here import LIBRARIES, Here, Program, flags_of, look_here
from workmem.cluster.master import master_flags
from workmem.cluster.view import ClusterView, MasterView, PoolView, admin_urls
from workmem.store.codecs.pool_sealing import PoolCipher
from workmem.store.config import BelowConfig
from workmem.store.tiers.mooncake.options import MooncakeOptions
from workmem.transfer.transports import Transport

GIB = 2**30
SOUND = ClusterConfig(host="10.0.0.2", segment_bytes="64GiB", port=50051)


def replace(struct, **more):
    return msgspec.structs.replace(struct, **more)


def program(name="mooncake_master", variables=None, /, **flags) -> Program:
    ours = master_flags(SOUND, port=50051, admin_port=9003) if name == "mooncake_master" else {}
    return Program(pid=7, name=name, flags={**ours, **flags}, variables=variables or {})


HERE = Here(
    builds={"mooncake-transfer-engine-non-cuda": "0.3.13"},
    import_problem="",
    missing_libraries=(),
    has_gpu=False,
    rdma_devices=(),
    memlock_bytes=8 * 2**20,
    addresses=(OwnAddress("eth0", "10.0.0.2"),),
    open_ports=(),
    programs=(program(),),
    names_agree=True,
)
VIEW = ClusterView(
    masters=(
        MasterView(url="http://127.0.0.1:9003", answers=True, role="leader", state="serving", serves=True),
    ),
    segments=(PoolSegment(segment_name="10.0.0.2:13000", status="OK", size_bytes=64 * GIB),),
    pool=PoolView(capacity_bytes=64 * GIB, clients=1),
)
CASE = Case(
    config=SOUND,
    store=MooncakeOptions(master="10.0.0.2:50051", host="10.0.0.2", capacity="64GiB"),
    view=VIEW,
    here=HERE,
    host_addresses=("10.0.0.2",),
    host_is_own=True,
    is_master_reached=False,
    transports=(
        Transport("tcp", is_there=True, why="built"),
        Transport("rdma", is_there=False, why="no card"),
    ),
    offload_paths={},
)


def here(**more) -> dict:
    return {"here": replace(HERE, **more)}


def flags(**more) -> dict:
    return here(programs=(program(**more),))


def config(**more) -> dict:
    return {"config": replace(SOUND, **more)}


def pool(**more) -> dict:
    return {"view": replace(VIEW, pool=replace(VIEW.pool, **more))}


def segments(*names: str, status: str = "OK") -> ClusterView:
    return replace(VIEW, segments=tuple(PoolSegment(segment_name=name, status=status) for name in names))


def offloading(*, master: bool = True, **variables) -> dict:
    client = program("mooncake_client", variables, enable_offload="true")
    return here(programs=(program(enable_offload=str(master).lower()), client))


SILENT = MasterView(url="http://10.0.0.3:9003", answers=False, problem="no answer")
WRONG = {
    "libraries": [
        (here(missing_libraries=("libibverbs1", "librdmacm1")), "apt-get install libibverbs1 librdmacm1")
    ],
    "build": [
        (here(builds={}), "pip install 'workmem[mooncake]'"),
        (here(import_problem="libcudart.so.12: cannot open"), "mooncake-transfer-engine for CUDA 12"),
        (
            here(builds={"mooncake-transfer-engine": "1", "mooncake-transfer-engine-non-cuda": "1"}),
            "uninstall",
        ),
    ],
    "master": [
        ({"view": ClusterView(masters=(SILENT,))}, "workmem cluster up"),
        ({"view": replace(VIEW, masters=(*VIEW.masters, SILENT))}, "start it again"),
    ],
    "store": [
        ({**config(master="10.0.0.9:50051")}, "name the same"),
        ({"store": replace(CASE.store, capacity="65GiB")}, "set capacity"),
    ],
    "sealing": [
        ({"store": replace(CASE.store, key_file="/nowhere/key")}, "the same file on every host"),
    ],
    "address": [
        ({**config(host="localhost"), "view": segments("10.0.0.3:13000")}, "host in store.below.options"),
        (
            {"store": replace(CASE.store, host="127.0.0.1"), "view": segments("10.0.0.3:13000")},
            "cluster.host",
        ),
        ({"view": segments("127.0.0.1:13000", "10.0.0.2:13001")}, "set cluster.host on the hosts"),
        ({"host_addresses": (), "host_is_own": False}, "this host's address"),
        ({"host_is_own": False}, "ip address"),
    ],
    "bind": [
        (flags(rpc_address="0.0.0.0"), "--rpc_address"),
        (flags(metrics_host="::"), "--metrics_host"),
        (here(addresses=(OwnAddress("eth1", "8.8.8.8"),), open_ports=(22, 16001)), "12300-17000"),
        ({"host_addresses": ("8.8.8.8",)}, "only your hosts reach"),
    ],
    "client-ttl": [
        (flags(client_ttl="10"), "cluster.client_ttl_s"),
        ({**config(client_ttl_s=29), **here(programs=())}, "cluster.client_ttl_s"),
    ],
    "lease": [
        (flags(default_kv_lease_ttl="50"), "cluster.lease_s"),
        (flags(default_kv_lease_ttl="1h"), "cluster.lease_s"),
    ],
    "watermark": [
        (flags(eviction_high_watermark_ratio="0.9"), "cluster.watermark=0.7"),
        ({**config(watermark=0.95), **here(programs=())}, "cluster.watermark=0.7"),
    ],
    "snapshots": [(flags(enable_snapshot="true"), "OpLog")],
    "oplog": [
        (flags(enable_ha="true", enable_oplog="false"), "cluster.oplog=true"),
        (config(etcd="10.0.0.5:2379", oplog=False), "cluster.oplog=true"),
    ],
    "disk": [
        (flags(enable_offload="true", root_fs_dir="/data"), "take root_fs_dir out"),
        (flags(enable_offload="true"), "[store.ssd]"),
        (offloading(master=False), "on both"),
        ({**offloading(), "offload_paths": {"/data/kv": "is a link"}}, "not a link"),
    ],
    "disk-cap": [(offloading(), "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE")],
    "names": [(here(names_agree=False), "install it anew")],
    "transports": [({"store": replace(CASE.store, protocol="rdma")}, "protocol = 'rdma'")],
    "rdma": [
        (config(protocol="rdma"), "cluster.protocol=tcp"),
        (
            {**config(protocol="rdma", devices="mlx5_9"), **here(rdma_devices=("mlx5_0",))},
            "there are: mlx5_0",
        ),
        ({**config(protocol="rdma"), **here(rdma_devices=("mlx5_0",))}, "LimitMEMLOCK=infinity"),
    ],
    "wheel": [
        (flags(enable_kv_events="true"), "take it out"),
        (flags(enable_ha="true", enable_oplog="true", ha_backend_type="redis"), "cluster.etcd"),
    ],
}
NOTED = {
    "build": [here(has_gpu=True)],
    "store": [{"store": None}],
    "sealing": [{"view": segments("10.0.0.2:13000", "10.0.0.3:13000")}],
    "master": [{"view": ClusterView(masters=(SILENT,)), "is_master_reached": True}],
    "address": [{**config(host="127.0.0.1"), "view": segments("127.0.0.1:13000")}],
    "bind": [here(open_ports=(16001,))],
    "admin": [config(admin_host="10.0.0.2"), flags(metrics_host="10.0.0.2")],
    "client-ttl": [pool(came_back=2)],
    "watermark": [pool(refused_puts=3)],
    "oplog": [{"view": segments("10.0.0.2:13000", "10.0.0.3:13000")}],
    "hard-pins": [{"view": segments("10.0.0.2:13000", status="DRAINING")}],
    "rdma": [here(rdma_devices=("mlx5_0",))],
}


def spread(table: dict) -> list:
    return [
        (check, *(case if isinstance(case, tuple) else (case,)))
        for check, cases in table.items()
        for case in cases
    ]


def test_a_sound_pool_is_called_sound():
    findings = examine(CASE)
    assert [one for one in findings if one.verdict is not Verdict.OK] == []
    assert all(one.found and not one.advice for one in findings)


def test_whether_the_store_seals_is_said_and_under_which_key(tmp_path, capsys):
    file = tmp_path / "pool.key"
    file.write_text("00112233445566778899aabbccddeeff" * 2)
    file.chmod(0o600)
    key_id = PoolCipher(bytes.fromhex(file.read_text())).key_id.hex()
    (found,) = [
        one
        for one in examine(replace(CASE, store=replace(CASE.store, key_file=str(file))))
        if one.check == "sealing"
    ]
    assert found.verdict is Verdict.OK
    assert key_id in found.found
    for key, said in (
        (str(file), f"sealed under key {key_id}"),
        ("", "in the clear"),
        ("/none", "no key file"),
    ):
        config = tmp_path / "workmem.toml"
        config.write_text(
            '[cluster]\nadmin_urls = ["http://127.0.0.1:9"]\n[store.below]\ntier = "mooncake"\n'
            f'options = {{ master = "127.0.0.1:9", capacity = "1GiB", key_file = "{key}" }}\n'
        )
        assert main(["cluster", "status", "--config", str(config)]) == 1
        assert said in " ".join(capsys.readouterr().out.split())


def test_all_ways_for_bytes_are_listed_and_why_not_the_others():
    (found,) = [one.found for one in examine(CASE) if one.check == "transports"]
    assert found == "bytes can go by tcp; not by rdma: no card"


def test_masters_of_other_pools_on_this_host_are_none_of_its_business():
    other = program(metrics_port="19003", rpc_port="51999", client_ttl="1", eviction_high_watermark_ratio="1")
    case = replace(CASE, **here(programs=(program(), other)))
    assert case.masters == (program(),)
    assert [one for one in examine(case) if one.verdict is not Verdict.OK] == []


@pytest.mark.parametrize("told", [{}, {"port": "50051"}, {"rpc_port": "50051", "metrics_port": "1"}])
def test_a_master_started_by_hand_is_of_the_pool_that_takes_its_ports(told):
    by_hand = Program(pid=9, name="mooncake_master", flags=told, variables={})
    assert replace(CASE, **here(programs=(by_hand,))).masters == (by_hand,)


@pytest.mark.parametrize(("check", "change", "advice"), spread(WRONG))
def test_a_mistake_is_found_and_only_where_it_is(check, change, advice):
    bad = {one.check: one for one in examine(replace(CASE, **change)) if one.verdict is Verdict.WRONG}
    assert advice in bad[check].advice
    assert bad[check].found
    assert len(bad) <= 2, sorted(bad)


@pytest.mark.parametrize(("check", "change"), spread(NOTED))
def test_what_is_to_be_known_is_no_failure(check, change):
    findings = {one.check: one for one in examine(replace(CASE, **change))}
    assert findings[check].verdict is Verdict.NOTE
    assert findings[check].advice
    assert [one for one in findings.values() if one.verdict is Verdict.WRONG] == []


def test_every_check_has_a_mistake_or_a_note_that_it_finds():
    checks = [one.check for one in examine(CASE)]
    assert len(checks) == len(set(checks)) == len(CHECKS)
    assert set(checks) == {*WRONG, *NOTED}


def test_this_host_is_looked_at(monkeypatch):
    found = look_here()
    assert found.builds
    assert set(found.missing_libraries) <= set(LIBRARIES.values())
    assert bool(found.import_problem) == bool(found.missing_libraries)
    assert found.names_agree
    assert "127.0.0.1" in {one.address for one in found.addresses}
    monkeypatch.setattr(doctor, "look_here", lambda: found)
    below = BelowConfig(tier="mooncake", options={"master": "127.0.0.1:1", "capacity": "1GiB"})
    case = case_of(ClusterConfig(admin_urls=("http://127.0.0.1:1",), master="127.0.0.1:1"), below)
    assert case.host_is_own
    assert case.store.master == "127.0.0.1:1"
    bad = [one.check for one in examine(case) if one.verdict is Verdict.WRONG]
    assert "master" in bad


def test_flags_are_read_as_the_master_reads_them():
    words = [
        "mooncake_master",
        "--rpc_port=1",
        "-client_ttl",
        "9",
        "--enable_ha",
        "--noenable_oplog",
        "--enable-offload=1",
    ]
    assert flags_of(words) == {
        "rpc_port": "1",
        "client_ttl": "9",
        "enable_ha": "",
        "enable_oplog": "false",
        "enable_offload": "1",
    }
    found = Program(pid=1, name="mooncake_master", flags=flags_of(words), variables={})
    assert (
        found.on("enable_ha"),
        found.on("enable_oplog"),
        found.on("enable_offload"),
        found.on("other"),
    ) == (
        True,
        False,
        True,
        False,
    )


def test_what_we_start_ourselves_has_no_mistake():
    elected = master_flags(replace(SOUND, etcd="10.0.0.5:2379"), port=50051, admin_port=9003)
    assert elected["ha_backend_connstring"] == "10.0.0.5:2379"
    case = replace(CASE, **here(programs=(program(**elected),)), **config(etcd="10.0.0.5:2379"))
    assert [one for one in examine(case) if one.verdict is Verdict.WRONG] == []


def test_masters_are_asked_where_they_are():
    assert admin_urls(ClusterConfig()) == ("http://127.0.0.1:9003",)
    assert admin_urls(ClusterConfig(master="10.0.0.1:50051", admin_port=9)) == ("http://10.0.0.1:9",)
    assert admin_urls(ClusterConfig(admin_urls=("http://a:1", "http://b:1"))) == ("http://a:1", "http://b:1")
    assert admin_urls(ClusterConfig(admin_host="fd00::1")) == ("http://[fd00::1]:9003",)
