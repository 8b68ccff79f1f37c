"""From the journal's records to the catalog: what the ssd tier holds after a start.

A start costs time by the journal, not by the data, and a journal holds a million records: puts are taken
side by side, without an object for each. Rules of replay in docs/internals/journal-format.md.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from workmem.core.keys import BlockKey
from workmem.core.layout import Namespace
from workmem.core.outcomes import MissReason
from workmem.store.arena import ALIGNMENT_BYTES
from workmem.store.catalog import NO_SEGMENT, UNKNOWN_PARENT, Catalog, Space
from workmem.store.tiers.entries import NOBODY
from workmem.store.tiers.journal_records import DeleteEntry, DropEntry, NamespaceEntry
from workmem.store.tiers.segments import SEGMENT_HEADER_BYTES, Extent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from workmem.store.ssd_index import FoundPage
    from workmem.store.tiers.journal_records import Record
    from workmem.store.tiers.segments import Segment


class Replay:
    """One pass over the records. `segment_bytes` has the size of every usable segment by its number."""

    def __init__(
        self,
        catalog: Catalog,
        segment_bytes: dict[int, int],
        open_space: Callable[[Namespace, int], Space],
        close_space: Callable[[Space], None],
    ) -> None:
        self._catalog = catalog
        self._open_space = open_space
        self._close_space = close_space
        self._spaces: dict[int, Space | None] = {}
        self._ends = np.zeros(max(segment_bytes, default=0) + 1, dtype=np.uint64)
        """First 4096 bytes behind each segment's end; 0 where there is none."""
        for number, size in segment_bytes.items():
            self._ends[number] = size // ALIGNMENT_BYTES
        self._has_repeats = False
        self._parents: dict[Space, array[int]] = {}
        self.dropped = 0
        """Puts that fit no segment or belong to no namespace."""
        self._purged: set[int] = set()
        self.erasures: set[int] = set()
        """Segments that hold pages of a purged namespace, if they are there: they were to be erased."""
        self.last_segment = 0
        """Highest number that a put names, of a segment that is there or was."""
        self.last_number = 0
        """Highest number of a namespace, whatever is said of it."""

    @property
    def spaces(self) -> list[Space]:
        """Namespaces that are alive at the end."""
        return [space for space in self._spaces.values() if space is not None]

    @property
    def is_clean(self) -> bool:
        """Nothing was said in vain: no page is lost, no namespace was purged or has no page."""
        spaces = self._spaces.values()
        return not (self.dropped or self._purged - {NOBODY}) and all(space and space.rows for space in spaces)

    def take(self, records: Sequence[Record]) -> None:
        """Read them all, in order: the last word on a key holds."""
        for record in records:
            if isinstance(record, np.ndarray):
                self._put(record)
            elif isinstance(record, DeleteEntry):
                self._delete(record)
            elif isinstance(record, NamespaceEntry):
                self.last_number = max(self.last_number, record.number)
                self._spaces[record.number] = self._space_of(record)
            elif isinstance(record, DropEntry):
                self._drop(record.number)
        if self._has_repeats:
            for row in self._catalog.strays():
                self._give_up(row)

    def rows(self, space: Space) -> Sequence[int]:
        """Rows of a namespace, the one last spoken of last. Rows are given out in that order."""
        if not space.rows:
            return ()
        first, last = min(space.rows.values()), max(space.rows.values())
        if last - first + 1 == len(space.rows):
            return range(first, last + 1)
        return sorted(space.rows.values())

    def segment_of(self, row: int) -> int:
        """Number of the segment that the page of a row lies in."""
        return self._catalog.segment[row]

    def page(self, row: int, segments: Mapping[int, Segment]) -> FoundPage:
        """What was found of a row, for whoever has a catalog of their own."""
        catalog = self._catalog
        extent = Extent(
            segments[catalog.segment[row]],
            catalog.offset[row] * ALIGNMENT_BYTES,
            catalog.length[row] * ALIGNMENT_BYTES,
            catalog.header_sum[row],
        )
        return catalog.key[row], catalog.parent[row], catalog.depth[row], extent

    def parents(self, space: Space) -> Sequence[int] | None:
        """Rows of the parents of `rows`; None where so much has changed that they are to be looked up."""
        found, rows = self._parents.get(space), self.rows(space)
        if found is None or len(found) != len(rows) or not isinstance(rows, range):
            return None
        return None if UNKNOWN_PARENT in found else found

    def _space_of(self, entry: NamespaceEntry) -> Space | None:
        try:
            namespace = msgspec.json.decode(entry.json, type=Namespace)
        except msgspec.DecodeError:
            return None
        # A namespace that this version reads otherwise than it was written is not the same one.
        return self._open_space(namespace, entry.number) if namespace.root() == entry.root else None

    def _put(self, puts: NDArray[np.void]) -> None:
        given = puts["number"]
        # Mostly there is but one: that costs no sorting.
        numbers = [int(given[0])] if (given == given[0]).all() else np.unique(given).tolist()
        self.last_number = max(self.last_number, *numbers)
        self.last_segment = max(self.last_segment, int(puts["segment"].max()))
        for number in numbers:
            space = self._spaces.get(number)
            mine = puts if len(numbers) == 1 else puts[puts["number"] == number]
            if number in self._purged:
                # Written while the purge came.
                self.erasures.update(np.unique(mine["segment"]).tolist())
                continue
            if space is None:
                self.dropped += len(mine)
                continue
            known = mine[self._fits(mine)]
            self.dropped += len(mine) - len(known)
            self._add(space, known)

    def _fits(self, puts: NDArray[np.void]) -> NDArray[np.bool_]:
        """Which puts lie inside a segment that is there."""
        segment = puts["segment"]
        ends = self._ends[np.minimum(segment, len(self._ends) - 1)]
        ends = np.where(segment < len(self._ends), ends, 0)
        offset, length = puts["offset"].astype(np.uint64), puts["length"].astype(np.uint64)
        return (offset >= SEGMENT_HEADER_BYTES // ALIGNMENT_BYTES) & (length > 0) & (offset + length <= ends)

    def _add(self, space: Space, puts: NDArray[np.void]) -> None:
        if not len(puts):
            return
        before = len(space.rows)
        parents = self._catalog.extend(space, puts)
        self._parents.setdefault(space, array("i")).extend(parents)
        self._has_repeats |= len(space.rows) < before + len(puts)

    def _delete(self, entry: DeleteEntry) -> None:
        space = self._spaces.get(entry.number)
        if space is not None and self._forget(space, BlockKey(entry.key)):
            space.remember(BlockKey(entry.key), MissReason.EVICTED)

    def _drop(self, number: int) -> None:
        self._purged.add(number)
        self.last_number = max(self.last_number, number)
        space = self._spaces.pop(number, None)
        if space is not None:
            segment = self._catalog.segment
            self.erasures.update(segment[row] for row in space.rows.values())
            for key in list(space.rows):
                self._forget(space, key)
            self._close_space(space)

    def _forget(self, space: Space, key: bytes) -> bool:
        row = space.rows.get(key)
        if row is None:
            return False
        self._give_up(row)
        return True

    def _give_up(self, row: int) -> None:
        self._catalog.segment[row] = NO_SEGMENT
        self._catalog.drop(row)
