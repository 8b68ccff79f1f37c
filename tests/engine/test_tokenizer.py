import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.core.errors import ClientError, ConfigError
from workmem.engines.embedded.tokenizer import ModelTokenizer
from workmem.testing.tiny_models import build_tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Wetter für eine Stadt", "parameters": {"type": "object"}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
CHAT = [
    {"role": "system", "content": "user"},
    {"role": "user", "content": "user"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "21° und sonnig"},
    {"role": "user", "content": "thank\nyou"},
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(folder)
    return ModelTokenizer(folder)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    def build(template):
        folder = tmp_path_factory.mktemp("templated")
        build_tokenizer(folder, chat_template=template)
        return ModelTokenizer(folder)

    return build


def texts(tokenizer, prompt):
    """(path, text) of every span, special tokens included."""
    return [
        (
            span.path,
            tokenizer.backend.decode(prompt.token_ids[span.start : span.end], skip_special_tokens=False),
        )
        for span in prompt.spans
    ]


def check(tokenizer, prompt):
    at = 0
    for span in prompt.spans:
        assert span.start == at < span.end
        at = span.end
    assert at == len(prompt.token_ids)


def test_each_field_is_found_even_where_it_repeats_the_template(tiny):
    prompt = tiny.render_chat(CHAT, tools=[TOOL])
    check(tiny, prompt)
    found = [(path, text) for path, text in texts(tiny, prompt) if path != "template"]
    assert found == [
        ("tools[0]", json.dumps(TOOL, ensure_ascii=False)),
        ("messages[0].content", "user"),
        ("messages[1].content", "user"),
        ("messages[2].tool_calls[0].function.arguments", '{"city": "Köln"}'),
        ("messages[3].content", "21° und sonnig"),
        ("messages[4].content", "thank\nyou"),
    ]


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(
        st.text(max_size=12)
        | st.sampled_from(["user", "<|im_end|>", "assistant\n", " ", "<|im_start|>user\n"]),
        min_size=1,
        max_size=5,
    )
)
def test_token_ids_are_those_of_the_whole_text(tiny, contents):
    chat = [{"role": "user", "content": content} for content in contents]
    prompt = tiny.render_chat(chat)
    check(tiny, prompt)
    text = tiny.hf.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt.token_ids == tiny.hf(text, add_special_tokens=False)["input_ids"]
    for index, content in enumerate(contents):
        spans = [s for s in prompt.spans if s.path == f"messages[{index}].content"]
        assert len(spans) == (1 if content else 0)


def test_a_template_that_trims_and_looks_into_content_still_gives_spans(make):
    tokenizer = make(
        "{% for m in messages %}[{{ m.role }}]{% if 'secret' in m.content %}!{% endif %}"
        "{{ m.content | trim }}{% endfor %}"
    )
    prompt = tokenizer.render_chat(
        [{"role": "user", "content": "  the secret \n"}, {"role": "user", "content": "more "}]
    )
    assert texts(tokenizer, prompt) == [
        ("template", "[user]!"),
        ("messages[0].content", "the secret"),
        ("template", "[user]"),
        ("messages[1].content", "more"),
    ]


def test_a_broken_call_in_the_history_is_shown_as_it_was(tiny):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}
    prompt = tiny.render_chat([{"role": "assistant", "content": "", "tool_calls": [call]}], tools=[TOOL])
    check(tiny, prompt)
    assert '{\\"city\\": ' in "".join(text for _, text in texts(tiny, prompt))


def test_nothing_given_is_changed(tiny):
    before = json.dumps([CHAT, TOOL])
    tiny.render_chat(CHAT, tools=[TOOL])
    assert json.dumps([CHAT, TOOL]) == before


def test_a_template_without_tools_gets_them_as_text(make):
    tokenizer = make("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    prompt = tokenizer.render_chat(CHAT, tools=[TOOL])
    check(tokenizer, prompt)
    spans = texts(tokenizer, prompt)
    assert ("tools[0]", json.dumps(TOOL["function"], ensure_ascii=False)) in spans
    call = "messages[2].tool_calls[0].function.arguments"
    assert any(path == call and "<tool_call>" in text for path, text in spans)
    assert any(path == "messages[3].content" and "21° und sonnig" in text for path, text in spans)
    assert any(path == "tools" and "To call a function" in text for path, text in spans)


@pytest.mark.parametrize("tools", ["{{ tools }}", ""], ids=["with tools", "without"])
def test_passages_of_a_content_are_told_apart(make, tools):
    """What a client sent in pieces is explained piece by piece, where the pieces are alike too."""
    tokenizer = make(tools + "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}")
    chat = [
        {"role": "system", "content": " one\ntwo"},
        {"role": "user", "content": "one\none\none "},
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "one\ntwo"},
        {"role": "tool", "tool_call_id": "c1", "content": "three"},
        {"role": "user", "content": "one"},
    ]
    passages = {
        "messages[0].content": [" one", "two"],
        "messages[1].content": ["one", "one", "one "],
        "messages[3].content": ["one", "two"],
    }
    prompt = tokenizer.render_chat(chat, tools=[TOOL], passages=passages)
    check(tokenizer, prompt)
    words = {
        path: "".join(text for at, text in texts(tokenizer, prompt) if at == path)
        for path, _ in texts(tokenizer, prompt)
    }
    for path, word in [
        ("messages[0].content[0]", "one"),
        ("messages[0].content[1]", "two"),
        ("messages[1].content[0]", "one"),
        ("messages[1].content[1]", "one"),
        ("messages[1].content[2]", "one"),
        ("messages[3].content[0]", "one"),
        ("messages[3].content[1]", "two"),
        ("messages[4].content", "three"),
        ("messages[5].content", "one"),
    ]:
        assert word in words[path], path
    assert prompt.token_ids == tokenizer.render_chat(chat, tools=[TOOL]).token_ids


