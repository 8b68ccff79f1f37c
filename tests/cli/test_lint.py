"""`workmem lint` as people and their CI run it."""

import gzip
import json

import pytest

from workmem.cli.main import main

TOOLS = [
    {"name": name, "description": f"Does {name}. " * 20, "input_schema": {"type": "object", "properties": {}}}
    for name in ("alpha", "beta")
]


def body(question: str, tools=TOOLS, system: str = "Be kind and brief. " * 30) -> dict:
    return {
        "model": "m",
        "max_tokens": 5,
        "system": system,
        "tools": tools,
        "messages": [{"role": "user", "content": question}],
    }


def written(path, *bodies):
    path.write_text("".join(json.dumps(one) + "\n" for one in bodies))
    return str(path)


@pytest.fixture
def clean(tmp_path):
    return written(tmp_path / "clean.jsonl", body("One?"), body("Two?"))


@pytest.fixture
def spoilt(tmp_path):
    return written(tmp_path / "spoilt.jsonl", body("One?"), body("Two?", TOOLS[::-1]))


def lint(*words):
    return main(["lint", *words, "--model", "approximate"])


def test_nothing_lost_is_exit_code_0(clean, capsys):
    assert lint(clean) == 0
    out = capsys.readouterr().out
    assert "2 requests" in out
    assert "0 tokens lost" in out
    assert "approximate" in out


def test_a_loss_is_exit_code_1_with_its_cause_its_place_and_what_to_do(spoilt, capsys):
    assert lint(spoilt) == 1
    out = capsys.readouterr().out
    assert "tool_order" in out
    assert "spoilt.jsonl:2" in out
    assert "rule tool_order" in out


def test_what_may_be_lost_is_a_count_or_a_part(spoilt, capsys):
    assert lint(spoilt, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    lost, share = report["lost_tokens"], 100 * report["lost_tokens"] / report["prompt_tokens"]
    assert lint(spoilt, "--fail-over", str(lost)) == 0
    assert lint(spoilt, "--fail-over", str(lost - 1)) == 1
    assert lint(spoilt, "--fail-over", f"{share + 0.1}%") == 0
    assert lint(spoilt, "--fail-over", f"{share - 0.1}%") == 1


@pytest.mark.parametrize("wrong", ["much", "-1", "101%", "%", "nan"])
def test_a_wrong_allowance_is_said(spoilt, capsys, wrong):
    assert lint(spoilt, f"--fail-over={wrong}") == 2
    assert "--fail-over" in capsys.readouterr().err


def test_json_has_every_loss_and_each_engine_its_block(spoilt, capsys):
    for engine, block in (("vllm", 16), ("sglang", 1), ("workmem", 16)):
        assert lint(spoilt, "--json", "--engine", engine) == 1
        report = json.loads(capsys.readouterr().out)
        assert (report["engine"], report["block"]) == (engine, block)
        (loss,) = report["losses"]
        assert loss["cause"] == "tool_order"
        assert loss["line"] == 2
    assert lint(spoilt, "--json", "--block", "64") == 1
    assert json.loads(capsys.readouterr().out)["block"] == 64


def test_sarif_has_the_line_of_the_request_and_the_place_in_its_body(spoilt, tmp_path, capsys):
    file = tmp_path / "report.sarif"
    assert lint(spoilt, "--sarif", str(file)) == 1
    log = json.loads(file.read_text())
    assert (log["version"], log["$schema"]) == ("2.1.0", "https://json.schemastore.org/sarif-2.1.0.json")
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"] == "workmem lint"
    (result,) = run["results"]
    rule = driver["rules"][result["ruleIndex"]]
    assert rule["id"] == result["ruleId"] == "tool_order"
    assert rule["help"]["text"]
    assert result["message"]["text"]
    (location,) = result["locations"]
    assert location["physicalLocation"]["region"]["startLine"] == 2
    assert location["physicalLocation"]["artifactLocation"]["uri"] == f"file://{spoilt}"
    assert location["logicalLocations"][0]["fullyQualifiedName"].startswith("tools")
    capsys.readouterr()


def test_patched_requests_lose_nothing_any_more(spoilt, tmp_path, capsys):
    patched = tmp_path / "patched.jsonl"
    assert lint(spoilt, "--write-patched", str(patched)) == 1
    assert lint(str(patched)) == 0
    lines = [json.loads(line) for line in patched.read_text().splitlines()]
    assert [one["messages"][0]["content"] for one in lines] == ["One?", "Two?"]
    assert sorted(one["name"] for one in lines[1]["tools"]) == ["alpha", "beta"]
    capsys.readouterr()


def test_compressed_and_wrapped_recordings_are_read_and_several_at_once(spoilt, clean, tmp_path, capsys):
    packed = tmp_path / "packed.jsonl.gz"
    lines = [
        {"path": "/v1/messages", "headers": {}, "body_raw": json.dumps(body(text))} for text in ("A?", "B?")
    ]
    packed.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    assert lint(str(packed), clean, "--json") == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 4


def test_rules_can_be_left_out_and_one_that_is_none_is_said(spoilt, capsys):
    assert lint(spoilt, "--json", "--rules", "none") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["rules"] == []
    assert lint(spoilt, "--rules", "tool_ordre") == 2
    err = capsys.readouterr().err
    assert "tool_ordre" in err
    assert "tool_order" in err


def test_bad_input_is_exit_code_2_with_its_line(clean, tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps(body("One?")) + "\n{broken\n")
    assert lint(str(bad)) == 2
    assert f"{bad}:2:" in capsys.readouterr().err
    assert lint(str(tmp_path / "none.jsonl")) == 2
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "empty.jsonl").write_text("\n")
    assert lint(str(tmp_path / "empty.jsonl")) == 2
    assert "no request" in capsys.readouterr().err
    assert lint(clean, "--cache-tokens", "8") == 2
    assert "--cache-tokens" in capsys.readouterr().err
    assert lint(clean, "--sarif", str(tmp_path / "no" / "where.sarif")) == 2
    assert "--sarif" in capsys.readouterr().err


@pytest.mark.model
def test_a_model_of_its_own_makes_the_prompts_and_names_the_same_cause(smollm2, spoilt, capsys):
    assert main(["lint", spoilt, "--model", str(smollm2), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["is_exact"] is True
    assert report["notes"] == []
    (loss,) = report["losses"]
    assert loss["cause"] == "tool_order"
    assert report["canonical_cached_tokens"] > report["cached_tokens"]
