"""What the checks say of servers that do well, and of servers that fail or lie in each way."""

import pytest

from workmem.core.errors import ClientError, ConfigError, TransferError
from workmem.probing.examine import examine, is_sound, look
from workmem.probing.probe import Plan
from workmem.probing.server import Server

CLAUDE_ONLY = ("/v1/messages",)
ALL = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


def report(one, plan=None, **more):
    plan = plan or Plan(**more)
    examined = examine(look(Server(one.url)), plan, seed="a seed")
    return examined, {finding.check: finding for finding in examined.findings}


def test_a_server_that_does_well_has_nothing_to_mend_and_costs_what_was_said(standing_in):
    with standing_in(sorts_tools=True, keeps_thinking=True, apis=ALL) as one:
        examined, said = report(one)
    assert is_sound(examined.findings)
    assert {name for name, finding in said.items() if finding.verdict != "ok"} == {"tool added", "hash seed"}
    plan = Plan()
    assert examined.requests == one.requests <= plan.requests_max
    assert examined.prompt_tokens <= plan.prompt_tokens
    assert examined.generated_tokens <= plan.generated_tokens
    assert said["apis"].seen == "has chat completions, responses, messages"
    for name in ("responses", "messages"):
        assert "reports cached tokens" in said[f"usage of {name}"].seen


@pytest.mark.parametrize("block", [1, 16, 32, 64, 128])
def test_the_block_is_found(standing_in, block):
    with standing_in(block=block) as one:
        examined, said = report(one)
    assert examined.prompt_tokens <= Plan().prompt_tokens
    assert examined.generated_tokens <= Plan().generated_tokens
    expected = "to the token" if block == 1 else f"in blocks of {block} tokens"
    assert expected in said["block"].seen
    assert said["block"].verdict == "ok"
    assert said["rounds"].verdict == "ok"
    assert said["generated tokens"].verdict == "ok"
    assert said["place of tools"].seen.startswith("tools_first")
    assert is_sound(examined.findings)


@pytest.mark.parametrize("long_tokens", [700, 1000, 1100, 1300])
@pytest.mark.parametrize("block", [32, 96, 128])
def test_a_block_is_not_taken_for_its_double(standing_in, block, long_tokens):
    with standing_in(block=block) as one:
        _, said = report(one, long_tokens=long_tokens, requests_max=9)
    assert f"in blocks of {block} tokens" in said["block"].seen


def test_a_server_that_takes_tools_only_where_none_is_called_is_asked_so(standing_in):
    with standing_in(needs_choice=True) as one:
        _, said = report(one)
    assert said["place of tools"].verdict == "ok"


def test_a_block_larger_than_what_is_shared_is_told_with_numbers(standing_in):
    with standing_in(block=256) as one:
        _, said = report(one)
    assert said["minimum"].verdict == "warn"
    assert "below_block_size" in said["minimum"].seen
    assert "a block is 256 tokens" in said["minimum"].seen


def test_a_minimum_of_many_blocks_is_told_from_a_large_block(standing_in):
    with standing_in(block=16, minimum=512) as one:
        _, said = report(one)
    assert "in blocks of 16 tokens" in said["block"].seen
    assert said["minimum"].verdict == "warn"
    assert "below_minimum" in said["minimum"].seen


def test_a_server_that_does_not_cache_fails_and_no_more_is_asked_of_it(standing_in):
    with standing_in(caches=False, keeps_output=False) as one:
        examined, said = report(one)
    assert said["prefix cache"].verdict == "fail"
    assert "does not cache" in said["prefix cache"].seen
    assert said["cached tokens"].verdict == "ok"
    assert said["rounds"].verdict == "unknown"
    assert not is_sound(examined.findings)
    assert one.requests < 12


def test_silence_is_not_taken_for_a_miss(standing_in):
    with standing_in(reports=False) as one:
        examined, said = report(one, long_tokens=300)
    assert said["cached tokens"].verdict == "warn"
    assert "--enable-prompt-tokens-details" in said["cached tokens"].advice
    assert said["prefix cache"].verdict == "unknown"
    assert "does not report, or does not cache" in said["prefix cache"].seen
    assert is_sound(examined.findings)


def test_a_silent_server_is_seen_to_cache_by_the_time(standing_in):
    with standing_in(reports=False, seconds_per_token=0.0002) as one:
        _, said = report(one)
    assert said["prefix cache"].verdict == "ok"
    assert "seems to cache" in said["prefix cache"].seen


def test_metrics_stand_in_for_a_usage_that_says_nothing(standing_in):
    with standing_in(reports=False, has_metrics=True) as one:
        _, said = report(one)
    assert said["cached tokens"].verdict == "warn"
    assert "metrics" in said["cached tokens"].seen
    assert "in blocks of 16 tokens" in said["block"].seen
    assert said["rounds"].verdict == "ok"


