"""What answers teach of costs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from workmem.gateway.expected import Ended, Expectations
from workmem.gateway.servers import UpstreamServer
from workmem.gateway.usage_peek import UNREPORTED, PeekedUsage


def ended(server: UpstreamServer) -> Ended:
    return Ended(
        server=server,
        model="m",
        session="",
        body_bytes=4000,
        has_ids=False,
        handed_tokens=1000,
        first_token_s=None,
    )


def answer(waited_s: float, **by_source: int) -> SimpleNamespace:
    usage = PeekedUsage(prompt_tokens=1000, completion_tokens=4, by_source=by_source)
    return SimpleNamespace(usage=usage, waited_s=waited_s)


def test_a_server_that_got_nothing_of_what_was_handed_over_has_a_dear_handover():
    """It says how long it waited, and that it computed all of it behind that."""
    server = UpstreamServer("http://a")
    server.costs.learn_computing(1000, 1.0)
    for _ in range(8):
        Expectations().learn(ended(server), answer(0.0, computed=1000))
    costs = server.costs.costs()
    assert costs.recomputed_share == 1.0
    assert costs.handed_token_s == pytest.approx(costs.computed_token_s, rel=0.1)


def test_a_server_that_loaded_it_all_has_a_cheap_one():
    server = UpstreamServer("http://a")
    server.costs.learn_computing(1000, 1.0)
    for _ in range(8):
        Expectations().learn(ended(server), answer(0.02, cached=992, computed=8))
    costs = server.costs.costs()
    assert costs.recomputed_share < 0.01
    assert costs.handed_token_s < 0.1 * costs.computed_token_s


def test_what_nobody_reports_teaches_nothing_of_what_was_computed():
    server = UpstreamServer("http://a")
    Expectations().learn(ended(server), answer(0.02, **{UNREPORTED: 1000}))
    assert server.costs.recomputed.samples == 0
