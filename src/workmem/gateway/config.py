"""Settings of the gateway and of upstream mode. Times in seconds, sizes as text with a unit."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0)]
Positive = Annotated[int, Meta(ge=1)]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[server]` of the configuration."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 or :: for every network, which wants `api_key_file`."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0 takes a free port."""
    api_key_file: str = ""
    """File with one `key` or `key:tenant` per line; empty asks for no key."""
    body_bytes_max: str | int = "8MiB"
    """Larger request bodies are refused with 413."""
    request_timeout_s: Seconds = 600.0
    """Longest life of a request; a stream past it ends with an error event."""
    read_timeout_s: Seconds = 20.0
    """Longest wait for a client's headers, and then for its body."""
    send_timeout_s: Seconds = 30.0
    """A client that takes no byte for this long is dropped."""
    keepalive_s: Seconds = 15.0
    """A stream silent for this long carries a comment, so that proxies keep it open."""
    idle_connection_s: Positive = 30
    """An unused connection is closed after this long."""
    connections_max: Positive = 1024
    """More connections are answered with 503."""
    shutdown_s: Positive = 10
    """Running requests get this long to finish when the server stops."""
    explain_prompts_max: Positive = 1024
    """Recent requests that can be explained."""


class UpstreamConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[upstream]`: OpenAI-compatible servers to stand in front of. With none, the embedded engine serves."""

    urls: tuple[Annotated[str, Meta(pattern=r"^https?://[^\s/?#]+[^\s?#]*$")], ...] = ()
    """Base URLs, without `/v1`."""
    api_key_file: str = ""
    """File whose first line is the key to send; empty forwards the client's own where we ask for none."""
    connect_timeout_s: Seconds = 5.0
    """Longest wait for a connection; the next server is tried then."""
    read_timeout_s: Seconds = 600.0
    """Longest silence of a server."""
    retry_after_s: Seconds = 5.0
    """A server that refused a connection is tried last for this long."""
    models_ttl_s: Seconds = 30.0
    """How long a server's list of models is believed."""
