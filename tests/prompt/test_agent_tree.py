from hypothesis import given
from hypothesis import strategies as st

from workmem.core.generation import Caller
from workmem.prompt.agent_tree import AgentTree


def seen(tree, now=0.0, **fields):
    return tree.place(Caller(tenant=fields.pop("tenant", "t"), **fields), now)


def parents(tree):
    return {key[1:]: agent.parent and agent.parent[1:] for key, agent in tree.agents()}


def test_a_child_that_names_its_parents_session_is_below_it_and_of_its_workflow():
    tree = AgentTree()
    seen(tree, session="main")
    assert seen(tree, session="child", parent="main").workflow == "main"
    assert seen(tree, session="grandchild", parent="child").workflow == "main"
    assert seen(tree, session="main").workflow == "main"
    assert parents(tree) == {
        ("main", ""): None,
        ("child", ""): ("main", ""),
        ("grandchild", ""): ("child", ""),
    }


def test_an_agent_that_shares_its_session_with_one_that_has_no_name_is_its_child():
    tree = AgentTree()
    seen(tree, session="s")
    seen(tree, session="s", agent="a1")
    seen(tree, session="s", agent="a2", parent="a1")
    assert parents(tree) == {("s", ""): None, ("s", "a1"): ("s", ""), ("s", "a2"): ("s", "a1")}


def test_the_first_agent_of_a_trace_started_the_others():
    tree = AgentTree()
    seen(tree, session="one", trace="x", workflow="x")
    seen(tree, session="two", trace="x", workflow="x")
    seen(tree, session="other", trace="y", workflow="y")
    assert parents(tree) == {("one", ""): None, ("two", ""): ("one", ""), ("other", ""): None}


def test_a_workflow_that_is_only_the_trace_of_a_turn_stays_that_of_the_first():
    tree = AgentTree()
    assert seen(tree, session="one", trace="x", workflow="x").workflow == "x"
    assert seen(tree, session="one", trace="y", workflow="y").workflow == "x"
    assert seen(tree, session="two", trace="y", workflow="y", parent="one").workflow == "x"


def test_a_workflow_that_is_named_is_the_childrens_too():
    tree = AgentTree()
    assert seen(tree, session="main", workflow="nightly").workflow == "nightly"
    assert seen(tree, session="child", parent="main").workflow == "nightly"
    assert seen(tree, session="child", parent="main", workflow="own").workflow == "own"


def test_a_parent_that_is_seen_later_is_found_later():
    tree = AgentTree()
    assert seen(tree, session="child", parent="main").workflow == ""
    seen(tree, session="main")
    assert seen(tree, session="child", parent="main").workflow == "main"


def test_tenants_have_trees_of_their_own():
    tree = AgentTree()
    seen(tree, tenant="a", session="main")
    assert seen(tree, tenant="b", session="child", parent="main").workflow == ""
    assert [key[0] for key, _ in tree.agents("b")] == ["b"]


def test_a_lone_session_has_no_workflow_of_its_own():
    assert seen(AgentTree(), session="s").workflow == ""
    assert seen(AgentTree(), session="").workflow == ""


def test_the_silent_leave_first_and_take_their_names_along():
    tree = AgentTree(agents_max=3)
    seen(tree, session="main")
    for number in range(3):
        seen(tree, session=f"child-{number}", parent="main" if number == 0 else "")
    assert len(tree) == 3
    assert seen(tree, session="late", parent="main").workflow == ""


NAMES = st.sampled_from(["", "a", "b", "c"])


@given(st.lists(st.tuples(NAMES, NAMES, NAMES, NAMES, NAMES), max_size=30))
def test_whatever_clients_say_it_is_a_forest_within_its_bound(said):
    tree = AgentTree(agents_max=5)
    for session, agent, parent, trace, workflow in said:
        seen(tree, session=session, agent=agent, parent=parent, trace=trace, workflow=workflow)
        assert len(tree) <= 5
        agents = dict(tree.agents())
        for start in agents:
            key, steps = start, 0
            while key is not None and key in agents:
                key, steps = agents[key].parent, steps + 1
                assert steps <= 5
        for key, node in agents.items():
            assert node.children == {child for child, other in agents.items() if other.parent == key}
