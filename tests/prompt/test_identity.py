import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workmem.core.generation import Caller
from workmem.prompt.identity import identify
from workmem.prompt.sessions import SessionInferrer, history_of

RUNTIME = "Runtime: agent=main | session=agent:main:bench | sessionId=b1 | host=vm | os=Linux"
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, {}, {}),
        ({"x-session-id": "s1"}, {}, {"session": "s1"}),
        ({"x-workmem-session": "own", "x-session-id": "s1"}, {}, {"session": "own"}),
        ({"session_id": "codex"}, {"prompt_cache_key": "k"}, {"session": "codex"}),
        ({"x-session-affinity": "oc", "x-parent-session-id": "p"}, {}, {"session": "oc", "parent": "p"}),
        (
            {"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"},
            {},
            {"session": "c", "agent": "a"},
        ),
        ({}, {"prompt_cache_key": "k"}, {"session": "k"}),
        ({}, {"session_id": "b"}, {"session": "b"}),
        (
            {},
            {"metadata": {"session_id": "s", "agent": "planner", "workflow": "w"}, "prompt_cache_key": "k"},
            {"session": "s", "agent": "planner", "workflow": "w"},
        ),
        ({}, {"metadata": {"user_id": json.dumps({"session_id": "claude"})}}, {"session": "claude"}),
        ({}, {"metadata": {"user_id": "{broken"}}, {}),
        (
            {},
            {
                "vllm_xargs": {
                    "agentic_context": json.dumps({"session_id": "v", "agent_id": "x", "program_id": "p"})
                }
            },
            {"session": "v", "agent": "x", "workflow": "p"},
        ),
        (
            {"traceparent": TRACE},
            {},
            {"workflow": "4bf92f3577b34da6a3ce929d0e0e4736", "trace": "4bf92f3577b34da6a3ce929d0e0e4736"},
        ),
        ({}, {"metadata": {"user_id": "user_9f_account__session_0a1b2c3d-44"}}, {"session": "0a1b2c3d-44"}),
        (
            {
                "x-claude-code-session-id": "c",
                "x-claude-code-agent-id": "b",
                "x-claude-code-parent-agent-id": "a",
            },
            {},
            {"session": "c", "agent": "b", "parent": "a"},
        ),
        ({"x-litellm-session-id": "l"}, {"prompt_cache_key": "k"}, {"session": "l"}),
        ({}, {"conversation": {"id": "conv_1"}}, {"session": "conv_1"}),
        (
            {},
            {"client_metadata": {"session_id": "c", "agent_name": "/root"}},
            {"session": "c", "agent": "/root"},
        ),
        (
            {},
            {
                "workmem": {"session": "s", "agent": "a", "parent": "p", "workflow": "w"},
                "metadata": {"agent": "x"},
            },
            {"session": "s", "agent": "a", "parent": "p", "workflow": "w"},
        ),
        (
            {},
            {"vllm_xargs": {"tokencake": {"lifecycle_id": "l", "agent_type": "coder", "join_group": "g"}}},
            {"session": "l", "agent": "coder", "workflow": "g"},
        ),
        (
            {},
            {"agent_hint": {"session_id": "s", "parent_session_id": "p"}},
            {"session": "s", "parent": "p"},
        ),
        (
            {},
            {"messages": [{"role": "user", "content": f"Hi.\n{RUNTIME}"}]},
            {"session": "agent:main:bench", "agent": "main"},
        ),
        (
            {},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": RUNTIME}]}]},
            {"session": "agent:main:bench", "agent": "main"},
        ),
        ({"x-session-id": "s"}, {"messages": [{"role": "user", "content": RUNTIME}]}, {"session": "s"}),
        ({"traceparent": "00-" + "0" * 32 + "-0-0"}, {}, {}),
        ({"traceparent": "nonsense"}, {}, {}),
        ({}, {"user": "u", "safety_identifier": "si"}, {"workflow": "si"}),
        ({}, {"user": "u"}, {"workflow": "u"}),
        ({}, {"tenant": "evil", "metadata": {"tenant": "evil"}}, {}),
        ({}, {"metadata": [1], "prompt_cache_key": 5, "user": None, "vllm_xargs": "x"}, {}),
    ],
)
def test_first_match_wins(headers, body, expected):
    assert identify(headers, body, tenant="t") == Caller(tenant="t", **expected)


