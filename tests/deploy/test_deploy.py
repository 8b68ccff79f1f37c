"""Units, Compose file and manifest: they parse, name commands and settings that exist, and keep what the guide promises."""

from __future__ import annotations

import configparser
import ipaddress
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from workmem.cli.commands import app
from workmem.cluster.config import ClusterConfig
from workmem.cluster.here import LIBRARIES
from workmem.config import load
from workmem.core.units import parse_bytes

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
GIB = 2**30
ENDING_S = 20
"""What the end of a segment and of a master may take beside."""
OPEN = {"0.0.0.0", "::", "*", ""}


class Unit(configparser.RawConfigParser):
    def __init__(self, path: Path) -> None:
        super().__init__(strict=True, interpolation=None, delimiters=("=",))
        self.optionxform = str
        self.read_string(path.read_text(encoding="utf-8"))


class StrictLoader(yaml.SafeLoader):
    """A key that is there twice is a mistake, not the last of both."""

    def construct_mapping(self, node, **deep):
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), f"a key is there twice in line {node.start_mark.line + 1}: {keys}"
        return super().construct_mapping(node, **deep)


def documents(path: Path) -> list[dict]:
    return list(yaml.load_all(path.read_text(encoding="utf-8"), StrictLoader))


COMPOSE = documents(DEPLOY / "compose" / "compose.yaml")[0]
OBJECTS = documents(DEPLOY / "kubernetes" / "pool.yaml")
PODS = {
    found["metadata"]["name"]: found["spec"]["template"]
    for found in OBJECTS
    if found["kind"] in {"StatefulSet", "DaemonSet", "Deployment"}
}


def settings(environ: dict[str, str]) -> ClusterConfig:
    return load(environ=environ).config.cluster


def parses(words: list[str]) -> None:
    command, _, _ = app.parse_args(words, print_error=False, exit_on_error=False)
    assert callable(command)


def seconds(text: str | int) -> int:
    return int(str(text).removesuffix("s"))


def holds(memory: str, config: ClusterConfig) -> bool:
    """The segment and at least half a GiB for its process."""
    size = re.sub(r"([gmk])i?$", r"\1ib", memory.lower())
    return parse_bytes(size) >= parse_bytes(config.segment_bytes) + GIB // 2


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_a_command_and_lets_it_end(path, tmp_path):
    unit = Unit(path)
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert program == "/opt/workmem/bin/workmem"
    parses(words)
    assert service["KillMode"] == "mixed"
    assert service["KillSignal"] == "SIGTERM"
    assert int(service["TimeoutStopSec"]) >= ClusterConfig().drain_s + ENDING_S
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == "2"
    assert service["User"] not in {"root", "0"}
    assert service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["LimitMEMLOCK"] == "infinity"
    assert unit["Install"]["WantedBy"] == "multi-user.target"
    named = {name for key in ("After", "Wants") for name in unit["Unit"][key].split()}
    assert {name for name in named if name.endswith(".service")} <= {found.name for found in UNITS}
    if verifier := shutil.which("systemd-analyze"):
        # The program and the user need not be here.
        shown = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", path.read_text(encoding="utf-8"))
        for found in UNITS:
            (tmp_path / found.name).write_text("[Service]\nExecStart=/bin/true\n", encoding="utf-8")
        (tmp_path / path.name).write_text(shown, encoding="utf-8")
        done = subprocess.run(
            [verifier, "verify", "--man=no", str(tmp_path / path.name)],
            capture_output=True,
            text=True,
            check=False,
        )
        said = [line for line in done.stderr.splitlines() if path.name in line]
        assert (done.returncode, said) == (0, []), done.stderr


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_only_private_networks_reach_a_unit(path):
    service = Unit(path)["Service"]
    assert service["IPAddressDeny"] == "any"
    for word in service["IPAddressAllow"].split():
        assert word == "localhost" or ipaddress.ip_network(word).is_private


def test_the_store_starts_after_the_pool():
    unit = Unit(DEPLOY / "systemd" / "workmem-store.service")["Unit"]
    assert "workmem-cluster.service" in unit["After"].split()
    assert "workmem-cluster.service" in unit["Wants"].split()


