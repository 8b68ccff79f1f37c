"""The answer to one request of the Responses API: the response object, whole or as the events that build it."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from workmem.gateway.anthropic_shapes import named_event
from workmem.gateway.asking import Asked
from workmem.gateway.failures import describe
from workmem.gateway.replies import transfer_body, usage_body
from workmem.gateway.response_output import ResponseOutput
from workmem.gateway.sse import KEEPALIVE
from workmem.prompt.responses import ResponsesRequest
from workmem.prompt.responses_chat import ENCRYPTED_THINKING, LOGPROBS, Translation

_ECHOED = ("prompt_cache_key", "safety_identifier", "user", "max_tool_calls")
_CODES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
"""By the type of an error; `server_error` is every other one's."""

OnEnd = Callable[[dict[str, Any]], None]


class ResponseReply:
    """Answers `request`. `on_end` gets the response once it is whole, completed or cut."""

    def __init__(
        self,
        asked: Asked,
        request: ResponsesRequest,
        body: dict[str, Any],
        translation: Translation,
        on_end: OnEnd,
    ) -> None:
        self._asked = asked
        self._request = request
        self._translation = translation
        self._on_end = on_end
        self._echoed = {name: body[name] for name in _ECHOED if body.get(name) is not None}
        include = request.include or ()
        self._output = ResponseOutput(
            asked.turns[0],
            translation.tools,
            with_logprobs=LOGPROBS in include,
            is_carried=ENCRYPTED_THINKING in include,
        )
        self._events = 0

    async def whole(self) -> dict[str, Any]:
        """The response, once the model has ended."""
        async with aclosing(self._asked.generation.deltas()) as deltas:
            async for item in deltas:
                if item is not None:
                    for _ in self._output.take(item[1]):
                        pass
        return self._ended()

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of a streamed response."""
        started = self._response("in_progress")
        yield self._numbered({"type": "response.created", "response": started})
        yield self._numbered({"type": "response.in_progress", "response": started})
        async with aclosing(self._asked.generation.deltas()) as deltas:
            async for item in deltas:
                if item is None:
                    yield KEEPALIVE
                    continue
                data = b"".join(map(self._numbered, self._output.take(item[1])))
                if data:
                    yield data
        body = self._ended()
        yield self._numbered({"type": f"response.{body['status']}", "response": body})

    def failed(self, error: Exception) -> bytes:
        """The last event of a stream that cannot go on."""
        told = describe(error)[1]["error"]
        body = self._response("failed")
        body["error"] = {"code": _CODES.get(told["type"], "server_error"), "message": told["message"]}
        return self._numbered({"type": "response.failed", "response": body})

    def _ended(self) -> dict[str, Any]:
        body = self._response("incomplete" if self._output.is_cut else "completed")
        if self._output.is_cut:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            body["completed_at"] = int(time.time())
        usages, known = self._asked.generation.usages, self._asked.order.prompts[0].known
        body |= {
            "usage": _usage(
                usage_body(usages, 1, self._asked.canonical, known), self._output.reasoning_tokens
            ),
            **transfer_body(usages, 1),
        }
        self._on_end(body)
        return body

    def _numbered(self, told: dict[str, Any]) -> bytes:
        number, self._events = self._events, self._events + 1
        return named_event({**told, "sequence_number": number})

    def _response(self, status: str) -> dict[str, Any]:
        request, order, sampling = self._request, self._asked.order, self._asked.order.sampling
        reasoning, left_out = request.reasoning, self._translation.left_out
        return {
            "id": order.id,
            "object": "response",
            "created_at": order.created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "model": self._asked.service.engine.info.name,
            "output": list(self._output.items),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {
                "effort": None if reasoning is None else reasoning.effort,
                "summary": None if reasoning is None else reasoning.summary,
            },
            "service_tier": "default",
            "store": request.store is not False,
            "temperature": sampling.temperature,
            "text": {"format": _format(request)},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": self._translation.tools.shown,
            "top_logprobs": request.top_logprobs or 0,
            "top_p": sampling.top_p,
            # Nothing is ever dropped from a context unasked: one that is too long is refused.
            "truncation": "disabled",
            "usage": None,
            **self._echoed,
            **({"workmem": {"left_out": left_out}} if left_out else {}),
        }


def _format(request: ResponsesRequest) -> Any:
    wanted = None if request.text is None else request.text.format
    return {"type": "text"} if wanted is None else wanted


def _usage(chat: dict[str, Any], reasoning_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": chat["prompt_tokens_details"],
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": chat["total_tokens"],
        "workmem": chat["workmem"],
    }
