"""`workmem rules`, and the page that is made from it."""

import json
from pathlib import Path

import pytest

from workmem.cli.main import main
from workmem.cli.rules import rules_page
from workmem.config import load
from workmem.core.errors import ConfigError
from workmem.prompt.canonical.rules import RULES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "canonical-rules.md"


def test_the_page_is_the_one_that_make_docs_writes():
    assert PAGE.read_text(encoding="utf-8") == rules_page()


def test_rules_are_listed_for_people_and_for_programs(capsys):
    assert main(["rules"]) == 0
    shown = capsys.readouterr().out
    assert main(["rules", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in told] == [rule.name for rule in RULES]
    assert "tool_order" in shown
    assert all(one["what"] and one["why"] and one["fix"] for one in told)


def test_an_unknown_rule_stops_the_start_with_the_known_ones(tmp_path):
    file = tmp_path / "workmem.toml"
    file.write_text("[prompt.rules]\ntool_odor = true\n")
    with pytest.raises(ConfigError, match=r"\$\.prompt\.rules: no rule is named 'tool_odor'.*tool_order"):
        load(file, environ={})
    file.write_text("[prompt.tenants.evaluation.rules]\ntool_odor = true\n")
    with pytest.raises(ConfigError, match=r"\$\.prompt\.tenants\.evaluation\.rules: no rule is named"):
        load(file, environ={})
