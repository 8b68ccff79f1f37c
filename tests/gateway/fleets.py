"""A front before stand-ins, and what it counted."""

import json
from contextlib import contextmanager

from workmem.gateway.config import ServerConfig, UpstreamConfig
from workmem.gateway.upstream import build_upstream_app
from workmem.testing.server import running

FRONT = ServerConfig(port=0, shutdown_s=1)


class Fleet:
    """`front` is a `Wire`; `urls` are those of the stand-ins, in their order."""

    def __init__(self, front, urls, app):
        self.front = front
        self.urls = urls
        self.app = app

    def chat(self, content="x" * 4000, headers=None, **fields):
        """(status, decoded body or bytes)."""
        body = {"model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        status, _, answer = self.front.post("/v1/chat/completions", body, headers)
        return status, answer

    def readings(self):
        page = self.front.get("/metrics")[2].decode()
        lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
        return {
            name.removeprefix("workmem_").removeprefix("upstream_"): float(value) for name, value in lines
        }

    def last(self):
        return self.front.get("/debug/requests?n=1")[2]["data"][0]

    def servers(self):
        return self.front.get("/debug/servers")[2]["data"]


@contextmanager
def fleet_of(seats, wire_to, *standins, roles=(), server=FRONT, **upstream):
    """Run `standins` behind a front that has heard what they serve."""
    urls = tuple(url for (_, url), _ in zip(seats, standins, strict=False))
    for (seat, _), standin in zip(seats, standins, strict=False):
        seat.taken_by = standin
    app = build_upstream_app(UpstreamConfig(urls=urls, roles=roles, **upstream), server)
    with running(app, server) as url:
        front = wire_to(url)
        front.get("/v1/models", {"authorization": "Bearer root"})
        yield Fleet(front, urls, app)


def text_of(stream):
    """(text, ids, whether it ended as it should) of a streamed chat or completion."""
    text, ids, is_done = "", set(), False
    for event in stream.decode().split("\n\n"):
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            is_done = True
        elif data.startswith("{"):
            body = json.loads(data)
            if "error" in body:
                return text, ids, body["error"]["code"]
            ids.add(body["id"])
            for choice in body["choices"]:
                said = choice["delta"].get("content") if "delta" in choice else choice["text"]
                text += said or ""
    return text, ids, is_done
