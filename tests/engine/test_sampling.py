import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.core.generation import SamplingParams
from workmem.engines.embedded import sampling
from workmem.engines.embedded.sampling import SamplerState, sample


def state(params, vocabulary, prompt=()):
    return SamplerState(params, prompt, vocabulary)


def reference(row, params, prompt, output):
    """Probabilities by the definitions, in plain Python."""
    logits = [float(x) for x in row]
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in Counter(output).items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    highest = max(logits)
    weights = [math.exp((x - highest) / params.temperature) for x in logits]
    total = sum(weights)
    probs = sorted(((w / total, -i) for i, w in enumerate(weights)), reverse=True)
    probs = [(p, i) for p, i in probs if p >= params.min_p * probs[0][0]]
    if params.top_k:
        probs = probs[: params.top_k]
    mass = sum(p for p, _ in probs)
    kept, before = {}, 0.0
    for p, i in probs:
        if kept and before >= params.top_p * mass and params.top_p < 1:
            break
        kept[-i] = p
        before += p
    total = sum(kept.values())
    return {token: p / total for token, p in kept.items()}


CASES = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.15),
    SamplingParams(temperature=0.9, top_k=9, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, repetition_penalty=1.7, top_p=0.95),
]


@pytest.mark.parametrize("shortlist", [8, 1024])
@pytest.mark.parametrize("params", CASES)
def test_draws_follow_the_definition(params, shortlist, monkeypatch):
    monkeypatch.setattr(sampling, "SHORTLIST", shortlist)
    vocabulary, prompt, output = 24, [1, 2, 2], [3, 3, 5]
    row = torch.randn(vocabulary, generator=torch.Generator().manual_seed(7)) * 2
    want = reference(row, params, prompt, output)
    draws = 2000
    states = [SamplerState(params, prompt, vocabulary) for _ in range(draws)]
    for number, one in enumerate(states):
        one.generator.seed(number)
        for token in output:
            one.observe(token)
    counts = Counter(s.token_id for s in sample(row.expand(draws, -1), [params] * draws, states))
    assert counts.keys() <= want.keys()
    for token, p in want.items():
        sigma = math.sqrt(draws * p * (1 - p))
        assert abs(counts[token] - draws * p) <= 4.5 * sigma + 1


def test_greedy_takes_the_lowest_id_on_ties():
    params = SamplingParams(temperature=0.0)
    row = torch.zeros(1, 50000)
    row[0, [7, 49000, 31]] = 2.0
    assert sample(row, [params], [state(params, 50000)]) == [sampling.Sampled(7)]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    others=st.lists(st.sampled_from(CASES), max_size=5),
    case=st.sampled_from(CASES),
    at=st.integers(0, 5),
)
def test_a_seed_gives_the_same_tokens_in_any_batch(seed, others, case, at):
    vocabulary = 3000
    logits = torch.randn(6, 4, vocabulary, generator=torch.Generator().manual_seed(seed % 1000)) * 2
    mine = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(seed)) * 2

    def params(case):
        return SamplingParams(
            **{name: getattr(case, name) for name in case.__struct_fields__} | {"seed": seed}
        )

    alone_state = state(params(case), vocabulary)
    alone = [sample(mine[step : step + 1], [params(case)], [alone_state])[0] for step in range(4)]
    at = min(at, len(others))
    batch = [params(one) for one in others]
    batch.insert(at, params(case))
    states = [state(one, vocabulary) for one in batch]
    together = []
    for step in range(4):
        rows = [logits[index, step] for index in range(len(others))]
        rows.insert(at, mine[step])
        together.append(sample(torch.stack(rows), batch, states)[at])
    assert together == alone


def test_different_seeds_differ_and_no_seed_is_not_fixed():
    row = torch.zeros(1, 4096)

    def draw(seed):
        params = SamplingParams(seed=seed)
        return sample(row, [params], [state(params, 4096)])[0].token_id

    assert len({draw(seed) for seed in range(8)}) > 4
    assert len({draw(None) for _ in range(8)}) > 4


def test_logprobs_are_of_the_raw_distribution_and_only_for_those_who_ask():
    row = torch.randn(3, 100)
    params = [
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=5.0, top_k=1, presence_penalty=2.0, logprobs=3, seed=1),
        SamplingParams(temperature=0.0),
    ]
    before = row.clone()
    results = sample(row, params, [state(one, 100) for one in params])
    want = torch.log_softmax(row, -1)
    assert torch.equal(row, before)
    assert results[0].logprob == pytest.approx(float(want[0, results[0].token_id]))
    assert results[0].top == ()
    values, ids = want[1].topk(3)
    assert [token for token, _ in results[1].top] == ids.tolist()
    assert [value for _, value in results[1].top] == pytest.approx(values.tolist())
    assert results[1].token_id == ids[0]
    assert results[2].logprob is None


def test_penalties_count_what_was_generated():
    params = SamplingParams(temperature=0.0, frequency_penalty=0.6)
    row = torch.tensor([[1.0, 0.9, 0.0]])
    one = state(params, 3, prompt=[0, 0, 0])
    assert [sample(row, [params], [one])[0].token_id for _ in range(4)] == [0, 1, 0, 1]


def test_masked_tokens_are_never_drawn():
    row = torch.full((64, 2000), -math.inf)
    row[:, [3, 1999]] = 0.0
    for case in CASES[:5]:
        states = [state(case, 2000) for _ in range(64)]
        assert {one.token_id for one in sample(row, [case] * 64, states)} == {3, 1999}


@pytest.mark.parametrize("draw", [0.0, 1.0 - 2**-53])
@pytest.mark.parametrize("case", CASES[:5])
def test_the_ends_of_the_unit_interval_stay_inside(draw, case):
    row = torch.randn(1, 5000)
    row[0, 4000:] = -math.inf
    one = state(case, 5000)
    one.generator.random = lambda: draw
    assert sample(row, [case], [one])[0].token_id < 4000
