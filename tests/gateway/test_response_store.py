"""What is kept of responses, and for how long."""

from hypothesis import given, settings
from hypothesis import strategies as st

from workmem.core.events import discard
from workmem.gateway.response_store import ResponseStore


def make(*, responses_max=100, bytes_max=10**6, events=discard):
    return ResponseStore(responses_max=responses_max, bytes_max=bytes_max, events=events)


def message(item_id, text="x"):
    return {"type": "message", "role": "user", "id": item_id, "content": text}


def put(store, name, *, tenant="t", parent=None, text="x"):
    body = {"id": name, "output": [message(f"out_{name}", text)]}
    items = [message(f"in_{name}", text)]
    parent = None if parent is None else store.find(tenant, parent)
    store.put(tenant, name, body=body, input_items=items, parent=parent)


def ids(response):
    return [placed.item["id"] for placed in response.context()]


def held(store):
    return store.gauges()["responses_stored"], store.gauges()["responses_stored_bytes"]


def test_a_context_is_what_came_before_with_its_paths():
    store = make()
    put(store, "a")
    put(store, "b", parent="a")
    put(store, "c", parent="b")
    assert ids(store.find("t", "c")) == ["in_a", "out_a", "in_b", "out_b", "in_c", "out_c"]
    assert [placed.path for placed in store.find("t", "b").context()] == [
        "a/input[0]",
        "a/output[0]",
        "b/input[0]",
        "b/output[0]",
    ]
    assert [placed.item["id"] for placed in store.find("t", "b").context_before()] == [
        "in_a",
        "out_a",
        "in_b",
    ]


def test_the_least_recently_used_leaves_first_and_it_is_told():
    told = []
    store = make(responses_max=2, events=told.append)
    put(store, "a")
    put(store, "b")
    store.find("t", "a")
    put(store, "c")
    assert store.find("t", "b") is None
    assert ids(store.find("t", "a")) == ["in_a", "out_a"]
    assert [(event.name, event.limit, event.detail) for event in told] == [
        ("gateway.responses.count", 2, "b")
    ]


def test_bytes_are_bounded_and_a_predecessor_counts_as_long_as_it_is_held():
    told = []
    store = make(bytes_max=2000, events=told.append)
    put(store, "a", text="x" * 300)
    one = held(store)[1]
    put(store, "b", parent="a", text="x" * 300)
    assert held(store) == (2, 2 * one)
    store.delete("t", "a")
    assert held(store) == (1, 2 * one)
    put(store, "c", text="x" * 300)
    # Freeing "b" frees the chain it held.
    assert held(store) == (1, one)
    assert store.find("t", "c") is not None
    assert {event.name for event in told} == {"gateway.responses.bytes"}


def test_what_is_larger_than_all_room_is_not_kept_and_drives_nobody_out():
    told = []
    store = make(bytes_max=1000, events=told.append)
    put(store, "a")
    put(store, "b", text="x" * 1000)
    assert store.find("t", "b") is None
    assert store.find("t", "a") is not None
    assert [event.detail for event in told] == ["b"]


def test_a_tenant_that_stores_more_drives_nobody_else_out():
    by_count, by_bytes = make(responses_max=4), make(bytes_max=2000)
    for store in (by_count, by_bytes):
        put(store, "quiet", tenant="q")
        for number in range(20):
            put(store, f"loud{number}", tenant="l", text="x" * 100)
        assert store.find("q", "quiet") is not None
        assert store.find("l", "loud19") is not None
        assert store.find("l", "loud0") is None
    assert held(by_count)[0] == 4


def test_a_store_of_nothing_keeps_nothing():
    store = make(responses_max=0)
    put(store, "a")
    assert held(store) == (0, 0)


def test_items_are_found_while_their_response_is_held_and_by_their_tenant_alone():
    store = make()
    put(store, "a")
    put(store, "b", parent="a")
    assert store.find_item("t", "out_a").path == "a/output[0]"
    assert store.find_item("u", "out_a") is None
    assert store.find("u", "a") is None
    assert not store.delete("u", "a")
    assert store.delete("t", "a")
    assert store.find_item("t", "out_a") is None
    assert store.find_item("t", "in_b").path == "b/input[0]"


def test_an_item_that_two_responses_have_stays_with_the_one_that_is_held():
    store = make()
    store.put("t", "a", body={"output": []}, input_items=[message("in")], parent=None)
    store.put("t", "b", body={"output": []}, input_items=[message("in")], parent=None)
    store.delete("t", "a")
    assert store.find_item("t", "in").path == "b/input[0]"


NAMES = st.sampled_from("abcdefgh")
STEPS = st.lists(
    st.tuples(st.just("put"), NAMES, st.none() | NAMES, st.integers(0, 200))
    | st.tuples(st.just("delete"), NAMES)
    | st.tuples(st.just("find"), NAMES),
    max_size=40,
)


@settings(deadline=None)
@given(STEPS, st.integers(1, 6), st.integers(200, 1500))
def test_what_is_counted_is_what_is_reachable(steps, responses_max, bytes_max):
    store = make(responses_max=responses_max, bytes_max=bytes_max)
    for number, step in enumerate(steps):
        match step:
            case ("put", name, parent, size):
                put(store, f"{name}{number}", parent=newest(store, parent), text="x" * size)
            case ("delete", name):
                store.delete("t", newest(store, name) or "")
            case ("find", name):
                store.find("t", newest(store, name) or "")
    reachable = {}
    for response in store._responses.values():
        node = response
        while node is not None:
            reachable[node.id] = node.size
            node = node.parent
    count, size = held(store)
    assert size == sum(reachable.values()) <= bytes_max
    assert count <= responses_max
    assert {holder.id for holder in store._items.values()} <= {key[1] for key in store._responses}


def newest(store, name):
    return next((key[1] for key in reversed(store._responses) if name and key[1].startswith(name)), None)
