"""The composition root over SmolLM2-135M-Instruct: what a fleet gains, and what it is told."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from workmem.app import open_app
from workmem.config import cache_dir, load
from workmem.testing.server import running

pytestmark = pytest.mark.model
MODEL = "smollm2-135m-instruct"
POLICY = "You are an airline agent. " + " ".join(
    f"Rule {number}: a booking of class {number} may be changed {number} times." for number in range(40)
)
QUESTION = "What is the capital of France?"


class Quiet:
    def begin(self, step: str) -> None:
        """Nobody watches."""

    def end(self, result: str) -> None:
        """Nobody watches."""

    def note(self, text: str) -> None:
        """Nobody watches."""


@pytest.fixture(scope="module")
def url(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    ssd = tmp_path_factory.mktemp("ssd")
    config = load(sets=(f"engine.model={smollm2}", f"store.ssd.path={ssd}", "store.dram.bytes=512MiB")).config
    with open_app(config, cache_dir=cache_dir(), progress=Quiet()) as app, running(app) as base:
        yield base


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def chat(client: openai.OpenAI, question: str = QUESTION, **options):
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": POLICY}, {"role": "user", "content": question}],
        temperature=0,
        **{"max_tokens": 24, **options},
    )


def test_the_second_agent_reads_what_the_first_computed(client: openai.OpenAI) -> None:
    first = chat(client)
    second = chat(client)
    assert second.choices[0].message.content == first.choices[0].message.content
    usage = second.usage
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16
    assert usage.workmem["tokens_by_source"]["vram"] == usage.prompt_tokens_details.cached_tokens


def test_explain_names_the_message_that_changed(client: openai.OpenAI, url: str) -> None:
    chat(client)
    changed = chat(client, "Which city is the capital of Germany, please?")
    with urllib.request.urlopen(f"{url}/debug/requests/{changed.id}", timeout=10) as answer:
        found = json.load(answer)
    assert found["cached_tokens"] == changed.usage.prompt_tokens_details.cached_tokens > 700
    assert found["difference"]["path"] == "messages[1].content"
    assert sum(part["tokens"] for span in found["spans"] for part in span["parts"]) == found["prompt_tokens"]


def test_too_long_and_unknown_and_malformed_are_told_clearly(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.BadRequestError, match="the model's context is 8192"):
        chat(client, "word " * 9000)
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "hi"}])
    broken = urllib.request.Request(
        f"{url}/v1/chat/completions", b'{"model": ', {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refusal:
        urllib.request.urlopen(broken, timeout=10)
    assert refusal.value.code == 400
    assert json.load(refusal.value)["error"]["type"] == "invalid_request_error"
