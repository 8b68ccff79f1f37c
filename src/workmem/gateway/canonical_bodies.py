"""What a client said, on its way to another server: its own bytes, apart from the fields that a rule changed."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from workmem.core.errors import ClientError
from workmem.gateway.exchange import Exchange
from workmem.gateway.metrics import Metrics
from workmem.prompt.canonical.canonicalise import canonicalise
from workmem.prompt.canonical.choice import RuleChoice
from workmem.prompt.canonical.rule import Canonical
from workmem.prompt.decode import decode_json
from workmem.prompt.dialects.known import dialect_of_path


class Said(NamedTuple):
    """A body in its canonical form."""

    fields: dict[str, Any]
    """Empty where the body is no object: whether it must be is the other server's affair."""
    body: bytes

    def object(self) -> dict[str, Any]:
        """The fields. Raises ClientError where the body is no object."""
        return self.fields or decode_json(self.body)


def canonical_body(exchange: Exchange, rules: RuleChoice, metrics: Metrics) -> Said:
    """What is said in `exchange`, after the rules of its tenant."""
    try:
        fields = decode_json(exchange.body)
    except ClientError:
        return Said({}, exchange.body)
    dialect = dialect_of_path(exchange.request.url.path)
    if dialect is None:
        return Said(fields, exchange.body)
    canonical = canonicalise(fields, dialect, rules.of(exchange.tenant, fields))
    metrics.canonical.count(canonical)
    return Said(canonical.body, canonical_bytes(exchange.body, canonical))


def canonical_bytes(body: bytes, canonical: Canonical) -> bytes:
    """`body` with the fields that were changed; as it came where none was."""
    fields = canonical.fields
    if not fields:
        return body
    raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    out: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in fields:
            out[name] = value
        elif name in canonical.body:
            out[name] = canonical.body[name]
    return msgspec.json.encode(out)
