"""Real servers on one host's store, one for prompts and two for answers, and each side killed with `kill -9`."""

import json
import os
import signal
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from tests.gateway.fleets import FRONT, Fleet, text_of
from tests.host.test_command import store_served

from workmem.gateway.config import UpstreamConfig
from workmem.gateway.upstream import build_upstream_app
from workmem.testing.process import MODEL_NAME, Place, serving
from workmem.testing.server import running
from workmem.testing.tiny_models import build_model
from workmem.testing.waiting import wait_until

pytestmark = pytest.mark.timeout(400)
BLOCK = 16


class Real:
    """The front and the servers behind it: `pids` in the order prefill, decode, decode."""

    def __init__(self, fleet, pids):
        self.fleet = fleet
        self.pids = pids

    def body(self, words, **fields):
        content = " ".join(f"{words}{number}" for number in range(40))
        message = {"role": "user", "content": content}
        return {"model": MODEL_NAME, "messages": [message], "temperature": 0, "ignore_eos": True, **fields}

    def ask(self, base, body):
        request = urllib.request.Request(f"{base}/v1/chat/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read()

    def alone(self, body, number):
        """What a server says that computes all of it, and leaves nothing behind."""
        whole = body | {"workmem": {"reuse": False}, "stream": False}
        answer = json.loads(self.ask(self.fleet.urls[number], whole))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        return answer["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pd")
    model = build_model(folder / "model", max_position_embeddings=1024)
    place = Place(model, folder / "ssd")
    more = {"store.host.attach": "require", "store.host.socket": folder / "store.sock"}
    with ExitStack() as stack:
        stack.enter_context(store_served(folder))
        # SIGKILL is how they end here, by the tests or after them.
        starts = [serving(place, signal.SIGKILL, more=more) for _ in range(3)]
        with ThreadPoolExecutor(3) as pool:
            servers = list(pool.map(stack.enter_context, starts))
        upstream = UpstreamConfig(
            urls=tuple(server.url for server in servers),
            roles=("prefill", "decode", "decode"),
            split="always",
            split_min_tokens=32,
            handoff_wait_s=5.0,
        )
        app = build_upstream_app(upstream, FRONT)
        url = stack.enter_context(running(app, FRONT))
        fleet = Fleet(None, upstream.urls, app)
        real = Real(fleet, [server.pid for server in servers])
        real.front = url
        urllib.request.urlopen(f"{url}/v1/models", timeout=60).close()
        yield real


def last(real):
    with urllib.request.urlopen(f"{real.front}/debug/requests?n=1", timeout=20) as answer:
        return json.load(answer)["data"][0]


def the_decode_server_computes_the_tail_alone_and_answers_as_one_would(real):
    body = real.body("early", max_tokens=24)
    answer = json.loads(real.ask(real.front, body))
    split = last(real)["split"]
    assert split["is_split"], split
    usage = answer["usage"]
    assert usage["prompt_tokens"] == split["prompt_tokens"] > 200
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= (usage["prompt_tokens"] - 1) // BLOCK * BLOCK
    assert answer["choices"][0]["message"]["content"] == real.alone(body, 2)


def a_prefill_server_that_is_killed_in_the_middle_costs_no_answer(real):
    body = real.body("middle", max_tokens=24)
    expected = real.alone(body, 1)
    # Frozen first, so that it is certain to be in the middle of it.
    os.kill(real.pids[0], signal.SIGSTOP)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(json.loads(real.ask(real.front, body))))
    thread.start()
    server = real.fleet.app.state.servers[0]
    wait_until(lambda: server.in_flight > 0)
    os.kill(real.pids[0], signal.SIGKILL)
    thread.join(60)
    assert answers[0]["choices"][0]["message"]["content"] == expected
    assert last(real)["split"]["fallback"] == "prefill_broke_off"


def a_decode_server_that_is_killed_in_a_stream_costs_no_token(real):
    body = real.body("late", max_tokens=120, stream=True, stream_options={"include_usage": True})
    expected = {number: real.alone(body, number) for number in (1, 2)}
    assert expected[1] == expected[2]
    request = urllib.request.Request(f"{real.front}/v1/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=120) as answer:
        begun = answer.readline()
        number = next(at for at in (1, 2) if real.fleet.app.state.servers[at].in_flight)
        os.kill(real.pids[number], signal.SIGKILL)
        stream = begun + answer.read()
    text, ids, end = text_of(stream)
    assert (text, len(ids), end) == (expected[1], 1, True)
    record = last(real)
    assert record["resumed_on"] == [real.fleet.urls[3 - number]]
    assert record["usage"]["completion_tokens"] == 120


def test_a_prompt_is_handed_over_and_no_death_costs_an_answer(real):
    # In this order, for the servers are started once: each death leaves one less.
    the_decode_server_computes_the_tail_alone_and_answers_as_one_would(real)
    a_prefill_server_that_is_killed_in_the_middle_costs_no_answer(real)
    a_decode_server_that_is_killed_in_a_stream_costs_no_token(real)
