"""Configurations that are not handled are refused by field and value, with what to do; and none that is."""

from types import SimpleNamespace

import pytest

from workmem.engines.vllm.refusals import ONE_ONLY, refusal, weights_beside


class FullAttentionSpec:
    block_size = 16


class SlidingWindowSpec(FullAttentionSpec):
    pass


def config(*, prefix_caching: bool = True, **parallel: int) -> SimpleNamespace:
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        parallel_config=SimpleNamespace(**dict.fromkeys(ONE_ONLY, 1) | parallel),
    )


def kv_cache(*specs: object, hash_block_size: int | None = None) -> SimpleNamespace:
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups, hash_block_size=hash_block_size)


ONE = kv_cache(FullAttentionSpec())


def test_what_is_handled_is_taken():
    assert refusal(config(), ONE) == ""
    assert refusal(config(), kv_cache(FullAttentionSpec(), hash_block_size=16)) == ""


@pytest.mark.parametrize("field", ONE_ONLY)
def test_more_than_one_is_refused_by_name_and_value(field):
    said = refusal(config(**{field: 3}), ONE)
    assert f"{field} is 3" in said
    assert ONE_ONLY[field] in said


@pytest.mark.parametrize(
    ("made", "cache", "words"),
    [
        (config(prefix_caching=False), ONE, ["enable_prefix_caching is False", "--no-enable-prefix-caching"]),
        (
            config(),
            kv_cache(FullAttentionSpec(), SlidingWindowSpec()),
            [
                "2 groups (FullAttentionSpec, SlidingWindowSpec)",
                "--disable-hybrid-kv-cache-manager",
            ],
        ),
        (config(), kv_cache(), ["0 groups (none)"]),
        (config(), kv_cache(SlidingWindowSpec()), ["SlidingWindowSpec", "serve it without workmem"]),
        (
            config(),
            kv_cache(FullAttentionSpec(), hash_block_size=8),
            ["hash_block_size is 8", "16", "--block-size 8"],
        ),
    ],
)
def test_others_are_refused_in_words(made, cache, words):
    said = refusal(made, cache)
    assert all(word in said for word in words), said


def weights(load_format: str = "auto", drafter: str | None = None, *, has_kv: bool = True) -> str:
    drafting = SimpleNamespace(
        method="eagle",
        uses_draft_kv_cache=lambda: has_kv,
        draft_model_config=SimpleNamespace(model=drafter, revision=None),
    )
    return weights_beside(
        SimpleNamespace(
            load_config=SimpleNamespace(load_format=load_format),
            speculative_config=drafting if drafter else None,
        )
    )


def test_made_up_weights_and_drafters_are_told_apart_from_the_folders_own():
    assert weights() == weights("safetensors") == weights(drafter="a", has_kv=False) == ""
    found = [
        weights("dummy"),
        weights("sharded_state"),
        weights("pt"),
        weights(drafter="a"),
        weights(drafter="b"),
    ]
    assert "" not in found
    assert len(set(found)) == 5
