"""Role changes, from a script of what a fleet shows."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.policy.roles import RoleController, RoleTerms, SeenFleet, SeenServer

TERMS = RoleTerms(slo_ttft_s=2.0, slo_itl_s=0.1, queue_max=4, streams_max=8, patience=3, dwell_s=60)
CALM = {"ttft_s": 0.5, "itl_s": 0.02}
SLOW_START = {"ttft_s": 3.0, "itl_s": 0.02}
SLOW_TOKENS = {"ttft_s": 0.5, "itl_s": 0.2}


def server(url, role, running=0, **facts):
    return SeenServer(url=url, role=role, running=running, **{"is_changeable": True} | facts)


def fleet(*servers, **times):
    return SeenFleet(servers=servers, **times)


THREE = (server("a", "prefill"), server("b", "decode", 2), server("c", "decode", 1))


def run(script, controller=None):
    """Changes as (second, url, role) of a script of (second, fleet)."""
    controller = controller or RoleController(TERMS)
    changes = [(second, controller.decide(seen, second)) for second, seen in script]
    return [(second, change.url, change.role) for second, change in changes if change is not None]


def test_slow_first_tokens_move_the_least_busy_decode_server_after_patience():
    script = [(second, fleet(*THREE, **SLOW_START)) for second in (0, 5, 10)]
    assert run(script) == [(10, "c", "prefill")]


def test_slow_tokens_move_a_prefill_server_to_decode():
    servers = (server("a", "prefill"), server("b", "prefill"), server("c", "decode"))
    assert run([(second, fleet(*servers, **SLOW_TOKENS)) for second in (0, 5, 10)]) == [(10, "a", "decode")]


def test_queues_tell_as_well_as_times():
    waiting = (server("a", "prefill", 9), *THREE[1:])
    assert run([(second, fleet(*waiting)) for second in (0, 5, 10)]) == [(10, "c", "prefill")]
    busy = (server("a", "prefill"), server("b", "prefill"), server("c", "both", 20))
    assert run([(second, fleet(*busy)) for second in (0, 5, 10)]) == [(10, "a", "decode")]


def test_a_moment_of_calm_starts_patience_anew():
    script = [
        (0, SLOW_START),
        (5, SLOW_START),
        (10, CALM),
        (15, SLOW_START),
        (20, SLOW_START),
        (25, SLOW_START),
    ]
    assert run([(second, fleet(*THREE, **times)) for second, times in script]) == [(25, "c", "prefill")]


def test_opposite_wishes_do_not_add_up():
    servers = (server("a", "prefill"), *THREE)
    script = [SLOW_START, SLOW_START, SLOW_TOKENS, SLOW_TOKENS, SLOW_START, SLOW_START]
    assert run([(5 * at, fleet(*servers, **times)) for at, times in enumerate(script)]) == []


def test_between_the_limits_nothing_happens_and_two_sides_in_need_keep_what_they_have():
    near = {"ttft_s": 1.9, "itl_s": 0.075}
    both = {"ttft_s": 3.0, "itl_s": 0.2}
    tight = {"ttft_s": 3.0, "itl_s": 0.08}
    for times in (near, both, tight, {}):
        assert run([(5 * at, fleet(*THREE, **times)) for at in range(20)]) == []


def test_after_a_change_nothing_is_changed_for_the_dwell():
    four = (*THREE, server("d", "decode", 5))
    script = [(second, fleet(*four, **SLOW_START)) for second in range(0, 100, 5)]
    assert run(script) == [(10, "c", "prefill"), (70, "c", "prefill")]


def test_one_change_at_a_time():
    draining = (server("a", "prefill"), server("b", "decode"), server("c", "decode", is_draining=True))
    assert run([(5 * at, fleet(*draining, **SLOW_START)) for at in range(20)]) == []


def test_the_last_of_a_kind_stays():
    pair = (server("a", "prefill"), server("b", "decode"))
    for times in (SLOW_START, SLOW_TOKENS):
        assert run([(5 * at, fleet(*pair, **times)) for at in range(20)]) == []
    # One that is down cannot be counted on.
    down = (server("a", "prefill"), server("b", "decode"), server("c", "decode", is_up=False))
    assert run([(5 * at, fleet(*down, **SLOW_START)) for at in range(20)]) == []


def test_only_servers_that_may_be_changed_are():
    fixed = tuple(msgspec.structs.replace(one, is_changeable=one.url == "b") for one in THREE)
    assert run([(5 * at, fleet(*fixed, **SLOW_START)) for at in range(3)]) == [(10, "b", "prefill")]
    none = tuple(msgspec.structs.replace(one, is_changeable=False) for one in THREE)
    assert run([(5 * at, fleet(*none, **SLOW_START)) for at in range(20)]) == []


ROLES = st.sampled_from(["both", "prefill", "decode"])
SEEN = st.builds(server, st.sampled_from("abcdef"), ROLES, st.integers(0, 50), is_up=st.booleans())


@settings(deadline=None)
@given(
    st.lists(SEEN, min_size=1, max_size=6, unique_by=lambda one: one.url),
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1)), max_size=40),
)
def test_no_script_takes_the_last_of_a_kind_or_hurries(servers, script):
    controller = RoleController(TERMS)
    seen, last_s = {one.url: one for one in servers}, None
    for at, (ttft_s, itl_s) in enumerate(script):
        change = controller.decide(SeenFleet(servers=[*seen.values()], ttft_s=ttft_s, itl_s=itl_s), 5.0 * at)
        if change is None:
            continue
        assert last_s is None or 5.0 * at - last_s >= TERMS.dwell_s
        last_s = 5.0 * at
        old = seen[change.url]
        seen[change.url] = msgspec.structs.replace(old, role=change.role)
        side = [
            one for one in seen.values() if one.is_up and (one.role == "prefill") == (old.role == "prefill")
        ]
        assert side, "the side that gave a server has one left"


@pytest.mark.parametrize("servers", [(), (server("a", "both"),)], ids=["none", "one"])
def test_a_fleet_of_nobody_or_one_is_left_alone(servers):
    assert run([(5 * at, fleet(*servers, **SLOW_START)) for at in range(9)]) == []
