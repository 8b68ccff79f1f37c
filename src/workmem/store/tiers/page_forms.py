"""How the pages of a tier are kept: as they lie in their frames, encoded, sealed, or both.

One object per tier, used by its writer (`encode`), its readers (`open`) and whoever looks for rot (`check`).
"""

from __future__ import annotations

import msgspec

from workmem.core.errors import IntegrityError
from workmem.core.layout import KVLayout
from workmem.store.arena import align
from workmem.store.codecs.choose import codec_by_id, is_kept_by
from workmem.store.codecs.contract import Codec, restore
from workmem.store.codecs.raw import RAW_ID, Raw
from workmem.store.codecs.sealing import Keyring, PagePlace
from workmem.store.tiers import page_header, sealed_header
from workmem.store.tiers.page_check import Expected, check_header, check_slices
from workmem.store.tiers.page_header import PageHeader, header_bytes
from workmem.store.tiers.sealed_header import SealedHeader, sealed_header_bytes

_RAW = Raw()


class StoredForm(msgspec.Struct, frozen=True):
    """A page made ready for the disk: its length there, a multiple of 4096, and its header's checksum."""

    length: int
    header_sum: int


class PageForms:
    """`codec` is for the pages that are written; those that are there name their own. May be used by any thread."""

    def __init__(self, codec: Codec = _RAW, keyring: Keyring | None = None) -> None:
        self._codec = codec
        self._keyring = keyring

    @property
    def name(self) -> str:
        """Name of the codec for new pages."""
        return self._codec.name

    @property
    def is_approximate(self) -> bool:
        """Whether new pages come back rounded."""
        return not self._codec.exact

    @property
    def seals(self) -> bool:
        """Whether pages are encrypted."""
        return self._keyring is not None

    @property
    def is_plain(self) -> bool:
        """New pages are written as they lie in their frames."""
        return self._codec.id == RAW_ID and self._keyring is None

    def lands_in_frame(self, length: int, frame_bytes: int) -> bool:
        """Whether a page of `length` bytes on disk is to be read straight into its frame, where `open` finds it."""
        return self._keyring is None and length == frame_bytes

    def room_bytes(self, layout: KVLayout) -> int:
        """Most bytes that `encode` takes for a page."""
        head = header_bytes(layout) if self._keyring is None else sealed_header_bytes(layout)
        return head + align(layout.page_bytes)

    def encode(self, frame: memoryview, layout: KVLayout, into: memoryview) -> StoredForm | None:
        """Make the page in `frame` ready in `into`, `room_bytes` long. None: it is to be written as it lies there."""
        head = header_bytes(layout)
        with frame[head : head + layout.page_bytes] as payload:
            return self._encode(frame, payload, layout, into)

    def _encode(
        self, frame: memoryview, payload: memoryview, layout: KVLayout, into: memoryview
    ) -> StoredForm | None:
        head = header_bytes(layout)
        key, parent, depth = page_header.identity_of(frame)
        codec, body = self._encoded(payload, key, layout)
        facts = page_header.facts_of(frame, layout, codec=codec.id, stored_bytes=len(body))
        if self._keyring is not None:
            place = PagePlace(
                root=page_header.root_of(frame),
                key=key,
                parent=parent,
                depth=depth,
                payload_bytes=layout.page_bytes,
                stored_bytes=len(body),
                codec=codec.id,
            )
            head = sealed_header_bytes(layout)
            seal = self._keyring.current.seal(place, facts, body, into[head : head + len(body)])
            header_sum = sealed_header.pack(SealedHeader(seal, len(body), codec.id), layout, into)
        elif codec.id == RAW_ID or head + align(len(body)) >= len(frame):
            # On disk it would take as much: then it is not to be decoded either.
            return None
        else:
            into[head : head + len(body)] = body
            header_sum = page_header.pack_facts(facts, layout, into)
        end, length = head + len(body), head + align(len(body))
        into[end:length] = bytes(length - end)
        return StoredForm(length, header_sum)

    def open(self, expected: Expected, stored: memoryview, frame: memoryview) -> None:
        """Check a page that was read (R6) and put it into its `frame`, header and all but the generation.

        `stored` may be the frame itself. Raises IntegrityError where it is not what was written, UnreadableError where
        that cannot be told; the frame's content is then undefined.
        """
        layout, head = expected.layout, header_bytes(expected.layout)
        payload = frame[head : head + layout.page_bytes]
        header, body = self._header_and_body(expected, stored, payload)
        sums = header.checksums
        if header.codec == RAW_ID:
            _RAW.check(body, key=expected.key, layout=layout)
            if body is not payload and stored is not frame:
                payload[:] = body
            check_slices(header, layout, payload)
        else:
            codec = self._codec_of(header, layout)
            if stored is frame:
                body = memoryview(bytes(body))
            sums = restore(codec, body, payload, key=expected.key, layout=layout, checksums=sums)
        if stored is not frame or header.codec != RAW_ID:
            page_header.pack(_plain(header, sums), layout, frame)
            frame[head + layout.page_bytes :] = bytes(len(frame) - head - layout.page_bytes)

    def check(self, expected: Expected, stored: memoryview) -> None:
        """Check a page as it lies on disk, undecoded. Raises as `open` does."""
        header, body = self._header_and_body(expected, stored)
        if header.codec == RAW_ID:
            _RAW.check(body, key=expected.key, layout=expected.layout)
            check_slices(header, expected.layout, body)
        else:
            self._codec_of(header, expected.layout).check(body, key=expected.key, layout=expected.layout)

    def _encoded(self, payload: memoryview, key: bytes, layout: KVLayout) -> tuple[Codec, memoryview]:
        codec = self._codec
        if codec.exact or is_kept_by(layout, codec):
            made = codec.encode(payload, key=key, layout=layout)
            if made is not None:
                return codec, memoryview(made)
        return _RAW, payload

    def _codec_of(self, header: PageHeader, layout: KVLayout) -> Codec:
        codec = codec_by_id(header.codec)
        if not codec.exact and not is_kept_by(layout, codec):
            # Whoever asks under this root was promised the very bytes that were saved.
            raise IntegrityError(f"a page rounded by {codec.name!r} lies under an exact identity")
        return codec

    def _header_and_body(
        self, expected: Expected, stored: memoryview, payload: memoryview | None = None
    ) -> tuple[PageHeader, memoryview]:
        """Both in the clear. A sealed page that is not encoded is opened straight into `payload`."""
        if self._keyring is not None:
            return self._unsealed(self._keyring, expected, stored, payload)
        header = check_header(expected, stored)
        return header, _body(stored, header_bytes(expected.layout), header.stored_bytes)

    def _unsealed(
        self, keyring: Keyring, expected: Expected, stored: memoryview, payload: memoryview | None
    ) -> tuple[PageHeader, memoryview]:
        layout = expected.layout
        sealed, found_sum = sealed_header.unpack(stored, layout)
        if found_sum != expected.header_sum:
            raise IntegrityError("the header is not the one that was journaled")
        place = PagePlace(
            root=expected.root,
            key=expected.key,
            parent=expected.parent,
            depth=expected.depth,
            payload_bytes=layout.page_bytes,
            stored_bytes=sealed.stored_bytes,
            codec=sealed.codec,
        )
        hidden = _body(stored, sealed_header_bytes(layout), sealed.stored_bytes)
        cipher = keyring.cipher(sealed.seal.key_id)
        clear = memoryview(bytearray(header_bytes(layout)))
        page_header.pack_facts(cipher.open_secret(place, sealed.seal), layout, clear)
        header, _ = page_header.unpack(clear, layout)
        expected.check_identity(header)
        if payload is not None and header.codec == RAW_ID and len(hidden) == len(payload):
            body = payload
        else:
            body = memoryview(bytearray(len(hidden)))
        cipher.open_payload(place, sealed.seal, hidden, body)
        return header, body


def _body(stored: memoryview, head: int, stored_bytes: int) -> memoryview:
    if head + align(stored_bytes) != len(stored):
        raise IntegrityError(f"the header counts {stored_bytes} bytes, {len(stored) - head} lie behind it")
    return stored[head : head + stored_bytes]


def _plain(header: PageHeader, checksums: tuple[int, ...]) -> PageHeader:
    return msgspec.structs.replace(header, checksums=checksums, codec=RAW_ID, stored_bytes=0)
