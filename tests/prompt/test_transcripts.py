import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.prompt.prompt import Prompt
from workmem.prompt.transcripts import ReadHistory, Transcripts, TurnMeaning

TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}


def call(arguments, call_id="call_1", name="ls"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


HISTORY = [
    {"role": "system", "content": "You list files."},
    {"role": "user", "content": "What is here?"},
]
ANSWER = TurnMeaning("Let me look.", [("ls", '{"path": ".", "all": true}')])
BACK = [
    {"role": "assistant", "content": "Let me look.", "tool_calls": [call('{"all":true,"path":"."}', "c9")]},
    {"role": "tool", "tool_call_id": "c9", "content": "a.txt"},
]


def prompt(messages, tools=(TOOL,), **template):
    return Prompt(messages=messages, tools=list(tools), template_kwargs=template or None)


def read(messages, scope="model\0tenant", **more):
    return ReadHistory(scope, prompt(messages, **more))


def kept(messages=HISTORY, answer=ANSWER, ids=(7, 8, 9), scope="model\0tenant", memory=None, **more):
    memory = Transcripts(turns_max=100, tokens_max=1000) if memory is None else memory
    key = read(messages, scope, **more).key_of_answer(answer)
    memory.keep(key, prompt_chars=40, prompt_digest=b"d", token_ids=list(ids))
    return memory


def test_a_turn_is_found_in_whatever_words_it_comes_back():
    (known,) = kept().find(read([*HISTORY, *BACK]))
    assert (known.message, known.token_ids, known.prompt_chars) == (2, (7, 8, 9), 40)


CHANGES = {
    "the question": lambda m: m[1].update(content="What is there?"),
    "the instructions": lambda m: m[0].update(content="You list  files."),
    "a role": lambda m: m[1].update(role="system"),
    "a name": lambda m: m[1].update(name="bob"),
    "the text": lambda m: m[2].update(content="Let me see."),
    "no text": lambda m: m[2].update(content=""),
    "an argument": lambda m: m[2]["tool_calls"][0]["function"].update(arguments='{"all":true,"path":"/"}'),
    "a kind of argument": lambda m: m[2]["tool_calls"][0]["function"].update(
        arguments='{"all":1,"path":"."}'
    ),
    "the function": lambda m: m[2]["tool_calls"][0]["function"].update(name="rm"),
    "no call": lambda m: m[2].pop("tool_calls"),
    "one call more": lambda m: m[2]["tool_calls"].append(call("{}", "c10")),
    "a message before": lambda m: m.insert(1, {"role": "user", "content": "Hello"}),
    "a message dropped": lambda m: m.pop(0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_means_something_else_is_not_found(change):
    messages = copy.deepcopy([*HISTORY, *BACK])
    change(messages)
    assert kept().find(read(messages)) == []


def test_other_tools_options_models_and_tenants_have_other_turns():
    memory = kept()
    back = [*HISTORY, *BACK]
    assert memory.find(read(back, "model\0other")) == []
    assert memory.find(read(back, "other\0tenant")) == []
    assert memory.find(read(back, tools=())) == []
    assert memory.find(read(back, thinking=True)) == []
    assert len(memory.find(read(back))) == 1


def test_a_result_belongs_to_its_call_whatever_the_calls_are_named():
    history = [
        *HISTORY,
        {"role": "assistant", "content": "", "tool_calls": [call("{}", "a"), call("{}", "b")]},
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": "two"},
    ]
    memory = kept(history, TurnMeaning("Done.", []))
    end = {"role": "assistant", "content": "Done."}

    def renamed(first, second):
        text = json.dumps([*history, end])
        return json.loads(text.replace('"a"', '"#"').replace('"b"', f'"{second}"').replace("#", first))

    assert len(memory.find(read(renamed("call_x", "call_y")))) == 1
    swapped = [*history[:3], {**history[3], "tool_call_id": "b"}, {**history[4], "tool_call_id": "a"}, end]
    assert memory.find(read(swapped)) == []


def test_the_least_recently_used_turns_go_first_and_bounds_hold():
    memory = Transcripts(turns_max=3, tokens_max=10)
    for number in range(3):
        kept([{"role": "user", "content": str(number)}], ids=(1, 2, 3), memory=memory)

    def is_known(number):
        return bool(memory.find(read([{"role": "user", "content": str(number)}, BACK[0]])))

    assert [is_known(2), is_known(1), is_known(0)] == [True, True, True]
    kept([{"role": "user", "content": "3"}], ids=(1, 2, 3), memory=memory)
    assert (len(memory), memory.tokens) == (3, 9)
    assert [is_known(number) for number in range(4)] == [True, True, False, True]
    kept([{"role": "user", "content": "4"}], ids=range(8), memory=memory)
    assert (len(memory), memory.tokens) == (1, 8)
    kept([{"role": "user", "content": "5"}], ids=range(11), memory=memory)
    kept([{"role": "user", "content": "5"}], ids=(), memory=memory)
    assert (len(memory), memory.tokens) == (1, 8)


def test_of_turns_that_mean_the_same_the_latest_counts():
    memory = kept(ids=(1, 2))
    kept(ids=(3, 4, 5), memory=memory)
    (known,) = memory.find(read([*HISTORY, *BACK]))
    assert (known.token_ids, memory.tokens) == ((3, 4, 5), 3)


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["ann", "bob"]), st.integers(0, 3)), min_size=1, max_size=24
)


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_any_interleaving_of_sessions_and_tenants_finds_each_its_own(steps):
    """Sessions say the same words in part; every turn has tokens of its own."""
    memory = Transcripts(turns_max=1000, tokens_max=10**6)
    sessions, said = {}, {}
    for number, (session, tenant, word) in enumerate(steps):
        messages = sessions.setdefault(
            (session, tenant), [{"role": "user", "content": f"task {session % 2}"}]
        )
        history = read(messages, tenant)
        past = json.dumps(messages)
        for known in memory.find(history):
            before = json.dumps([*messages[: known.message + 1]])
            assert said[tenant, before] == known.token_ids
        answer = TurnMeaning(f"word {word}", [])
        key = history.key_of_answer(answer)
        memory.keep(key, prompt_chars=len(past), prompt_digest=b"", token_ids=[number + 1])
        messages.append({"role": "assistant", "content": f"word {word}"})
        said[tenant, json.dumps(messages)] = (number + 1,)
        messages.append({"role": "user", "content": "go on"})
        found = memory.find(read(messages, tenant))
        assert found[-1].token_ids == (number + 1,)
