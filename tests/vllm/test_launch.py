"""The command that starts vLLM's server: the user's own words stay, what the connector needs is added, and what cannot be both is told."""

import json
import shlex

import pytest

from workmem.core.errors import ConfigError
from workmem.engines.vllm.launch import server_command, shown

OURS = {
    "kv_connector": "WorkmemConnector",
    "kv_connector_module_path": "workmem.plugins.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
PEER = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}


def command(*words, sets=(), is_command=True, files=None) -> list[str]:
    return server_command("python", words, sets, is_command=is_command, files=files)


def transfer(*words, sets=()) -> dict:
    found = command("m", *words, sets=sets)
    assert sum(word.startswith(("--kv-transfer-config", "--kv_transfer_config")) for word in found) == 1
    return json.loads(found[found.index("--kv-transfer-config") + 1])


def with_config(config) -> tuple[str, str]:
    return "--kv-transfer-config", json.dumps(config)


def test_what_the_user_said_stays_as_it_is():
    words = (
        "org/model",
        "--port",
        "8001",
        "-tp",
        "2",
        "-O3",
        "--hf-overrides",
        '{"a": [1, 2]}',
        "--served-model-name",
        "a",
        "b",
    )
    found = command(*words)
    assert found[: 4 + len(words)] == ["python", "-m", "vllm.entrypoints.cli.main", "serve", *words]
    assert found[4 + len(words) :] == [
        "--kv-transfer-config",
        json.dumps(OURS, separators=(",", ":")),
        "--prefix-caching-hash-algo",
        "sha256_cbor",
        "--enable-prompt-tokens-details",
    ]
    assert shlex.split(shown(found)) == found


def test_a_build_without_the_command_gets_the_model_as_an_option():
    found = command("org/model", "--port", "8001", is_command=False)
    assert found[:6] == [
        "python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model=org/model",
        "--port",
        "8001",
    ]
    named = command("--port", "8001", "--model", "org/model", is_command=False)
    assert named[3:7] == ["--port", "8001", "--model", "org/model"]


@pytest.mark.parametrize("words", [(), ("--port", "8001", "org/model")])
def test_there_a_model_that_does_not_come_first_is_refused(words):
    """vLLM would serve another one: it ignores the word there."""
    with pytest.raises(ConfigError, match="name the model first"):
        command(*words, is_command=False)


def test_settings_go_to_the_connector():
    found = transfer(sets=("store.dram.bytes=8GiB", "vllm.load_s=3", "store.ssd.path=/a=b"))
    assert found == OURS | {
        "kv_connector_extra_config": {
            "store.dram.bytes": "8GiB",
            "vllm.load_s": "3",
            "store.ssd.path": "/a=b",
        }
    }


def test_settings_that_nobody_reads_there_are_refused():
    with pytest.raises(ConfigError, match=r"--set engine\.model: inside vLLM only \[store\] and \[vllm\]"):
        command("m", sets=("engine.model=x",))


@pytest.mark.parametrize("form", ["{}={}", "{} {}"])
@pytest.mark.parametrize("option", ["--kv-transfer-config", "--kv_transfer_config"])
def test_a_connector_of_the_users_own_stays_and_comes_first(option, form):
    given = PEER | {"engine_id": "pod-7", "kv_connector_extra_config": {"cpu_bytes_to_use": 7}}
    words = form.format(option, json.dumps(given, separators=(",", ":"))).split(" ")
    found = transfer(*words, sets=("store.dram.bytes=1GiB",))
    without_id = {key: value for key, value in given.items() if key != "engine_id"}
    assert found == {
        "kv_role": "kv_both",
        "engine_id": "pod-7",
        "kv_connector": "MultiConnector",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [without_id, OURS | {"kv_connector_extra_config": {"store.dram.bytes": "1GiB"}}]
        },
    }


