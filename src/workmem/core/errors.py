"""The one tree of exceptions. An exception exists only where a caller can act differently.

    WorkmemError
    ├── ConfigError          start-up only: the process does not start
    ├── ClientError          the request is wrong; repeating it cannot help
    │   ├── ContextTooLong   prompt plus growth exceeds what the model or the tiers can hold
    │   └── UnknownModel     no such model here
    ├── CapacityError        no room now; retry later or skip
    │   └── QueueFull        the waiting queue is at its bound
    ├── TransferError        bytes did not arrive: device, disk or peer
    ├── IntegrityError       bytes arrived and are not what was written
    ├── LeaseError           the hold on a page is gone (expired, revoked, released twice)
    ├── EngineError          the engine failed a request, or an adapter broke its contract
    └── InvariantError       our bug: the cache of this process is switched off

Expected outcomes (hit, miss, pending) are values, see `core.outcomes`. The HTTP status is chosen by
the gateway from the type and never stored here.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Scope = Literal["block", "tier", "request", "process"]


class WorkmemError(Exception):
    """Root. `code` is stable and grouped: 1xxx core, 4xxx store, 6xxx engines, 8xxx gateway."""

    code: ClassVar[int] = 1000
    retryable: ClassVar[bool] = False
    scope: ClassVar[Scope] = "process"


class ConfigError(WorkmemError):
    """A setting is unknown or out of range. The message starts with its path (`$.engine.dtype`)."""

    code = 1001


class ClientError(WorkmemError):
    """The request cannot be served as sent. `param` names the offending field where there is one."""

    code = 8001
    scope = "request"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(ClientError):
    """Prompt plus `max_tokens` exceeds a limit; the message names both sizes."""

    code = 8002


class UnknownModel(ClientError):
    """The named model is not served here; the message lists those that are."""

    code = 8003


class CapacityError(WorkmemError):
    """No room at this moment."""

    code = 4001
    retryable = True
    scope = "request"


class QueueFull(CapacityError):
    """The waiting queue is at its bound. `retry_after_s` estimates when room returns."""

    code = 6002

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TransferError(WorkmemError):
    """A device, disk or peer did not deliver the bytes."""

    code = 4002
    retryable = True
    scope = "block"


class IntegrityError(WorkmemError):
    """A page's key, layout or checksum does not match what was asked for (rule R6)."""

    code = 4003
    scope = "block"


class LeaseError(WorkmemError):
    """A lease is used after it expired or was given back (rule R3)."""

    code = 4004
    scope = "block"


class EngineError(WorkmemError):
    """The engine could not finish this request; others go on."""

    code = 6001
    scope = "request"


class InvariantError(WorkmemError):
    """Our own bug. The cache of this process is switched off and the engine goes on uncached."""

    code = 1002
