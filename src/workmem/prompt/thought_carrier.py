"""Thinking on its way through a client that sends back only what it takes for encrypted.

A client without a server-side store asks for `reasoning.encrypted_content` and sends that alone back. Ours is the
thinking itself, base64: it is the client's own, and in plain text beside it. Anybody else's cannot be read here.
"""

from __future__ import annotations

import base64

_MARK = "workmem-plain:"


def carry(text: str) -> str:
    """`text` as `encrypted_content`."""
    return _MARK + base64.b64encode(text.encode("utf-8", "replace")).decode()


def carried(encrypted: str) -> str | None:
    """The text in `encrypted`; None where it is not of this server's making."""
    if not encrypted.startswith(_MARK):
        return None
    try:
        return base64.b64decode(encrypted.removeprefix(_MARK), validate=True).decode()
    except ValueError:
        return None
