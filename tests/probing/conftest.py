"""A server with a prefix cache over words, which can be told to fail or to lie in each way that is looked for."""

import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


@dataclass
class StandIn:
    """A template is words, a token is a word."""

    block: int = 16
    minimum: int = 0
    caches: bool = True
    reports: bool = True
    claims: int | None = None
    """What it reports, whatever it reused."""
    has_metrics: bool = False
    tools: str = "first"
    """first, after_instructions, after_history, or none: where they are printed."""
    sorts_tools: bool = False
    strips_thinking: bool = False
    keeps_thinking: bool = False
    heeds_salt: bool = True
    keeps_output: bool = True
    changes_early_text: bool = False
    only_newest: bool = False
    """Keeps nothing but the last prompt, as a slot does."""
    seconds_per_token: float = 0.0
    apis: tuple = ("/v1/chat/completions", "/v1/responses")
    key: str = ""
    context: int | None = None
    refuses: tuple = ()
    """Fields of a body that it does not know."""
    needs_choice: bool = False
    """Refuses tools that may be called."""
    url: str = ""
    requests: int = 0
    hits: int = 0
    kept: set = field(default_factory=set)

    def answer(self, path: str, body: dict, headers) -> tuple[int, dict]:
        if path not in self.apis:
            return 404, {"detail": "Not Found"}
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            return 401, {"error": {"message": "no key"}}
        if "model" not in body:
            return 400, {"error": {"message": "model is missing"}}
        for name in self.refuses:
            if name in body:
                return 400, {"error": {"message": f"Unsupported parameter: {name}"}}
        if self.needs_choice and body.get("tools") and body.get("tool_choice") != "none":
            return 400, {"error": {"message": '"auto" tool choice requires a parser to be set'}}
        self.requests += 1
        tokens = self.rendered(path, body)
        if self.context and len(tokens) > self.context:
            return 400, {"error": {"message": "too long"}}
        cached = self.lookup(tokens, body.get("cache_salt") if self.heeds_salt else None)
        time.sleep((len(tokens) - cached) * self.seconds_per_token)
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or body.get("max_output_tokens")
        made = [f"word{number}" for number in range(limit)]
        if self.keeps_output:
            self.keep([*tokens, *made[:-1]], None)
        return 200, self.replied(path, tokens, made, cached)

    def replied(self, path, tokens, made, cached):
        said = {} if not self.reports else {"cached_tokens": cached if self.claims is None else self.claims}
        if path == "/v1/messages":
            usage = {"output_tokens": len(made), "input_tokens": len(tokens)}
            if self.reports:
                usage |= {"input_tokens": len(tokens) - cached, "cache_read_input_tokens": cached}
            return {"id": "msg_1", "content": [{"type": "text", "text": " ".join(made)}], "usage": usage}
        if path == "/v1/responses":
            return {"id": "r", "usage": {"input_tokens": len(tokens), "input_tokens_details": said}}
        usage = {"prompt_tokens": len(tokens), "completion_tokens": len(made)}
        message = {"role": "assistant", "content": " ".join(made)}
        return {
            "id": "c",
            "choices": [{"message": message}],
            "usage": usage | {"prompt_tokens_details": said or None},
        }

    def rendered(self, path, body) -> list[str]:
        if path == "/v1/responses":
            return ["<user>", *body["input"].split()]
        messages = body["messages"]
        if path == "/v1/messages":
            messages = [{"role": "system", "content": body["system"]}, *messages]
        system = [word for one in messages if one["role"] == "system" for word in words(one["content"])]
        asked = [index for index, one in enumerate(messages) if one["role"] == "user"]
        history = []
        for index, one in enumerate(messages):
            if one["role"] == "system":
                continue
            thought = words(one.get("reasoning_content") or "")
            said = words(one["content"])
            if self.strips_thinking and "</think>" in said:
                said = said[said.index("</think>") + 1 :]
            is_kept = self.keeps_thinking or (self.strips_thinking and index > asked[-1])
            history += [f"<{one['role']}>", *(thought if is_kept else []), *said, "<end>"]
        tools = body.get("tools") or []
        if self.sorts_tools:
            tools = json.loads(
                json.dumps(sorted(tools, key=lambda tool: tool["function"]["name"]), sort_keys=True)
            )
        printed = json.dumps(tools, indent=0).split() if tools and self.tools != "none" else []
        start = [f"at-{self.requests}"] if self.changes_early_text else ["<system>"]
        if self.tools == "first":
            return [*start, *printed, *system, *history, "<assistant>"]
        if self.tools == "after_instructions":
            return [*start, *system, *printed, *history, "<assistant>"]
        return [*start, *system, *history, *printed, "<assistant>"]

    def lookup(self, tokens, salt) -> int:
        ends = range(self.block, len(tokens), self.block)
        cached = 0
        for end in ends:
            if (salt, *tokens[:end]) not in self.kept:
                break
            cached = end
        if self.only_newest:
            self.kept.clear()
        if self.caches:
            self.keep(tokens, salt)
        cached = cached if cached >= self.minimum else 0
        self.hits += cached
        return cached

    def keep(self, tokens, salt) -> None:
        if self.caches:
            self.kept |= {(salt, *tokens[:end]) for end in range(self.block, len(tokens) + 1, self.block)}


def words(content) -> list[str]:
    if isinstance(content, list):
        return [word for part in content for word in words(part.get("text", ""))]
    return (content or "").split()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        one = self.server.stand_in
        if self.path == "/v1/models":
            model = {"id": "m", "owned_by": "stand-in"} | (
                {"max_model_len": one.context} if one.context else {}
            )
            self.reply(200, {"data": [model]})
        elif self.path == "/metrics" and one.has_metrics:
            self.reply(200, f'# HELP x\nvllm:prefix_cache_hits_total{{engine="0"}} {float(one.hits)}\n')
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.reply(*self.server.stand_in.answer(self.path, body, self.headers))

    def reply(self, status, body):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@contextmanager
def standing_in(**how):
    one = StandIn(**how)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.stand_in = one
    one.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield one
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(name="standing_in")
def standing_in_fixture():
    return standing_in