@pytest.mark.parametrize("name", sorted(COMPOSE["services"]))
def test_a_composed_service_is_bounded_and_private(name):
    service = COMPOSE["services"][name]
    parses(service["command"])
    config = settings(service["environment"])
    assert holds(service["mem_limit"], config)
    assert seconds(service["stop_grace_period"]) >= config.drain_s + ENDING_S
    assert "ports" not in service
    assert "network_mode" not in service
    assert not service.get("privileged")
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"]
    network = service["networks"]["pool"]
    subnet = ipaddress.ip_network(COMPOSE["networks"]["pool"]["ipam"]["config"][0]["subnet"])
    assert config.host == network["ipv4_address"]
    assert ipaddress.ip_address(config.host) in subnet
    assert not {config.host, config.admin_host} & OPEN
    assert COMPOSE["networks"]["pool"]["internal"] is True
    if config.master:
        assert (
            config.master
            == f"{settings(COMPOSE['services']['master']['environment']).host}:{ClusterConfig().port}"
        )
        assert service["depends_on"] == {"master": {"condition": "service_healthy"}}
    else:
        assert service["healthcheck"]["test"][:2] == ["CMD", "workmem"]
        parses(service["healthcheck"]["test"][2:])
        assert (DEPLOY / "compose" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def environment(container: dict) -> dict[str, str]:
    """As a pod of the address 10.244.0.7 would have it."""
    found = {}
    for one in container["env"]:
        given = one.get("value") or {"status.podIP": "10.244.0.7"}[one["valueFrom"]["fieldRef"]["fieldPath"]]
        assert isinstance(given, str), one
        found[one["name"]] = given
    return found


@pytest.mark.parametrize("name", sorted(PODS))
def test_a_pod_is_bounded_and_private(name):
    pod, labels = PODS[name]["spec"], PODS[name]["metadata"]["labels"]
    (container,) = pod["containers"]
    parses(container["args"])
    config = settings(environment(container))
    assert holds(container["resources"]["limits"]["memory"], config)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "hostNetwork" not in pod
    assert all("hostPort" not in port for port in container.get("ports", []))
    assert config.host == "10.244.0.7"
    assert labels["workmem/pool"] == "member"
    if parse_bytes(config.segment_bytes):
        assert container["resources"]["requests"]["memory"] == container["resources"]["limits"]["memory"]
        assert pod["terminationGracePeriodSeconds"] >= config.drain_s + ENDING_S
    if config.master:
        service = next(found for found in OBJECTS if found["kind"] == "Service")
        name, space = service["metadata"]["name"], service["metadata"]["namespace"]
        assert config.master == f"{name}.{space}:{ClusterConfig().port}"
    else:
        assert {port["containerPort"] for port in container["ports"]} == {config.port, config.admin_port}
        probed = container["readinessProbe"]["httpGet"]
        assert (probed["path"], probed["port"]) == ("/health", "admin")


def test_selectors_find_what_they_are_for():
    by_kind = {found["kind"]: found for found in OBJECTS}
    for found in OBJECTS:
        assert found["apiVersion"], found
        assert found["metadata"].get("namespace", "workmem") == "workmem"
        if "template" in found.get("spec", {}):
            wanted = found["spec"]["selector"]["matchLabels"]
            assert wanted.items() <= found["spec"]["template"]["metadata"]["labels"].items()
    service = by_kind["Service"]["spec"]
    assert service["clusterIP"] == "None"
    assert service["selector"].items() <= PODS["workmem-master"]["metadata"]["labels"].items()
    assert {port["port"] for port in service["ports"]} == {ClusterConfig().port, ClusterConfig().admin_port}
    assert by_kind["StatefulSet"]["spec"]["replicas"] == 1


def test_only_pods_of_the_pool_reach_the_pool():
    policy = next(found for found in OBJECTS if found["kind"] == "NetworkPolicy")["spec"]
    member = {"matchLabels": {"workmem/pool": "member"}}
    assert policy["podSelector"] == member
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = policy["ingress"]
    assert rule["from"]
    assert all(peer["podSelector"] == member for peer in rule["from"])


def test_the_image_has_what_the_pool_needs():
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert set(LIBRARIES.values()) <= set(text.split())
    assert re.search(r"^USER 10001$", text, re.MULTILINE)
    assert re.search(r'^ENTRYPOINT \["workmem"\]$', text, re.MULTILINE)
    copied = re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE)
    assert [name for line in copied for name in line.split() if not (ROOT / name).exists()] == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"MOONCAKE_LIBRARIES := {' '.join(LIBRARIES.values())}\n" in makefile


def test_files_and_containers_that_the_guide_names_are_there():
    guide = (ROOT / "docs" / "guides" / "cluster.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(deploy/[\w./-]+)`", guide))
    assert len(named) >= 4
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert {path.name for path in UNITS} <= set(re.findall(r"`([\w-]+\.service)`", guide))