def test_several_of_the_users_own_are_joined():
    given = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_port": 5,
        "kv_connector_extra_config": {"connectors": [PEER], "more": 1},
    }
    found = transfer(*with_config(given))
    assert found["kv_connector_extra_config"] == {"connectors": [PEER, OURS], "more": 1}
    assert (found["kv_port"], found["kv_load_failure_policy"]) == (5, "recompute")


def test_ours_given_by_hand_is_not_added_twice():
    by_hand = OURS | {
        "kv_port": 9,
        "kv_connector_extra_config": {"store.dram.bytes": "1GiB", "vllm.load_s": 4},
    }
    found = transfer(*with_config(by_hand), sets=("store.dram.bytes=2GiB",))
    assert found == OURS | {
        "kv_port": 9,
        "kv_connector_extra_config": {"store.dram.bytes": "2GiB", "vllm.load_s": 4},
    }
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [by_hand, PEER]},
    }
    assert [
        child["kv_connector"]
        for child in transfer(*with_config(several))["kv_connector_extra_config"]["connectors"]
    ] == ["WorkmemConnector", "OffloadingConnector"]


def test_a_role_given_by_hand_stays():
    producer = OURS | {"kv_role": "kv_producer"}
    assert transfer(*with_config(producer)) == producer
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [PEER, producer]},
    }
    assert transfer(*with_config(several))["kv_connector_extra_config"]["connectors"] == [PEER, producer]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--no-enable-prefix-caching",), "prefix cache; leave it out"),
        (("--no_enable_prefix_caching",), "prefix cache; leave it out"),
        (("--kv-offloading-size", "4"), "in the place of workmem's"),
        (("--kv-transfer-config.kv_role", "kv_both"), "as one piece of JSON"),
        (("--kv-transfer-config", "{"), "not a JSON object"),
        (("--kv-transfer-config", "[1]"), "not a JSON object"),
        (("--kv-transfer-config", "{}"), "names no kv_connector"),
        (with_config(PEER | {"kv_load_failure_policy": "fail"}), "fails a request"),
        (("--prefix-caching-hash-algo", "xxhash"), "no proof"),
        (("--prefix_caching_hash_algo=xxhash_cbor",), "no proof"),
        (("--pipeline-parallel-size", "2"), "--pipeline-parallel-size 2 cannot .*--tensor-parallel-size"),
        (("-pp=2",), "-pp 2 cannot"),
        (("--decode_context_parallel_size=4",), "shared out among workers; leave it at 1"),
        (("-pcp", "2"), "-pcp 2 cannot"),
    ],
)
def test_what_cannot_work_is_told_before_vllm_starts(words, message):
    with pytest.raises(ConfigError, match=message):
        command("m", *words)


@pytest.mark.parametrize("hashing", ["sha256", "sha256_cbor"])
def test_a_hash_that_proves_is_the_users_choice(hashing):
    found = command("m", "--prefix-caching-hash-algo", hashing)
    assert [word for word in found if word.startswith("sha256")] == [hashing]


@pytest.mark.parametrize("said", ["--enable-prompt-tokens-details", "--no-enable-prompt-tokens-details"])
def test_what_was_said_of_usage_is_not_said_again(said):
    found = command("m", said)
    assert [word for word in found if word.endswith("prompt-tokens-details")] == [said]


@pytest.mark.parametrize(
    "line",
    [
        "kv-transfer-config: x",
        "  kv_offloading_size: 4",
        "enable-prefix-caching: false",
        "no_enable_prefix_caching : true",
    ],
)
def test_a_file_of_arguments_may_not_hide_what_has_to_be_seen(line):
    with pytest.raises(ConfigError, match=r"serve\.yaml sets .*command line"):
        command("m", "--config", "serve.yaml", files={"serve.yaml": f"port: 1\n{line}\n"})
    assert command("m", "--config", "serve.yaml", files={"serve.yaml": "port: 1\n# kv-transfer-config: x\n"})
