"""The forms in which people have their requests."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workmem.core.errors import ClientError, ConfigError
from workmem.linting.files import read
from workmem.prompt.lint.entries import read_line

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
MESSAGES = {
    "model": "m",
    "max_tokens": 5,
    "system": "Be kind.",
    "messages": [{"role": "user", "content": "Hi"}],
}
RESPONSES = {"model": "m", "input": "Hi"}
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "messages",
                    "input",
                    "body",
                    "request",
                    "role",
                    "content",
                    "tools",
                    "path",
                    "headers",
                    "text",
                ]
            )
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


def compact(body):
    return json.dumps(body, separators=(",", ":"))


def entry_of(value):
    return read_line(json.dumps(value).encode())


@pytest.mark.parametrize(("body", "name"), [(CHAT, "chat"), (MESSAGES, "messages"), (RESPONSES, "responses")])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda body: body,
        lambda body: {"body": body},
        lambda body: {"request": body, "response": {"id": "x"}},
        lambda body: {"custom_id": "1", "method": "POST", "url": "/v1/x", "body": body} | {"url": ""},
        lambda body: {"seq": 1, "ts": 1.5, "headers": [["X-Session-Id", "s"]], "body_raw": compact(body)},
        lambda body: {"request": {"method": "POST", "headers": {"X-Session-Id": "s"}, "body": compact(body)}},
    ],
    ids=["bare", "body", "request", "batch", "captured", "proxy"],
)
def test_each_form_is_read_and_written_back_with_another_body(wrap, body, name):
    line = wrap(body)
    entry = entry_of(line)
    assert entry.dialect.name == name
    assert entry.body == body
    assert entry.with_body(body) == line
    other = entry.body | {"model": "other"}
    assert entry_of(entry.with_body(other)).body == other
    if "headers" in json.dumps(line):
        assert entry.headers == {"x-session-id": "s"}


def test_a_path_decides_where_the_body_does_not():
    line = {"path": "/v1/messages?beta=true", "body": CHAT}
    assert entry_of(line).dialect.name == "messages"
    assert entry_of({"url": "http://127.0.0.1:8000/v1/messages", "body": CHAT}).dialect.name == "messages"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages/count_tokens", "/v1/models"])
def test_what_leaves_nothing_in_a_prefix_cache_is_passed_over(path):
    assert entry_of({"path": path, "body": RESPONSES | CHAT}) is None


def test_vllm_tells_its_requests_in_its_log():
    body = json.dumps(CHAT)
    entry = read_line(f"DEBUG 11-30 22:00:00 [request_logger.py:78] Request N/A JSON body: {body}\n".encode())
    assert entry.body == CHAT
    line = b"Request chatcmpl-1 details: prompt: 'a [b]', prompt_token_ids: [1, 2, 3], prompt_embeds shape: None."
    assert read_line(line).token_ids == (1, 2, 3)
    assert read_line(b"INFO 11-30 22:00:00 [loggers.py:1] Avg prompt throughput: 0.0 tokens/s") is None
    with pytest.raises(ClientError, match="--max-log-len"):
        read_line(f"Request N/A JSON body: {body[:-4]}".encode())


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (b'{"model": "m"', "not valid JSON"),
        (b'{"model": "m"}', "holds no request"),
        (b'{"messages": 5}', "holds no request"),
        (b'{"body": "no json"}', "holds no request"),
        (b'{"messages": "\xff"}', "not valid JSON"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, line, wrong):
    file = tmp_path / "requests.jsonl"
    file.write_bytes(json.dumps(CHAT).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(ConfigError, match=wrong) as caught:
        list(read(file))
    assert str(caught.value).startswith(f"{file}:3: ")


def test_a_list_is_told_how_to_become_lines(tmp_path):
    file = tmp_path / "requests.json"
    file.write_text(json.dumps([CHAT]))
    with pytest.raises(ConfigError, match="jq -c"):
        list(read(file))


def test_files_that_are_not_there_or_broken_are_said(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read(tmp_path / "none.jsonl"))
    file = tmp_path / "cut.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(CHAT).encode() * 50)[:-20])
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read(file))


@given(ANY_JSON)
def test_any_json_is_a_request_or_says_what_it_lacks(value):
    try:
        entry = read_line(json.dumps(value).encode())
    except ClientError:
        return
    assert entry is None or entry.dialect is not None
