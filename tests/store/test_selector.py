"""Which namespaces a purge fits, and what it refuses to guess."""

from __future__ import annotations

import msgspec
import pytest

from workmem.core.errors import ConfigError
from workmem.core.layout import Namespace
from workmem.store.selector import PurgeSelector, shown_digest
from workmem.testing.pages import SMALL

ACME = Namespace(model_fingerprint="m1", layout=SMALL, tenant_salt="acme", weights_epoch=3)
NOBODY = Namespace(model_fingerprint="m1", layout=SMALL)
OTHER = Namespace(model_fingerprint="m2", layout=SMALL, tenant_salt="other", weights_epoch=3)
ALL = [ACME, NOBODY, OTHER]


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"tenant": "acme"}, [ACME]),
        ({"tenant": shown_digest("acme")}, [ACME]),
        ({"tenant": ""}, [NOBODY]),
        ({"model": "m1"}, [ACME, NOBODY]),
        ({"model": shown_digest("m2")}, [OTHER]),
        ({"epoch": 3}, [ACME, OTHER]),
        ({"epoch": 3, "tenant": "other"}, [OTHER]),
        ({"epoch": 3, "tenant": ""}, []),
        ({"root": ACME.root().hex()[:12]}, [ACME]),
        ({"everything": True}, ALL),
    ],
)
def test_every_field_given_must_fit(fields, fits):
    chosen = PurgeSelector(**fields)
    assert [space for space in ALL if chosen(space)] == fits
    assert msgspec.json.decode(msgspec.json.encode(chosen), type=PurgeSelector) == chosen


@pytest.mark.parametrize(
    "fields",
    [{}, {"everything": True, "tenant": "acme"}, {"root": "3fa9"}, {"root": "3FA9C1D2"}, {"root": "x" * 9}],
)
def test_what_names_nothing_or_too_much_is_refused(fields):
    with pytest.raises(ConfigError):
        PurgeSelector(**fields)
