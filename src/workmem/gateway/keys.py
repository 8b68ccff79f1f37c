"""API keys: who may come in, and as which tenant."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path

from workmem.core.errors import ConfigError
from workmem.gateway.failures import Refusal


class ApiKeys:
    """The keys of a file with one `key` or `key:tenant` per line. Empty lines and `#` lines do not count."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        self._tenants = [(key.encode(), tenant) for key, tenant in tenants.items()]

    @classmethod
    def load(cls, path: str) -> ApiKeys:
        """Read `path`; no path, no keys. Raises ConfigError if it cannot be read or holds no key."""
        if not path:
            return cls({})
        try:
            lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"$.server.api_key_file: cannot read {path!r}: {error}") from error
        tenants: dict[str, str] = {}
        for line in lines:
            if line and not line.startswith("#"):
                key, _, tenant = line.partition(":")
                tenants[key.strip()] = tenant.strip()
        if not tenants or "" in tenants:
            raise ConfigError(
                f"$.server.api_key_file: {path!r} must hold one `key` or `key:tenant` per line."
            )
        return cls(tenants)

    @property
    def is_required(self) -> bool:
        """Whether a request without a key is refused."""
        return bool(self._tenants)

    def tenant(self, headers: Mapping[str, str]) -> str:
        """Tenant of the caller. Raises Refusal (401) on a missing or wrong key."""
        if not self._tenants:
            return headers.get("x-workmem-tenant", "").strip()[:128]
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()
        found: str | None = None
        # Every key is compared, and in constant time, so that timing tells nothing about any of them.
        for key, tenant in self._tenants:
            if hmac.compare_digest(key, given.encode("utf-8", "surrogateescape")):
                found = tenant
        if found is None:
            what = (
                "Incorrect API key provided."
                if given
                else "No API key provided: send `Authorization: Bearer KEY`."
            )
            raise Refusal(401, what, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
        return found