def test_long_and_odd_names_become_bounded_digests():
    for name in ("x" * 1000, "a\nb", "\x00"):
        session = identify({"x-session-id": name}, {}, tenant="").session
        assert len(session) == 32
        assert session.isalnum()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["metadata", "user", "prompt_cache_key", "session_id", "vllm_xargs", "safety_identifier"]


@given(
    st.dictionaries(
        st.sampled_from(FIELDS), JSON | st.dictionaries(st.sampled_from([*FIELDS, "user_id"]), JSON)
    ),
    st.dictionaries(st.sampled_from(["traceparent", "x-session-id"]), st.text(max_size=80)),
)
def test_nothing_a_client_sends_breaks_it(body, headers):
    caller = identify(headers, body, tenant="t")
    assert caller.tenant == "t"
    assert max(len(caller.session), len(caller.agent), len(caller.workflow)) <= 128


def chat(*turns):
    roles = ["system", "user", "assistant"]
    return [{"role": roles[min(i, 1 + (i + 1) % 2)], "content": turn} for i, turn in enumerate(turns)]


def test_a_longer_history_is_the_same_session():
    sessions = SessionInferrer()
    first = sessions.infer("t", chat("sys", "a"))
    assert sessions.infer("t", chat("sys", "a", "b", "c")) == first
    assert sessions.infer("t", chat("sys", "a", "b", "c", "d", "e")) == first
    assert sessions.infer("t", chat("sys", "a")) == first


def test_another_start_tenant_or_model_is_another_session():
    sessions = SessionInferrer()
    first = sessions.infer("t", chat("sys", "a"))
    assert sessions.infer("t", chat("sys", "x")) != first
    assert sessions.infer("t2", chat("sys", "a")) != first


def test_a_session_has_the_same_name_after_a_restart():
    assert SessionInferrer().infer("t", chat("sys", "a")) == SessionInferrer().infer("t", chat("sys", "a"))


def test_a_lone_system_message_is_nobodys_history():
    sessions = SessionInferrer()
    sessions.infer("t", chat("sys"))
    assert sessions.infer("t", chat("sys", "a")) != sessions.infer("t", chat("sys", "b"))


def test_memory_is_bounded_and_keeps_the_recent():
    sessions = SessionInferrer(sessions_max=3)
    names = [sessions.infer("t", chat("sys", str(i))) for i in range(10)]
    assert len(sessions) == 3
    assert sessions.infer("t", chat("sys", "9", "b", "c")) == names[9]


def test_raw_text_that_grows_is_the_same_session():
    sessions = SessionInferrer()
    text = "".join(f"line {i}\n" for i in range(200))
    first = sessions.infer("t", history_of({"prompt": text}))
    assert sessions.infer("t", history_of({"prompt": text + "and more"})) == first
    assert sessions.infer("t", history_of({"prompt": "!" + text})) != first
    assert history_of({"prompt": 5}) == []


def test_a_mark_that_moves_to_the_newest_turn_does_not_end_a_session():
    def turn(text, *, marked):
        mark = {"cache_control": {"type": "ephemeral"}} if marked else {}
        return {"role": "user", "content": [{"type": "text", "text": text, **mark}]}

    sessions = SessionInferrer()
    first = sessions.infer("t", [turn("a", marked=True)])
    assert sessions.infer("t", [turn("a", marked=False), turn("b", marked=True)]) == first
    assert sessions.infer("t", [turn("x", marked=False), turn("b", marked=True)]) != first