def test_counts_that_cannot_be_true_are_called_so(standing_in):
    with standing_in(claims=900) as one:
        examined, said = report(one)
    assert said["counts"].verdict == "fail"
    assert not is_sound(examined.findings)


def test_a_history_that_is_computed_anew_each_round_fails(standing_in):
    with standing_in(changes_early_text=True) as one:
        examined, said = report(one)
    # Not even the same prompt is found again.
    assert said["prefix cache"].verdict == "fail"
    assert not is_sound(examined.findings)


def test_a_server_that_drops_what_it_generated_is_warned_of(standing_in):
    with standing_in(keeps_output=False) as one:
        _, said = report(one)
    assert said["rounds"].verdict == "ok"
    assert said["generated tokens"].verdict == "warn"


@pytest.mark.parametrize(
    ("place", "verdict"), [("first", "ok"), ("after_instructions", "ok"), ("after_history", "warn")]
)
@pytest.mark.parametrize("block", [1, 16, 64])
def test_the_place_of_tools_is_found(standing_in, place, verdict, block):
    with standing_in(tools=place, block=block) as one:
        _, said = report(one)
    assert said["place of tools"].seen.startswith(f"tools_{place}")
    assert said["place of tools"].verdict == verdict


def test_a_template_without_tools_is_told(standing_in):
    with standing_in(tools="none") as one:
        _, said = report(one)
    assert "the template prints none" in said["tools"].seen


@pytest.mark.parametrize(("sorts", "verdict"), [(True, "ok"), (False, "warn")])
def test_whether_order_and_keys_of_tools_matter_is_found(standing_in, sorts, verdict):
    with standing_in(sorts_tools=sorts) as one:
        _, said = report(one)
    assert said["order of tools"].verdict == verdict
    assert said["order of keys"].verdict == verdict
    assert said["tool added"].verdict == "warn"


def test_thinking_that_is_stripped_is_told_with_what_it_costs(standing_in):
    with standing_in(strips_thinking=True) as one:
        _, said = report(one)
    finding = said["thinking in history"]
    assert finding.verdict == "warn"
    assert finding.seen.startswith("template_strips_thinking")
    assert "0 behind the next message" in finding.seen


def test_thinking_that_stays_is_fine(standing_in):
    with standing_in(keeps_thinking=True) as one:
        _, said = report(one)
    assert said["thinking in history"].verdict == "ok"
    assert "it stays" in said["thinking in history"].seen


def test_a_salt_that_is_not_heeded_is_warned_of(standing_in):
    with standing_in(heeds_salt=False) as one:
        _, said = report(one)
    assert said["salt"].verdict == "warn"


def test_a_salt_that_is_refused_is_no_fault(standing_in):
    with standing_in(refuses=("cache_salt",)) as one:
        examined, said = report(one)
    assert said["salt"].verdict == "unknown"
    assert "cache_salt" in said["salt"].seen
    assert is_sound(examined.findings)


def test_other_names_of_fields_are_found_by_what_the_server_says(standing_in):
    with standing_in(refuses=("temperature",)) as one:
        _, said = report(one)
    assert said["prefix cache"].verdict == "ok"


def test_a_server_that_keeps_one_prompt_alone_has_its_block_found(standing_in):
    with standing_in(only_newest=True, block=1) as one:
        _, said = report(one)
    assert "to the token" in said["block"].seen
    assert said["rounds"].verdict == "ok"
    assert said["slots"].verdict == "warn"
    assert said["salt"].verdict == "ok"
    for check in ("order of tools", "order of keys"):
        assert "matters" in said[check].seen


def test_a_small_context_is_kept_to(standing_in):
    with standing_in(context=600) as one:
        examined, said = report(one)
    assert said["prefix cache"].verdict == "ok"
    assert is_sound(examined.findings)


def test_a_server_of_messages_alone_is_asked_by_them(standing_in):
    with standing_in(apis=CLAUDE_ONLY) as one:
        examined, said = report(one)
    assert "asked by /v1/messages" in said["server"].seen
    assert said["prefix cache"].verdict == "ok"
    assert said["rounds"].verdict == "ok"
    assert said["thinking in history"].verdict == "unknown"
    assert is_sound(examined.findings)


def test_no_more_is_sent_than_was_announced(standing_in):
    with standing_in() as one:
        _, said = report(one, requests_max=9)
        assert one.requests == 9
    assert said["rounds"].verdict == "unknown"
    assert "is spent" in said["rounds"].seen


def test_an_address_that_is_none_says_so():
    with pytest.raises(ConfigError, match="no address"):
        Server("127.0.0.1:8000")
    with pytest.raises(ConfigError, match="--key-file"):
        Server("http://me:secret@127.0.0.1:8000")


def test_nobody_there_is_said():
    with pytest.raises(TransferError, match="no answer from"):
        look(Server("http://127.0.0.1:9", timeout_s=2))


def test_a_server_without_chats_is_said(standing_in):
    with standing_in(apis=()) as one, pytest.raises(ClientError, match="neither"):
        look(Server(one.url))
