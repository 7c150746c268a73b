"""Schedules and chains of a workload with collectives are those of the workload that it is lowered to."""

import re
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.workload.execution_trace import Collective, Node, NodeType
from ringtap.workload.export import goal
from ringtap.workload.lowering import Algorithms, lower
from ringtap.workload.simulator_programs import longest_chain_ns
from ringtap.workload.workload import Workload, check_workload, peer_of

pytestmark = [pytest.mark.computes, pytest.mark.long]

KINDS = [kind for kind in Collective if kind != Collective.REDUCE_SCATTER_BLOCK]
ALL_REDUCE = ["ring", "halving-doubling", "tree", "double-tree", "parameter-server", "in-network"]


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    ranks, trace = draw(st.sampled_from([2, 4, 8])), []
    for number in range(1, draw(st.integers(1, 4)) + 1):
        deps = [number - 1] if number > 1 and draw(st.booleans()) else []
        if draw(st.booleans()):
            trace.append((number, NodeType.COMP, deps, {}))
        else:
            kind, group = draw(st.sampled_from(KINDS)), draw(st.sampled_from(["", "even"]))
            size_bytes = 0 if kind == Collective.BARRIER else draw(st.integers(0, 10**5))
            trace.append((number, NodeType.COMM_COLL, deps, {"comm_type": int(kind), "comm_size": size_bytes}))
            trace[-1][3].update({"pg_name": group} if group else {})
    lengths = draw(st.lists(st.integers(0, 1000), min_size=ranks, max_size=ranks))
    traces = [
        [
            Node(number, "n", type_, list(deps), duration_us=lengths[rank], attributes=dict(attributes))
            for number, type_, deps, attributes in trace
            if attributes.get("pg_name", "") == "" or rank % 2 == 0
        ]
        for rank in range(ranks)
    ]
    for nodes in traces:  # a rank that is not in a group waits for nothing of it
        known = {node.id for node in nodes}
        for node in nodes:
            node.control_deps = [dep for dep in node.control_deps if dep in known]
    found = Workload(traces, {"even": list(range(0, ranks, 2))})
    check_workload(found)
    return found


@settings(max_examples=150, deadline=None)
@given(workloads(), st.sampled_from(ALL_REDUCE))
def test_a_schedule_has_the_messages_and_waits_of_the_lowered_workload(workload: Workload, all_reduce: str) -> None:
    algorithms = Algorithms(all_reduce, shards=2)
    lowered = lower(workload, algorithms)
    check_workload(lowered)
    operations: dict[int, set[str]] = defaultdict(set)
    waits: dict[int, set[tuple[int, int]]] = defaultdict(set)
    rank = -1
    for line in goal(workload, algorithms):
        if match := re.fullmatch(r"rank (\d+) {", line):
            rank = int(match[1])
        elif match := re.fullmatch(r"l(\d+) requires l(\d+)", line):
            waits[rank].add((int(match[1]), int(match[2])))
        elif line.startswith("l"):
            operations[rank].add(line)
    for rank, trace in enumerate(lowered.traces):
        assert waits[rank] == {(node.id, dep) for node in trace for dep in node.deps}
        expected = set()
        for node in trace:
            words = f"{max(int(node.attributes.get('comm_size', 0)), 1)}b"  # type: ignore[arg-type]
            if node.type == NodeType.COMP:
                expected.add(f"l{node.id}: calc {1000 * node.duration_us}")
            elif node.type == NodeType.COMM_SEND:
                expected.add(f"l{node.id}: send {words} to {peer_of(node)} tag {node.attributes['comm_tag']}")
            else:
                expected.add(f"l{node.id}: recv {words} from {peer_of(node)} tag {node.attributes['comm_tag']}")
        assert operations[rank] == expected


@settings(max_examples=150, deadline=None)
@given(workloads(), st.sampled_from(ALL_REDUCE))
def test_the_longest_chain_is_that_of_the_lowered_workload(workload: Workload, all_reduce: str) -> None:
    algorithms = Algorithms(all_reduce, shards=2)
    lowered = lower(workload, algorithms)
    check_workload(lowered)
    found_ns = longest_chain_ns(workload, 8e9, 1e-6, algorithms)
    assert found_ns == longest_chain_ns(lowered, 8e9, 1e-6)
    assert longest_chain_ns(workload, 8e9, 1e-6) <= found_ns + 10  # by rounding
