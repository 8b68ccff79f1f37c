"""`workmem explain`: where a request's prompt came from, asked of a running server."""

from __future__ import annotations

import http.client
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from workmem.cli.causes import show_causes, show_worst
from workmem.core.errors import ClientError, ConfigError, TransferError
from workmem.core.outcomes import COMPUTED
from workmem.gateway.key_file import key_to_send

TIMEOUT_S = 10.0
_WORST_MAX = 1000
_COLOURS = {"vram": "green", "dram": "green", "ssd": "cyan", "remote": "cyan", COMPUTED: "yellow"}


def explain(
    request_id: str = "",
    /,
    *,
    last: Annotated[bool, Parameter(negative=())] = False,
    worst: int | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative=())] = False,
    url: str = "http://127.0.0.1:8000",
    key_file: Path | None = None,
) -> None:
    """Show what broke a request's prefix, what that cost, and where each span of its prompt was found.

    Parameters
    ----------
    request_id
        The id in the answer's body (`chatcmpl-...`), or the one in its `x-request-id` header.
    last
        Explain the latest request instead of a named one.
    worst
        Show so many of the recent requests that lost most tokens to a cause with a name, and sum up the causes.
    as_json
        Print what the server answers, as JSON.
    url
        The server to ask.
    key_file
        File whose first line is the API key, where the server asks for one.
    """
    if bool(request_id) + last + (worst is not None) != 1:
        raise ConfigError("name a request by its id, or ask for --last, or for --worst N")
    if worst is not None and not 1 <= worst <= _WORST_MAX:
        raise ConfigError(f"--worst: must be from 1 to {_WORST_MAX}, got {worst}")
    server = _Server(url.rstrip("/").removesuffix("/v1"), key_file)
    try:
        if worst is not None:
            _worst(server, worst, as_json=as_json)
        else:
            _explain(server, request_id, last=last, as_json=as_json)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise TransferError(f"{url} answers, but not as workmem does; check --url") from error


def _explain(server: _Server, request_id: str, *, last: bool, as_json: bool) -> None:
    if last:
        latest = server.get("/debug/requests?n=1")["data"]
        if not latest:
            raise ClientError("the server has served no request yet")
        request_id = latest[0]["id"]
    found = server.get(f"/debug/requests/{urllib.parse.quote(request_id, safe='')}")
    if as_json:
        _print_json(found)
        return
    console = _console()
    for explanation in found.get("data", [found]):
        _show(console, explanation)


def _worst(server: _Server, n: int, *, as_json: bool) -> None:
    found = server.get(f"/debug/requests?worst={n}")
    if as_json:
        _print_json(found)
    elif not found["data"]:
        sys.stdout.write("no recent request lost tokens to a cause with a name\n")
    else:
        show_worst(_console(), found)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120, highlight=False)


def _print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


class _Server:
    def __init__(self, base: str, key_file: Path | None) -> None:
        _check_url(base)
        self._base = base
        self._headers: dict[str, str] = {}
        if key_file is not None:
            self._headers["Authorization"] = f"Bearer {key_to_send(key_file, '--key-file')}"

    def get(self, path: str) -> dict[str, Any]:
        request = urllib.request.Request(self._base + path, headers=self._headers)  # noqa: S310  scheme is checked above
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
                return msgspec.json.decode(response.read(), type=dict[str, Any])
        except urllib.error.HTTPError as error:
            raise ClientError(f"{self._base} answered {error.code}: {_message(error.read())}") from error
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            raise TransferError(
                f"no answer from {self._base} ({reason}); is `workmem serve` running there? --url names another address"
            ) from error
        except (msgspec.DecodeError, http.client.HTTPException) as error:
            raise TransferError(f"{self._base} answers, but not as workmem does; check --url") from error


def _check_url(url: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not url.isascii() or " " in url or not url.isprintable():
        raise ConfigError(f"--url: must be like http://127.0.0.1:8000, got {url!r}")


def _message(body: bytes) -> str:
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def _show(console: Console, explanation: dict[str, Any]) -> None:
    prompt, cached = explanation["prompt_tokens"], explanation["cached_tokens"]
    if not explanation["finished"]:
        state = "how many were reused is said when it has ended (it runs, or was given up)"
    else:
        state = f"{cached} reused ({f'{cached / prompt:.0%}' if prompt else '-'})"
    if explanation.get("approximate"):
        state += ", some of it kept rounded (approximate)"
    if handoff := explanation.get("handoff"):
        state += f", {handoff['tokens']} of them loaded after {handoff['waited_s']:.2f} s of waiting for another server"
    console.print(f"[bold]{escape(explanation['request_id'])}[/]: {prompt} prompt tokens, {state}")
    show_causes(console, explanation)
    table = Table("span", "tokens", "from", "count", "why", box=None, pad_edge=False)
    for column in (1, 3):
        table.columns[column].justify = "right"
    for span in explanation["spans"]:
        label, place = escape(span["path"]), f"{span['start']}-{span['end']}"
        for part in span["parts"]:
            source = part["source"]
            colour = _COLOURS.get(source, "default")
            why = part.get("reason") or ""
            table.add_row(label, place, f"[{colour}]{escape(source)}[/]", str(part["tokens"]), why)
            label = place = ""
    console.print(table)
    if served := explanation.get("served"):
        console.print(escape(served), soft_wrap=True)
    difference = explanation.get("difference")
    if difference:
        console.print(
            f"first difference from {escape(explanation['compared_with'])} at token {difference['token']}: "
            f"{escape(difference['reason'])}",
            soft_wrap=True,
        )
