"""The decision to split a request, and the costs it rests on."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.policy.disaggregation import (
    REMEASURE_AFTER,
    UNMEASURED_HOPS,
    Costs,
    PrefillSide,
    Prospect,
    Terms,
    decide,
    expected_hop_s,
)
from workmem.policy.learned_costs import LARGE_TOKENS, BytesPerToken, LearnedCosts

AUTO = Terms(mode="auto", tokens_min=512)
DECODE = Costs(computed_token_s=1e-3, hop_s=0.01, handed_token_s=1e-5, samples=9)


def side(backlog_s=0.0, samples=UNMEASURED_HOPS, **costs):
    known = {"computed_token_s": 1e-3, "hop_s": 0.05, "handed_token_s": 1e-5} | costs
    return PrefillSide(costs=Costs(**known, samples=samples), backlog_s=backlog_s)


def verdict(terms=AUTO, prefill=None, tokens=4096, hit=0, running=0, **more):
    prospect = Prospect(prompt_tokens=tokens, hit_tokens=hit, running=running)
    return decide(terms, prospect, side() if prefill is None else prefill, DECODE, **more)


def test_of_two_alike_the_idle_one_keeps_its_request_and_one_with_streams_gives_it_away():
    assert (verdict().is_split, verdict().reason) == (False, "slower")
    assert (verdict(running=1).is_split, verdict(running=1).reason) == (True, "faster")


def test_a_faster_prefill_server_gets_the_prompt_even_where_nothing_runs():
    assert verdict(prefill=side(computed_token_s=1e-4)).reason == "faster"


def test_who_waits_longer_in_the_queue_than_it_would_compute_is_not_split():
    assert verdict(running=1, prefill=side(backlog_s=3.0)).is_split
    assert verdict(running=1, prefill=side(backlog_s=5.0)).reason == "slower"


def test_what_the_decode_server_has_is_not_computed_elsewhere():
    assert verdict(running=3, hit=4096 - 511).reason == "cached"
    assert verdict(running=3, hit=5000).reason == "cached"
    # With room for doubt only by cost: few missing tokens do not pay for a hop.
    assert verdict(running=1, hit=4096 - 520, prefill=side(hop_s=1.0)).reason == "slower"


@pytest.mark.parametrize("running", [0, 1, 2, 4, 8])
def test_a_handover_that_never_comes_is_not_used_however_many_streams_there_are(running):
    """Each prompt would be computed twice, and hold the streams up as if it had not been split."""
    costs = LearnedCosts()
    for _ in range(20):
        costs.learn_computing(4096, 4.1)
        costs.learn_handover(4096, 4.1, computed=4096)
    prospect = Prospect(prompt_tokens=4096, hit_tokens=0, running=running)
    assert costs.costs().recomputed_share == 1.0
    assert not decide(AUTO, prospect, side(), costs.costs()).is_split
    for _ in range(20):
        costs.learn_handover(4096, 0.1, computed=16)
    assert decide(AUTO, prospect, side(), costs.costs()).is_split == (running > 0)


def test_a_dear_handover_is_not_used():
    dear = Costs(computed_token_s=1e-3, hop_s=0.01, handed_token_s=2e-3, samples=9)
    prospect = Prospect(prompt_tokens=4096, hit_tokens=0, running=1)
    assert decide(AUTO, prospect, side(), dear).reason == "slower"


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_the_floor_holds_in_every_mode(mode):
    assert verdict(Terms(mode=mode, tokens_min=512), tokens=511, running=9).reason == "short_prompt"
    assert verdict(Terms(mode=mode, tokens_min=0), tokens=0, running=9).reason == "short_prompt"


def test_modes_and_a_missing_server():
    assert verdict(Terms(mode="never", tokens_min=0), running=9).reason == "never"
    assert verdict(Terms(mode="always", tokens_min=512), hit=4096).reason == "always"
    prospect = Prospect(prompt_tokens=4096, hit_tokens=0, running=9)
    for mode in ("auto", "always"):
        found = decide(Terms(mode=mode, tokens_min=0), prospect, None, DECODE)
        assert (found.is_split, found.reason) == (False, "no_prefill_server")


def test_what_was_never_measured_is_measured_and_then_now_and_then():
    assert verdict(prefill=side(samples=UNMEASURED_HOPS - 1)).reason == "measuring"
    assert verdict(prefill=side(samples=0, backlog_s=0.1)).reason == "slower"
    assert verdict(refused=REMEASURE_AFTER - 1).reason == "slower"
    assert verdict(refused=REMEASURE_AFTER).reason == "measuring"


COST = st.floats(0, 1e6)


@settings(deadline=None)
@given(
    st.sampled_from(["auto", "always", "never"]),
    st.integers(0, 10**7),
    st.integers(-10, 10**7),
    st.integers(-5, 10**4),
    st.tuples(COST, COST, COST),
    st.tuples(COST, COST, COST),
    st.floats(0, 1e9),
    st.integers(0, 10**6),
)
def test_every_prospect_gets_a_verdict_that_keeps_to_the_terms(
    mode, tokens, hit, running, prefill, decode, backlog_s, floor
):
    names = ("computed_token_s", "hop_s", "handed_token_s")
    sides = [Costs(**dict(zip(names, values, strict=True)), samples=9) for values in (prefill, decode)]
    prospect = Prospect(prompt_tokens=tokens, hit_tokens=hit, running=running)
    found = decide(
        Terms(mode=mode, tokens_min=floor),
        prospect,
        PrefillSide(costs=sides[0], backlog_s=backlog_s),
        sides[1],
    )
    assert math.isfinite(found.whole_s)
    assert math.isfinite(found.split_s)
    if found.is_split:
        assert mode != "never"
        assert tokens >= max(1, floor)
        assert mode == "always" or found.split_s < found.whole_s
    assert found.reason


@settings(deadline=None, max_examples=30)
@given(st.floats(1e-6, 1e-2), st.floats(1e-3, 0.5))
def test_both_costs_are_found_from_prompts_of_both_sizes(token_s, hop_s):
    costs = LearnedCosts()
    for _ in range(60):
        costs.learn_computing(8, hop_s + 8 * token_s)
        costs.learn_computing(8192, hop_s + 8192 * token_s)
    for missing in (8, 8192):
        true_s = hop_s + missing * token_s
        assert expected_hop_s(missing, costs.costs()) == pytest.approx(true_s, rel=0.55)


def test_prior_costs_are_usable_and_nonsense_teaches_nothing():
    costs = LearnedCosts()
    before = costs.costs()
    assert min(before.computed_token_s, before.hop_s, before.handed_token_s) > 0
    for tokens, seconds in ((-1, 1.0), (5, -1.0), (5, float("nan")), (5, float("inf")), (5, 1e9)):
        costs.learn_computing(tokens, seconds)
        costs.learn_handover(tokens, seconds)
    costs.learn_handover(0, 1.0)
    assert costs.costs() == before


def test_a_server_that_was_not_measured_is_taken_for_one_of_its_fleet():
    fleet = LearnedCosts()
    one, other = LearnedCosts(fleet), LearnedCosts(fleet)
    for _ in range(3):
        one.learn_computing(10 * LARGE_TOKENS, 10.0)
    assert other.costs().computed_token_s == pytest.approx(one.costs().computed_token_s)
    assert other.costs().samples == 0
    other.learn_computing(10 * LARGE_TOKENS, 1.0)
    assert other.costs().computed_token_s < one.costs().computed_token_s / 5


def test_handed_tokens_that_were_computed_all_the_same_make_a_handover_dear():
    costs = LearnedCosts()
    costs.learn_handover(4096, 4.1)
    assert costs.costs().handed_token_s == pytest.approx(1e-3, rel=0.1)
    for _ in range(30):
        costs.learn_handover(4096, 0.1)
    assert costs.costs().handed_token_s < 1e-4


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(-5, 10**7), st.integers(-5, 10**6)), max_size=20), st.integers(-1, 10**8)
)
def test_tokens_of_a_body_are_always_a_count(seen, size):
    ratio = BytesPerToken()
    for body_bytes, tokens in seen:
        ratio.learn(body_bytes, tokens)
    assert ratio.tokens(size) >= 0


def test_the_bytes_of_a_token_are_learned():
    ratio = BytesPerToken()
    assert ratio.tokens(4000) == 1000
    for _ in range(3):
        ratio.learn(10_000, 5000)
    assert ratio.tokens(4000) == pytest.approx(2000, abs=1)
