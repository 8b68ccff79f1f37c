"""Settings of the gateway and of upstream mode. Times in seconds, sizes as text with a unit."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from workmem.core.errors import ConfigError

Seconds = Annotated[float, Meta(gt=0)]
Positive = Annotated[int, Meta(ge=1)]
Amount = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=0)]


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
    responses_max: Count = 4096
    """Answers of `/v1/responses` kept for `previous_response_id`; the least recently used leaves first, 0 keeps none."""
    responses_bytes_max: str | int = "64MiB"
    """What those may take, with the input each had."""
    explain_bytes_max: str | int = "64MiB"
    """Memory for their bodies, compressed, from which the cause of a miss is told; 0 keeps none and tells none."""
    explain_header: bool = False
    """Whether a caller who may look at `/debug` gets the cause in the header `x-workmem-explain` when it asks by one."""


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
    roles: tuple[Literal["both", "prefill", "decode", "elastic"], ...] = ()
    """What each of `urls` does, in their order; empty: all do both. `elastic` begins as both, and `elastic` below may change it."""
    split: Literal["auto", "always", "never"] = "auto"
    """Whether a prefill server computes a prompt that another one answers; auto: where measured costs say that it is faster."""
    split_min_tokens: Count = 512
    """Prompts expected to be shorter, or with auto to have less to be computed, are not split."""
    prefill_timeout_s: Seconds = 60.0
    """Longest wait for a prefill server; the request is served by one server then."""
    handoff_wait_s: Seconds = 2.0
    """How long a decode server is asked to wait for what a prefill server computed; it has a bound of its own."""
    tries_max: Positive = 3
    """Servers that may have one generation when those before them died in it."""
    drain_s: Seconds = 30.0
    """A server that changes its role gets this long to finish what runs, unless the change names another time."""
    elastic: bool = False
    """Change the role of servers whose entry in `roles` is `elastic` by what follows."""
    elastic_every_s: Seconds = 5.0
    """How often the fleet is looked at."""
    elastic_patience: Positive = 3
    """So many looks in a row must say the same before a role is changed."""
    elastic_dwell_s: Seconds = 60.0
    """No role is changed for this long after a change."""
    slo_ttft_s: Seconds = 2.0
    """Time to first token, 90 of 100 requests, at which prefill is at its limit."""
    slo_itl_s: Seconds = 0.1
    """Time between tokens, 90 of 100 requests, at which decode is at its limit."""
    slo_queue: Amount = 4.0
    """Requests under way per prefill server at which prefill is at its limit."""
    slo_streams: Amount = 32.0
    """Requests under way per decoding server at which decode is at its limit."""

    def __post_init__(self) -> None:
        for number, url in enumerate(self.urls):
            # They are shown in `/health`, in logs and in explanations.
            if "@" in url.partition("://")[2].partition("/")[0]:
                raise ConfigError(
                    f"$.upstream.urls[{number}]: a URL with a user or a password in it: leave out what stands "
                    "before the @, and put the key to send into the file of $.upstream.api_key_file"
                )
        if self.roles and len(self.roles) != len(self.urls):
            raise ConfigError(
                f"$.upstream.roles: {len(self.roles)} for {len(self.urls)} urls: give one for each, in their order"
            )
        if self.roles and set(self.roles) == {"prefill"}:
            raise ConfigError(
                "$.upstream.roles: all are prefill, so none would answer: make one decode or both"
            )
        if self.elastic and self.split == "never":
            raise ConfigError(
                "$.upstream.elastic: $.upstream.split is never, so a prefill server would get nothing"
            )
        if self.elastic and "elastic" not in self.roles:
            raise ConfigError(
                "$.upstream.elastic: none of $.upstream.roles is elastic, so nothing could change"
            )
