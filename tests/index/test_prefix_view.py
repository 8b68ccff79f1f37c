"""A view of an engine shows stretches of contexts, where they are and whose."""

from __future__ import annotations

from workmem.index.prefix_view import EngineView, Stretch, place_of, view_of
from workmem.index.residency import Holder, Origin, ResidencyIndex

SIZE = 2
GPU, DISK = Holder("e"), Holder("e", 0, "STORAGE")


def store(index: ResidencyIndex, holder: Holder, hashes: list, parent=None, **more) -> None:
    tokens = [10 * name + at for name in hashes for at in range(SIZE)]
    index.stored(holder, hashes, parent=parent, tokens=tokens, block_tokens=SIZE, **more)


def shape(stretches: list[Stretch]) -> list:
    return [(s.tokens, s.places, shape(s.below)) for s in stretches]


def test_contexts_part_at_forks_and_where_the_places_change():
    index = ResidencyIndex()
    store(index, GPU, [1, 2, 3, 4], origin=Origin("tenant", "sql", "a"))
    store(index, GPU, [5], 2, origin=Origin("", "sql", "b"))
    store(index, DISK, [1, 2, 3])
    store(index, Holder("other"), [1, 7])
    view = view_of(index, "e")
    assert view.blocks == {"GPU": 5, "STORAGE": 3}
    both = ["GPU", "STORAGE"]
    assert shape(view.contexts) == [(4, both, [(2, both, [(2, ["GPU"], [])]), (2, ["GPU"], [])])]
    (top,) = view.contexts
    assert top.is_first
    assert top.start == [10, 11]
    assert top.sessions == ["a"]
    assert top.adapter == "sql"
    assert top.below[1].sessions == ["b"]


def test_a_salt_is_not_shown():
    index = ResidencyIndex()
    store(index, GPU, [1], origin=Origin(salt="secret"))
    (top,) = view_of(index, "e").contexts
    assert len(top.salt) == 8
    assert "secret" not in str(top)


def test_the_largest_context_comes_first_and_gaps_are_shown():
    index = ResidencyIndex()
    store(index, GPU, [1, 2])
    store(index, GPU, [11, 12, 13, 14])
    index.removed(GPU, [12])
    store(index, GPU, [22, 23, 24], 21)
    view = view_of(index, "e")
    assert shape(view.contexts) == [
        (2, ["GPU"], [(2, [], [(4, ["GPU"], [])])]),
        (0, [], [(6, ["GPU"], [])]),
        (4, ["GPU"], []),
    ]
    assert [top.is_first for top in view.contexts] == [True, False, True]


def test_a_long_context_needs_no_recursion():
    index = ResidencyIndex()
    for name in range(3000):
        store(index, GPU if name % 2 else DISK, [name], name - 1 if name else None)
    (top,) = view_of(index, "e").contexts
    depth = 0
    while top.below:
        (top,) = top.below
        depth += 1
    assert depth == 2999


def test_nothing_is_a_view_too():
    assert view_of(ResidencyIndex(), "e") == EngineView("e", {}, [])


def test_places_name_ranks_and_groups_where_there_are_several():
    assert [place_of(h) for h in (GPU, Holder("e", 1), Holder("e", 0, "CPU", 2))] == [
        "GPU",
        "GPU/1",
        "CPU/0#2",
    ]
