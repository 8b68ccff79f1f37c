"""The server that is probed: bounded requests over HTTP, counted."""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import msgspec

from workmem.core.errors import ConfigError, TransferError

_ANSWER_BYTES_MAX = 8 * 1024 * 1024
_HITS = re.compile(
    r"^(?:vllm:prefix_cache_hits|sglang:cached_tokens)(?:_total)?(?:\{[^}]*\})? +(\S+)", re.MULTILINE
)


class Refused(Exception):
    """The server answered with an error. `status` is 0 where it was no JSON object."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"it answered {status}: {said}" if status else f"it answered no JSON object: {said}")
        self.status = status
        self.said = said


class Server:
    """See the module. Raises TransferError where nobody answers."""

    def __init__(self, url: str, *, key: str = "", timeout_s: float = 120.0) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"URL: {url!r} is no address such as http://127.0.0.1:8000")
        if parts.username or parts.password:
            raise ConfigError("URL: holds a user or a password, which would be shown; --key-file names a key")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout_s = timeout_s
        self.headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
        if key:
            self.headers |= {"authorization": f"Bearer {key}", "x-api-key": key}

    def get(self, path: str) -> dict[str, Any] | None:
        """The JSON object at `path`; None where there is none."""
        status, data, _ = self._send(path, None)
        return _object(data) if status == 200 else None

    def page(self, path: str) -> str:
        """The text at `path`; empty where there is none."""
        status, data, _ = self._send(path, None)
        return data.decode("utf-8", "replace") if status == 200 else ""

    def status_of(self, path: str) -> int:
        """What it answers to an empty object, which costs nothing."""
        return self._send(path, b"{}")[0]

    def post(self, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """The answer, and how long it took in seconds. Raises Refused."""
        status, data, seconds = self._send(path, msgspec.json.encode(body))
        if status != 200:
            raise Refused(status, _said(data))
        answer = _object(data)
        if answer is None:
            raise Refused(0, _said(data))
        return answer, seconds

    def hits_counted(self) -> float | None:
        """Prompt tokens found in its cache so far, by its metrics; None where it counts none."""
        found = [float(value) for value in _HITS.findall(self.page("/metrics"))]
        return sum(found) if found else None

    def _send(self, path: str, data: bytes | None) -> tuple[int, bytes, float]:
        request = urllib.request.Request(self.url + path, data, self.headers)  # noqa: S310  scheme is checked above
        start = time.monotonic()
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:  # noqa: S310
                body = answer.read(_ANSWER_BYTES_MAX)
                return answer.status, body, time.monotonic() - start
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read(_ANSWER_BYTES_MAX), time.monotonic() - start
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise TransferError(
                f"no answer from {self.url}{path} within {self.timeout_s:g} s ({reason}); is the server running there?"
            ) from error


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _said(data: bytes) -> str:
    body = _object(data) or {}
    error = body.get("error")
    text = error.get("message") if isinstance(error, dict) else error or body.get("message")
    return " ".join((text if isinstance(text, str) else data[:300].decode("utf-8", "replace")).split())[:300]
