"""Prompts of recorded requests as the real model's own template makes them."""

import json

import pytest

from workmem.linting.files import Recorded
from workmem.linting.lint import Cache, Linter
from workmem.prompt.canonical.rules import DEFAULT_RULES
from workmem.prompt.lint.entries import read_line

pytestmark = pytest.mark.model

SYSTEM = "You answer questions about birds. " * 20
BODIES = {
    "chat": lambda said: {
        "messages": [
            {"role": "system", "content": SYSTEM},
            *({"role": role, "content": text} for role, text in said),
        ]
    },
    "messages": lambda said: {
        "max_tokens": 9,
        "system": [{"type": "text", "text": SYSTEM}],
        "messages": [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said],
    },
    "responses": lambda said: {
        "instructions": SYSTEM,
        "input": [{"type": "message", "role": role, "content": text} for role, text in said],
    },
}
SAID = [
    ("user", "Which bird sings at night?"),
    ("assistant", "The nightingale does."),
    ("user", "And by day?"),
]


@pytest.fixture(scope="module")
def renderer(smollm2):
    from workmem.linting.template_rendering import TemplateRenderer

    return TemplateRenderer(smollm2)


def entry_of(body):
    return read_line(json.dumps({"model": "m"} | body).encode())


def test_all_apis_give_the_same_tokens_for_the_same_words(renderer):
    entries, noted = [entry_of(write(SAID)) for write in BODIES.values()], renderer.notes()
    prompts = [renderer.render(entry.body, entry.dialect).token_ids for entry in entries]
    assert len(prompts[0]) > 100
    assert prompts[0] == prompts[1] == prompts[2]
    assert renderer.notes() == noted


@pytest.mark.parametrize("name", BODIES)
def test_a_growing_conversation_loses_nothing_and_a_clock_all_behind_it(renderer, name):
    write = BODIES[name]
    linter = Linter(Cache("vllm", 16), renderer, DEFAULT_RULES)
    for number, count in enumerate((1, 3), 1):
        linter.take(Recorded("f", number, entry_of(write(SAID[:count]))))
    assert linter.report().losses == []
    spoilt = json.loads(json.dumps(write(SAID)).replace("You answer", "It is 10:15:03. You answer", 1))
    linter.take(Recorded("f", 3, entry_of(spoilt)))
    (loss,) = linter.report().losses
    assert loss.cause in ("volatile_time", "system_changed")
    assert loss.tokens > 100


def test_what_no_template_takes_is_written_plainly_and_said(renderer):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    entry = entry_of({"messages": [{"role": "user", "content": [{"type": "text", "text": "Look"}, image]}]})
    assert renderer.render(entry.body, entry.dialect).token_ids
    assert "plain form" in renderer.notes()[0]
