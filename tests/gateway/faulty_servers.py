"""Stand-ins for servers behind the front, which can be made to fail in every way there is."""

import asyncio
import json

DIE_FIRST = "die_first"
"""The connection breaks before the answer begins."""
DIE_HALF = "die_half"
"""It breaks in the middle of the body: of a stream, in the middle of an event behind `pieces[die_after - 1]`."""
DIE_HEADERS = "die_headers"
"""It breaks after the headers, before any of the body."""
END_EARLY = "end_early"
"""A stream ends there too, but as any other ends: its connection says nothing of a death."""
END_HALF = "end_half"
"""The same, in the middle of the next event."""
SAY_FAILED = "say_failed"
"""It goes on with an error event of code 500 there, and the event that ends all streams."""
HANG = "hang"
"""No answer for a long time."""


class Seat:
    """A server that outlives a test: whoever sits there answers."""

    def __init__(self):
        self.taken_by = None

    async def __call__(self, scope, receive, send):
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        else:
            await self.taken_by(scope, receive, send)


class Standin:
    """Answers every generation with `pieces`, streamed or whole. Set the attributes between requests."""

    def __init__(self, *pieces, model="m", prompt_tokens=1000, cached_tokens=0):
        self.pieces = list(pieces) or ["Hello", " there", ", friend", "."]
        self.model = model
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.fault = None
        self.die_after = 2
        self.status = 200
        self.delay_s = 0.0
        self.params = None
        """`kv_transfer_params` of the answers."""
        self.has_usage = True
        self.asked = []
        """(path, headers, body bytes) of each generation."""
        self.running = 0
        self.dropped = 0
        """Requests whose client left."""

    @property
    def failed_events(self):
        error = {"message": f"by {self.model}", "type": "InternalServerError", "param": None, "code": 500}
        return f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n".encode()

    @property
    def bodies(self):
        return [json.loads(body) for _, _, body in self.asked]

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/v1/models":
            await _json(send, 200, {"object": "list", "data": [{"id": self.model, "object": "model"}]})
        else:
            await self._generate(scope, receive, send)

    async def _generate(self, scope, receive, send):
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.asked.append((scope["path"], headers, body))
        fault = self.fault
        self.running += 1
        work = asyncio.create_task(self._answer(scope, send, json.loads(body), fault))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            self.dropped += not work.done()
        finally:
            self.running -= 1
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, scope, send, body, fault):
        await asyncio.sleep(self.delay_s)
        if fault == HANG:
            await asyncio.sleep(60)
        if fault == DIE_FIRST:
            scope["workmem.abort"]()
        elif self.status != 200:
            await _json(send, self.status, {"error": {"message": f"by {self.model}", "code": "made_up"}})
        elif body.get("stream"):
            await self._stream(scope, send, body, fault)
        else:
            await self._whole(scope, send, body, fault)

    async def _whole(self, scope, send, body, fault):
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 99
        pieces = self.pieces[:limit]
        said = {"text": "".join(pieces)}
        if "messages" in body:
            said = {"message": {"role": "assistant", "content": "".join(pieces)}}
        answer = {"id": f"whole-{id(self)}", "choices": [{"index": 0, "finish_reason": "stop"} | said]}
        if self.has_usage:
            answer["usage"] = self._usage(len(pieces))
        if self.params is not None:
            answer["kv_transfer_params"] = self.params
        data = json.dumps(answer).encode()
        if fault in (DIE_HALF, DIE_HEADERS):
            await _start(send, 200, b"application/json", len(data))
            if fault == DIE_HALF:
                await send({"type": "http.response.body", "body": data[: len(data) // 2], "more_body": True})
                await asyncio.sleep(0.05)
            scope["workmem.abort"]()
            return
        await _start(send, 200, b"application/json", len(data))
        await send({"type": "http.response.body", "body": data})

    async def _stream(self, scope, send, body, fault):
        await _start(send, 200, b"text/event-stream")
        if fault == DIE_HEADERS:
            await asyncio.sleep(0.05)
            scope["workmem.abort"]()
            return
        events = self._events(body)
        for number, event in enumerate(events):
            if number == self.die_after and fault in (END_EARLY, END_HALF, SAY_FAILED):
                end = {END_EARLY: b"", END_HALF: event[: len(event) // 2], SAY_FAILED: self.failed_events}
                await send({"type": "http.response.body", "body": end[fault]})
                return
            is_last = fault == DIE_HALF and number == self.die_after
            await send(
                {
                    "type": "http.response.body",
                    "body": event[: len(event) // 2] if is_last else event,
                    "more_body": True,
                }
            )
            if is_last:
                # Or the transport would be cut with the bytes still in it.
                await asyncio.sleep(0.05)
                scope["workmem.abort"]()
                return
        await send({"type": "http.response.body", "body": b""})

    def _events(self, body):
        head = {"id": f"stream-{id(self)}", "created": 5, "model": self.model}
        is_chat = "messages" in body
        deltas = [{"delta": {"role": "assistant", "content": ""}}] if is_chat else []
        deltas += [{"delta": {"content": one}} if is_chat else {"text": one} for one in self.pieces]
        choices = [{"index": 0, "finish_reason": None} | one for one in deltas]
        choices.append({"index": 0, "finish_reason": "stop"} | ({"delta": {}} if is_chat else {"text": ""}))
        events = [head | {"choices": [choice]} for choice in choices]
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append(head | {"choices": [], "usage": self._usage(len(self.pieces))})
        return [f"data: {json.dumps(one)}\n\n".encode() for one in events] + [b"data: [DONE]\n\n"]

    def _usage(self, completion_tokens):
        details = {"cached_tokens": self.cached_tokens}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": details,
        }


async def _start(send, status, kind, length=None):
    headers = [(b"content-type", kind)]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _json(send, status, value):
    data = json.dumps(value).encode()
    await _start(send, status, b"application/json", len(data))
    await send({"type": "http.response.body", "body": data})


async def _gone(receive):
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive, send):
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
