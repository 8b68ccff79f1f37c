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


class WorkmemError(Exception):
    """Root of all errors this package raises on purpose."""


class ConfigError(WorkmemError):
    """A setting is unknown or out of range. The message starts with its path (`$.engine.dtype`)."""


class ClientError(WorkmemError):
    """The request cannot be served as sent. `param` names the offending field where there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(ClientError):
    """Prompt plus `max_tokens` exceeds a limit; the message names both sizes."""


class UnknownModel(ClientError):
    """The named model is not served here; the message lists those that are."""


class CapacityError(WorkmemError):
    """No room at this moment."""


class QueueFull(CapacityError):
    """The waiting queue is at its bound. `retry_after_s` estimates when room returns."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TransferError(WorkmemError):
    """A device, disk or peer did not deliver the bytes."""


class IntegrityError(WorkmemError):
    """A page's key, layout or checksum does not match what was asked for (rule R6)."""


class LeaseError(WorkmemError):
    """A lease is used after it expired or was given back (rule R3)."""


class EngineError(WorkmemError):
    """The engine could not finish this request; others go on."""


class InvariantError(WorkmemError):
    """Our own bug. The cache of this process is switched off and the engine goes on uncached."""