@pytest.mark.parametrize(
    ("ending", "thinking"),
    [("", "possible"), ("<think>\n", "begun"), ("<think>\n\n</think>\n\n", "none")],
)
def test_a_prompt_says_whether_its_answer_begins_with_thoughts(make, ending, thinking):
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    tokenizer = make(template + "{{ '" + ending.replace("\n", "\\n") + "' }}")
    assert tokenizer.render_chat([{"role": "user", "content": "x"}]).thinking == thinking


def test_a_template_that_knows_no_thoughts_gives_none(tiny):
    assert tiny.render_chat([{"role": "user", "content": "<think>"}]).thinking == "none"


def test_the_developer_role_is_the_system_role(tiny):
    one = tiny.render_chat([{"role": "developer", "content": "be brief"}])
    assert one == tiny.render_chat([{"role": "system", "content": "be brief"}])


def test_a_template_that_knows_the_developer_role_gets_it(make):
    tokenizer = make("{% for m in messages %}[{{ 'D' if m.role == 'developer' else m.role }}]{% endfor %}")
    prompt = tokenizer.render_chat([{"role": "developer", "content": "be brief"}])
    assert texts(tokenizer, prompt) == [("template", "[D]")]


def test_a_template_that_refuses_is_the_clients_error(make):
    tokenizer = make("{% if messages %}{{ raise_exception('roles must alternate') }}{% endif %}")
    with pytest.raises(ClientError, match="roles must alternate") as caught:
        tokenizer.render_chat([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_no_template_is_the_clients_error(make):
    with pytest.raises(ClientError, match="no chat template"):
        make(None).render_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "add_generation_prompt", "return_dict"])
def test_template_arguments_cannot_replace_the_template(tiny, name):
    with pytest.raises(ClientError, match=name):
        tiny.render_chat([{"role": "user", "content": "x"}], template_kwargs={name: "y"})


def test_template_arguments_reach_the_template(make):
    tokenizer = make("{{ mood }}{% for m in messages %}{{ m.content }}{% endfor %}")
    prompt = tokenizer.render_chat([{"role": "user", "content": "x"}], template_kwargs={"mood": "calm"})
    assert texts(tokenizer, prompt)[0] == ("template", "calm")


def test_end_tokens_come_from_every_place(tmp_path):
    build_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 9}')
    tokenizer = ModelTokenizer(tmp_path)
    assert tokenizer.eos_ids == {7, 8, 9, tokenizer.backend.token_to_id("<|im_end|>")}


def test_a_folder_without_tokenizer_stops_the_start(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json; copy it"):
        ModelTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no usable tokenizer") as caught:
        ModelTokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.model
def test_the_real_model_renders_with_spans(smollm2, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in smollm2.glob("*.json*"):
        shutil.copy(file, folder)
    for file in smollm2.glob("*.jinja"):
        shutil.copy(file, folder)
    tokenizer = ModelTokenizer(folder)
    assert tokenizer.eos_ids == {2}
    prompt = tokenizer.render_chat(CHAT, tools=[TOOL])
    check(tokenizer, prompt)
    assert texts(tokenizer, prompt)[-1] == ("template", "<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.encode("plain text")) == "plain text"


def test_a_broken_template_stops_the_start(tmp_path):
    build_tokenizer(tmp_path, chat_template="{{ broken ")
    with pytest.raises(ConfigError, match=r"chat template of .* is broken at line 1"):
        ModelTokenizer(tmp_path)


def test_instructions_in_the_middle_stay_there_where_a_template_wants_them_first(make):
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    chat = [{"role": role, "content": role[0]} for role in ("system", "user", "system", "assistant", "user")]
    tokenizer = make(strict)
    prompt = tokenizer.render_chat(chat)
    check(tokenizer, prompt)
    assert tokenizer.decode(prompt.token_ids) == "[system]s[user]u[user]s[assistant]a[user]u"
    assert ("messages[2].content", "s") in texts(tokenizer, prompt)
    lax = make("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    assert lax.decode(lax.render_chat(chat).token_ids) == "[system]s[user]u[system]s[assistant]a[user]u"
