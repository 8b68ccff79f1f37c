"""Answers of the Responses API that may be asked for again, and continued: in memory, bounded, of one tenant each.

A response holds its own input and output and its predecessor, so a conversation is held once, however long it gets.
The least recently used leaves first, of the tenant that holds the most: nobody is driven out by a neighbour who stores more. One that left, or was deleted, has no address any more; what continues it has it still.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import msgspec

from workmem.core.events import BoundReached, EventSink
from workmem.prompt.responses_chat import PlacedItem

BOUND_COUNT, BOUND_BYTES = "gateway.responses.count", "gateway.responses.bytes"


class _Output(msgspec.Struct):
    output: list[Any]


class StoredResponse:
    """One response. It is kept as JSON, so that its size is what it takes."""

    __slots__ = ("body", "holders", "id", "input", "parent", "tenant")

    def __init__(
        self,
        response_id: str,
        tenant: str,
        *,
        body: bytes,
        input_items: bytes,
        parent: StoredResponse | None,
    ) -> None:
        self.id = response_id
        self.tenant = tenant
        self.body = body
        self.input = input_items
        self.parent = parent
        self.holders = 0
        """The store and those that continue it; its bytes are free at none."""

    @property
    def size(self) -> int:
        """Bytes of it alone."""
        return len(self.body) + len(self.input)

    def own_input(self) -> list[PlacedItem]:
        """What was new to it, with paths."""
        items = msgspec.json.decode(self.input)
        return [PlacedItem(f"{self.id}/input[{index}]", item) for index, item in enumerate(items)]

    def own_items(self) -> list[PlacedItem]:
        """Its input and its output, in order, with paths."""
        # A body repeats its tools: they are passed over, not decoded, for every response of a long conversation.
        output = msgspec.json.decode(self.body, type=_Output).output
        made = [PlacedItem(f"{self.id}/output[{index}]", item) for index, item in enumerate(output)]
        return self.own_input() + made

    def context(self) -> list[PlacedItem]:
        """All items up to its end: what a response that continues it begins with."""
        return self._items_of_chain(self)

    def context_before(self) -> list[PlacedItem]:
        """All items that it answered."""
        before = [] if self.parent is None else self._items_of_chain(self.parent)
        return before + self.own_input()

    @staticmethod
    def _items_of_chain(last: StoredResponse) -> list[PlacedItem]:
        chain: list[StoredResponse] = []
        node: StoredResponse | None = last
        while node is not None:
            chain.append(node)
            node = node.parent
        return [item for one in reversed(chain) for item in one.own_items()]


class ResponseStore:
    """See the module. One event loop calls it."""

    def __init__(self, *, responses_max: int, bytes_max: int, events: EventSink) -> None:
        self._responses_max = responses_max
        self._bytes_max = bytes_max
        self._events = events
        self._responses: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._items: dict[tuple[str, str], StoredResponse] = {}
        """By tenant and id of an item, the latest response that has it."""
        self._bytes: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        """Both by tenant."""

    def gauges(self) -> dict[str, float]:
        """What is held, and whether by an address or by what continues it is no matter."""
        return {
            "responses_stored": float(len(self._responses)),
            "responses_stored_bytes": float(self._bytes.total()),
        }

    def put(
        self,
        tenant: str,
        response_id: str,
        *,
        body: dict[str, Any],
        input_items: list[Any],
        parent: StoredResponse | None,
    ) -> None:
        """Keep a response, as long as there is room."""
        made = StoredResponse(
            response_id,
            tenant,
            body=msgspec.json.encode(body),
            input_items=msgspec.json.encode(input_items),
            parent=parent,
        )
        if self._responses_max == 0:
            return
        if made.size > self._bytes_max:
            self._events(BoundReached(name=BOUND_BYTES, limit=self._bytes_max, detail=response_id))
            return
        self._hold(made)
        self._responses[tenant, response_id] = made
        self._counts[tenant] += 1
        for item_id in _ids([*input_items, *body["output"]]):
            self._items[tenant, item_id] = made
        self._make_room()

    def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The response of that tenant, which is used now; None where there is none (any more)."""
        found = self._responses.get((tenant, response_id))
        if found is not None:
            self._responses.move_to_end((tenant, response_id))
        return found

    def find_item(self, tenant: str, item_id: str) -> PlacedItem | None:
        """An item of any response of that tenant that is held under its address."""
        holder = self._items.get((tenant, item_id))
        if holder is None:
            return None
        self._responses.move_to_end((tenant, holder.id))
        return next(placed for placed in holder.own_items() if placed.item.get("id") == item_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response; False where there is none."""
        gone = self._responses.pop((tenant, response_id), None)
        if gone is None:
            return False
        self._counts[tenant] -= 1
        self._counts += Counter()  # Forgets who holds nothing.
        for item_id in _ids([placed.item for placed in gone.own_items()]):
            if self._items.get((tenant, item_id)) is gone:
                del self._items[tenant, item_id]
        self._let_go(gone)
        return True

    def _make_room(self) -> None:
        while len(self._responses) > self._responses_max:
            self._drop_oldest(self._counts, BOUND_COUNT, self._responses_max)
        while self._bytes.total() > self._bytes_max:
            self._drop_oldest(self._bytes, BOUND_BYTES, self._bytes_max)

    def _drop_oldest(self, held: Counter[str], name: str, limit: int) -> None:
        """The oldest response of the tenant that has the most of what is `held`."""
        [(largest, _)] = held.most_common(1)
        oldest = next(response_id for tenant, response_id in self._responses if tenant == largest)
        self._events(BoundReached(name=name, limit=limit, detail=oldest))
        self.delete(largest, oldest)

    def _hold(self, node: StoredResponse) -> None:
        """Count one holder more; what was not held yet holds its predecessor."""
        held: StoredResponse | None = node
        while held is not None:
            held.holders += 1
            if held.holders > 1:
                return
            self._bytes[held.tenant] += held.size
            held = held.parent

    def _let_go(self, node: StoredResponse) -> None:
        left: StoredResponse | None = node
        while left is not None:
            left.holders -= 1
            if left.holders > 0:
                return
            self._bytes[left.tenant] -= left.size
            self._bytes += Counter()  # Forgets who holds nothing.
            left = left.parent


def _ids(items: list[Any]) -> set[str]:
    found = {item.get("id") for item in items}
    return {item_id for item_id in found if isinstance(item_id, str)}
