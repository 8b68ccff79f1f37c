"""Turns that come back mean their tokens: over HTTP, with the real model where it is about its tokens."""

import asyncio
import json

import msgspec
import openai
import pytest

from workmem.engines.embedded.config import EmbeddedConfig
from workmem.engines.embedded.engine import EmbeddedEngine
from workmem.gateway.app import build_app
from workmem.gateway.config import ServerConfig
from workmem.testing.server import running

LS = {
    "type": "function",
    "function": {
        "name": "ls",
        "description": "Lists the files of a folder.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
}
QUESTION = {"role": "user", "content": "What is here?"}
CALL_TEXT = '<tool_call>{"name":"ls","arguments":{"path":"."}}</tool_call>'


def back_of(message, arguments=None, call_id="c1"):
    """An assistant's message as a client sends it back: calls with another id and other spaces."""
    calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": arguments or call["function"]["arguments"].replace(": ", ":"),
            },
        }
        for call in message.get("tool_calls") or ()
    ]
    return {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}


def test_a_turn_that_comes_back_is_known_and_others_are_not(engine, wire):
    engine.answer = CALL_TEXT
    _, _, first = wire.chat(tools=[LS])
    message = first["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "ls"
    result = {"role": "tool", "tool_call_id": "c1", "content": "a.txt"}
    asked = {"role": "user", "content": "Hi"}
    engine.answer = "It is a.txt."
    wire.post("/v1/chat/completions", chat([asked, back_of(message), result], tools=[LS]))
    (known,) = engine.known[-1]
    assert (known.message, bytes(known.token_ids).decode()) == (1, CALL_TEXT)
    # Both turns; and not behind a change of the first, nor for anybody who did not have it.
    end = {"role": "assistant", "content": "It is a.txt."}
    wire.post("/v1/chat/completions", chat([asked, back_of(message), result, end, QUESTION], tools=[LS]))
    assert [one.message for one in engine.known[-1]] == [1, 3]
    other = back_of(message, '{"path":"/"}')
    wire.post("/v1/chat/completions", chat([asked, other, result, end, QUESTION], tools=[LS]))
    assert engine.known[-1] == ()
    body = chat([asked, back_of(message), result, end, QUESTION], tools=[LS])
    for off in ({"reuse": False}, {"canonical": "off"}):
        wire.post("/v1/chat/completions", body | {"workmem": off})
        assert engine.known[-1] == ()
    page = wire.get("/metrics")[2].decode()
    assert 'workmem_transcript_turns_total{outcome="unknown"}' in page
    assert "workmem_transcript_tokens_held " in page


def chat(messages, **fields):
    return {"model": "fake-model", "messages": messages, **fields}


def test_turns_belong_to_their_tenant(engine, tmp_path, wire_to):
    keys = tmp_path / "keys"
    keys.write_text("one:ann\ntwo:bob\n")
    config = ServerConfig(port=0, shutdown_s=1, api_key_file=str(keys))
    engine.answer = "Hello."
    with running(build_app(engine, config), config) as url:
        wire = wire_to(url)
        history = [QUESTION, {"role": "assistant", "content": "Hello."}, QUESTION]
        counts = []
        for key, messages in (("one", [QUESTION]), ("two", history), ("one", history), ("two", [QUESTION])):
            sent = wire.post("/v1/chat/completions", chat(messages), {"authorization": f"Bearer {key}"})
            assert sent[0] == 200
            counts.append(len(engine.known[-1]))
    assert counts == [0, 0, 1, 0]


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_and_each_end_is_known(engine, wire, stream):
    answers = iter(["one", "two"])
    engine.answer = lambda _: next(answers)
    body = chat([QUESTION], n=2, stream=stream)
    wire.post("/v1/chat/completions", body)
    for text in ("one", "two"):
        engine.answer = "ok"
        wire.post(
            "/v1/chat/completions",
            chat([QUESTION, {"role": "assistant", "content": text}, QUESTION], stream=stream),
        )
        (known,) = engine.known[-1]
        assert bytes(known.token_ids).decode() == text


def test_a_turn_cut_by_its_length_is_known_and_one_that_failed_is_not(engine, wire):
    engine.answer = "a long story"
    wire.chat(max_tokens=6)
    asked = {"role": "user", "content": "Hi"}
    wire.post("/v1/chat/completions", chat([asked, {"role": "assistant", "content": "a long"}, QUESTION]))
    assert [bytes(one.token_ids) for one in engine.known[-1]] == [b"a long"]
    engine.later_error = RuntimeError("gone")
    wire.chat(content="Again")
    engine.later_error = None
    again = {"role": "user", "content": "Again"}
    wire.post("/v1/chat/completions", chat([again, {"role": "assistant", "content": "a l"}, QUESTION]))
    assert engine.known[-1] == ()


# --- with the real model ---

TERSE = (
    "You are an agent in a folder. To list files answer with one line and nothing else, exactly in this form: "
    + CALL_TEXT
)
SHOTS = [
    {"role": "user", "content": "List the files of src."},
    {"role": "assistant", "content": CALL_TEXT.replace('"."', '"src"')},
    {"role": "user", "content": "a.py b.py"},
    {"role": "assistant", "content": "There are two files."},
    {"role": "user", "content": "List the files of docs."},
    {"role": "assistant", "content": CALL_TEXT.replace('"."', '"docs"')},
    {"role": "user", "content": "a.md"},
    {"role": "assistant", "content": "There is one file."},
    {"role": "user", "content": "List the files of tests."},
]


class Recording(EmbeddedEngine):
    """Remembers what it was asked for."""

    def __init__(self, *args, **fields):
        super().__init__(*args, **fields)
        self.requests = []

    async def generate(self, request):
        self.requests.append(request)
        async for delta in super().generate(request):
            yield delta


@pytest.fixture(scope="module")
def recording(smollm2, tmp_path_factory):
    config = EmbeddedConfig(served_name="fake-model", vram_bytes="256MiB")
    return Recording.open(config, None, folder=smollm2, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def real(recording):
    server = ServerConfig(port=0, shutdown_s=2)
    with running(build_app(recording, server), server) as url:
        yield f"{url}/v1"


def ask(real, messages, **fields):
    body = {"temperature": 0, "max_tokens": 48, "tools": [LS]} | fields
    with openai.OpenAI(base_url=real, api_key="none", max_retries=0, timeout=170) as client:
        return client.chat.completions.create(model="fake-model", messages=messages, **body).model_dump()


def cached(body):
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.model
@pytest.mark.slow
def test_the_next_turn_of_a_call_finds_the_kv_of_the_call(real, recording):
    messages = [{"role": "system", "content": TERSE}, *SHOTS]
    first = ask(real, messages)
    message = first["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"path": "tests"}, first
    follow = [*messages, back_of(message), {"role": "tool", "tool_call_id": "c1", "content": "test_a.py"}]
    second = ask(real, follow)
    # One of the generated tokens was the end mark, which is not kept; the last kept one has no KV yet.
    generated = first["usage"]["completion_tokens"] - 1
    whole = first["usage"]["prompt_tokens"] + generated
    assert second["usage"]["workmem"]["transcript_memory"] == {"turns": 1, "tokens": generated}
    assert cached(second) >= (whole - 1) // 16 * 16
    # Without it the prompt is the template's, which the KV of the call is none of.
    asked = recording.requests[-1]
    plain = ask(real, follow, extra_body={"workmem": {"reuse": False}})
    assert "transcript_memory" not in plain["usage"]["workmem"]
    assert recording.requests[-1].token_ids != asked.token_ids
    pairs = enumerate(zip(recording.requests[-1].token_ids, asked.token_ids, strict=False))
    shared = next(index for index, (one, other) in pairs if one != other)
    assert shared < first["usage"]["prompt_tokens"] + generated
    # And the answer is that of a server that computes those tokens anew.
    cold = msgspec.structs.replace(asked, id="cold", reuse=False)

    async def again():
        return [token async for delta in recording.generate(cold) for token in delta.token_ids]

    ids = asyncio.run(again())
    assert recording._tokenizer.decode(ids) == second["choices"][0]["message"]["content"]


@pytest.mark.model
@pytest.mark.slow
def test_a_sampled_answer_comes_back_as_it_was_sampled(real):
    """At a high temperature tokens are split as no encoder would, which loses the prefix at the first of them."""
    messages = [{"role": "user", "content": "Tell me of the sea."}]
    used = 0
    for seed in range(3):
        first = ask(real, messages, temperature=2.0, seed=seed, max_tokens=40, tools=openai.NOT_GIVEN)
        text = first["choices"][0]["message"]["content"]
        back = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        second = ask(real, back, max_tokens=1, tools=openai.NOT_GIVEN)
        whole = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"] - 1
        if "\ufffd" not in text:
            assert cached(second) >= (whole - 1) // 16 * 16
            used += "transcript_memory" in second["usage"]["workmem"]
    assert used > 0
