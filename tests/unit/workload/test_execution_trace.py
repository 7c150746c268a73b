"""Execution traces that other programs wrote: what is counted, what is assumed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringtap.cli import main
from ringtap.core.errors import UsageError
from ringtap.workload.execution_trace import Node, NodeType, write_trace
from ringtap.workload.export import goal
from ringtap.workload.lowering import Algorithms
from ringtap.workload.scaling import Scaling, scale, with_times
from ringtap.workload.simulate_iterations import SimulatedIterations, critical_path, simulate
from ringtap.workload.topologies import star
from ringtap.workload.workload import Workload, read_workload
from ringtap.workload.workload_to_flow_plan import operations as operations_of

pytestmark = pytest.mark.computes

COMP, SEND, RECV, COLL = NodeType.COMP, NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL
REDUCE = {"comm_type": 0, "comm_size": 1_000_000}  # on two ranks at 1 Gbit/s: 8 ms


def written(path: Path, *traces: list[Node], groups: dict[str, list[int]] | None = None) -> Path:
    path.mkdir()
    for rank, nodes in enumerate(traces):
        write_trace(nodes, path / f"job.{rank}.et")
    if groups is not None:
        (path / "comm_group.json").write_text(json.dumps(groups))
    return path


def run(workload: Workload, iterations: int = 1) -> SimulatedIterations:
    return simulate(workload, star(workload.ranks, 1e9), Algorithms(), iterations=iterations)


def times_of(simulated: SimulatedIterations, rank: int = 0) -> dict[int, tuple[float, float]]:
    """Begin and end of each node, in ms."""
    return {span.node.id: (round(1e3 * span.begin_s, 6), round(1e3 * span.end_s, 6)) for span in simulated.spans[rank]}


def test_a_rank_computes_one_thing_at_a_time(tmp_path: Path) -> None:
    """Of what is ready, the lowest number goes first; what begins is not interrupted."""
    trace = [
        Node(4, "late", COMP, duration_us=10_000),
        Node(2, "first", COMP, duration_us=10_000),
        Node(3, "sum", COLL, [2], attributes=dict(REDUCE)),
        Node(1, "after", COMP, [3], duration_us=1_000),
    ]
    workload = read_workload(written(tmp_path / "w", trace, trace))
    simulated = run(workload)
    assert times_of(simulated) == {2: (0, 10), 3: (10, 18), 4: (10, 20), 1: (20, 21)}
    path = critical_path(workload, simulated)
    assert (path.compute_s, path.communication_s) == (pytest.approx(0.021), 0.0)
    # what is made of it in further iterations takes as long
    assert np.diff(run(workload, 3).end_s.max(axis=1)) == pytest.approx([0.021, 0.021])


def test_many_computations_that_are_ready_follow_each_other(tmp_path: Path) -> None:
    numbers = np.random.default_rng(1).permutation(200) + 1
    trace = [Node(int(number), "c", COMP, duration_us=int(number)) for number in numbers]
    found = times_of(run(read_workload(written(tmp_path / "w", trace))))
    assert [found[number][1] for number in range(1, 201)] == pytest.approx(np.cumsum(np.arange(1, 201)) / 1e3)


def test_a_replay_computes_one_thing_at_a_time(tmp_path: Path) -> None:
    """The second computation follows the first one, which it does not wait for; a third one that does adds nothing."""
    trace = [
        Node(1, "a", COMP, duration_us=1_000),
        Node(2, "b", COMP, duration_us=2_000),
        Node(3, "c", COMP, [2], duration_us=3_000),
        Node(4, "host", COMP, duration_us=5_000, attributes={"is_cpu_op": True}),
    ]
    (begin, end) = operations_of(read_workload(written(tmp_path / "w", trace)))
    assert (begin.rank, end.after) == (0, ((0, 6_000_000),))


def test_host_processor_and_memory_work_beside_each_other(tmp_path: Path) -> None:
    trace = [
        Node(1, "kernel", COMP, duration_us=4_000, attributes={"is_cpu_op": False}),
        Node(2, "host", COMP, duration_us=3_000, attributes={"is_cpu_op": True}),
        Node(3, "load", NodeType.MEM_LOAD, duration_us=2_000, attributes={"tensor_size": 5}),
        Node(4, "store", NodeType.MEM_STORE, duration_us=7_000, attributes={"tensor_size": 5}),
        Node(5, "group", NodeType.METADATA, duration_us=99_000),
    ]
    workload = read_workload(written(tmp_path / "w", trace))
    simulated = run(workload)
    assert times_of(simulated) == {1: (0, 4), 2: (0, 3), 3: (0, 2), 4: (2, 9), 5: (0, 0)}
    path = critical_path(workload, simulated)
    assert (path.compute_s, path.communication_s, path.memory_s) == (0, 0, pytest.approx(0.009))
    assert path.sentence() == (
        "Critical path: 0 ms of computation, 9 ms of loads and stores of memory, and 0 ms of communication"
    )
    scaled = scale(workload, Scaling(batch=3, parameters=2, compute=5)).traces[0]
    assert [node.duration_us for node in scaled[:4]] == [120_000, 90_000, 4_000, 14_000]
    assert [line.split()[-1] for line in goal(workload, Algorithms()) if "calc" in line] == [
        "4000000",
        "3000000",
        "2000000",
        "7000000",
        "0",
    ]
    assert any("2 loads and stores of memory" in text for text in workload.about["assumptions"])


def test_recorded_times_of_communication_are_left_out(tmp_path: Path) -> None:
    message = {"comm_size": 1_000_000}
    first = [Node(1, "s", SEND, duration_us=70_000, attributes=message | {"comm_dst": 1})]
    second = [
        Node(1, "r", RECV, duration_us=70_000, attributes=message | {"comm_src": 0}),
        Node(2, "alone", COLL, [1], duration_us=70_000, attributes=REDUCE | {"pg_name": "7"}),
    ]
    workload = read_workload(written(tmp_path / "w", first, second, groups={"7": [1]}))
    assert run(workload).end_s[0] == pytest.approx([0.008, 0.008])
    assert any(text.startswith("3 durations of communication") for text in workload.about["assumptions"])


OPERATIONS: list[dict[str, Any]] = [{"num_ops": 4e9}, {"num_ops": 1e9, "tensor_size": 6_000_000_000}]


def operations() -> list[Node]:
    work = [{name: int(value) for name, value in each.items()} for each in OPERATIONS]
    return [
        Node(1, "a", COMP, attributes=work[0]),
        Node(2, "b", COMP, [1], attributes=work[1]),
        Node(3, "recorded", COMP, [2], duration_us=500, attributes=work[0]),
        *(Node(4 + i, "small", COMP, [3 + i], attributes={"num_ops": 300_000}) for i in range(10)),
    ]


def test_operations_without_a_duration_are_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "w", operations())
    for verb in (["simulate"], ["show"], ["lower"], ["export", "--to", "goal", "-o", str(tmp_path / "goal")]):
        assert main(["workload", verb[0], str(path), *verb[1:]]) == 2
        assert capsys.readouterr().err == (
            "ringtap: job.0.et node 1 (and 11 others of its rank) has num_ops but no duration, so that its time is not "
            "known: give rates of its processor to ringtap workload scale (--flop-per-s F)\n"
        )
    assert main(["workload", "scale", str(path), "--flop-per-s", "1e12", "-o", str(tmp_path / "timed")]) == 0
    assert "Assumed: 12 computations: its operations over 1e+12 operations/s\n" in capsys.readouterr().out
    timed = read_workload(tmp_path / "timed")
    # 4 and 1 ms, as recorded, and ten times 0.3 us, rounded in sum
    assert [node.duration_us for node in timed.traces[0][:3]] == [4000, 1000, 500]
    assert sum(node.duration_us for node in timed.traces[0][3:]) == 3
    assert run(timed).iteration_s == pytest.approx(0.005503)
    assert timed.is_eager
    memory = with_times(read_workload(path, needs_times=False), 1e12, 2e12)
    assert [node.duration_us for node in memory.traces[0][:3]] == [4000, 3000, 500]


def test_what_a_processor_does_not_say_stays_unknown(tmp_path: Path) -> None:
    copy = Node(1, "copy", COMP, attributes={"tensor_size": 2_000_000})
    untimed = read_workload(written(tmp_path / "w", [copy]), needs_times=False)
    with pytest.raises(UsageError, match=r"has tensor_size but no duration.*--bytes-per-s B"):
        with_times(untimed, 1e12)
    assert with_times(untimed, 1e12, 1e9).traces[0][0].duration_us == 2000
    load = Node(1, "load", NodeType.MEM_LOAD, attributes={"tensor_size": 2_000_000})
    with pytest.raises(UsageError, match=r"job.0.et node 1 has tensor_size but no duration.*: give it a duration$"):
        with_times(read_workload(written(tmp_path / "v", [load]), needs_times=False), 1e12, 1e9)


def test_computations_without_anything_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = [Node(1, "a", COMP), Node(2, "b", COMP, [1], duration_us=1)]
    path = written(tmp_path / "w", trace)
    assert main(["workload", "simulate", str(path), "--capacity", "25gbit"]) == 0
    assert "Assumed: 1 of 2 computations without a duration: they take no time\n" in capsys.readouterr().out
    assert main(["workload", "lower", str(path), "--json"]) == 0
    assert "1 of 2 computations without" in json.loads(capsys.readouterr().out)["assumptions"][1]


def test_callers_that_chakra_removed_are_not_waited_for(tmp_path: Path) -> None:
    """A trace that its converter made of PyTorch's names them as control dependencies."""
    trace = [Node(2, "a", COMP, [1], duration_us=1), Node(3, "b", COMP, [2], duration_us=1)]
    found = read_workload(written(tmp_path / "w", trace))
    assert [node.deps for node in found.traces[0]] == [set(), {2}]
    assert "1 control dependency on nodes that the traces do not have: left out" in found.about["assumptions"][-1]
    with pytest.raises(UsageError, match="node 2 waits for node 1, which does not exist"):
        read_workload(written(tmp_path / "v", [Node(2, "a", COMP, data_deps=[1])]))


@pytest.mark.parametrize(
    ("node", "groups", "says"),
    [
        (
            Node(1, "c", COLL, attributes={"comm_size": 5}),
            None,
            "node 1 is a collective with no comm_type: give it its",
        ),
        (
            Node(1, "c", COLL, attributes={"comm_size": 5, "comm_type": 77}),
            None,
            "the unknown comm_type 77: give it its",
        ),
        (Node(1, "c", COLL, attributes={"is_cpu_op": True}), None, r"node 1 communicates on a host \(is_cpu_op\)"),
        (Node(1, "c", COLL, attributes={"comm_type": 0}), None, "node 1 has no comm_size"),
        (Node(1, "c", SEND, attributes={"comm_dst": 1}), None, "node 1 has no comm_size"),
        (
            Node(1, "c", COLL, attributes=REDUCE | {"pg_name": "5"}),
            None,
            "of group '5': name its ranks in comm_group.json",
        ),
        (
            Node(1, "c", COLL, attributes=REDUCE | {"pg_name": "5"}),
            {"1": [0, 1]},
            "of group '5': name its ranks in comm_group.json",
        ),
        (
            Node(1, "c", COLL, attributes=REDUCE | {"involved_dim": [True, False]}),
            None,
            "is of some dimensions of a network",
        ),
        (
            Node(1, "c", SEND, attributes={"comm_size": 1, "comm_src": 1, "comm_dst": 1}),
            None,
            "node 1 names rank 1 as its own, but the trace is of rank 0",
        ),
        (Node(1, "c", COMP, attributes={"num_ops": -1}), None, "node 1 has a num_ops of -1"),
    ],
)
def test_what_a_trace_does_not_say_is_refused(
    tmp_path: Path, node: Node, groups: dict[str, list[int]] | None, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        read_workload(written(tmp_path / "w", [node], [node], groups=groups))


def test_all_ranks_need_no_group(tmp_path: Path) -> None:
    every = [Node(1, "c", COLL, attributes=REDUCE | {"pg_name": "0", "involved_dim": [True, True]})]
    assert run(read_workload(written(tmp_path / "w", every, every))).iteration_s == pytest.approx(0.008)


def test_collectives_are_paired_in_the_order_of_the_trace(tmp_path: Path) -> None:
    """On one rank, a computation stands before the first one; on the other one, that is listed last."""
    first, second = REDUCE, REDUCE | {"comm_size": 2_000_000}
    before = [Node(1, "c", COMP, duration_us=1), Node(2, "a", COLL, [1], attributes=first), Node(3, "b", COLL)]
    before[2].attributes = second
    plain = [Node(1, "a", COLL, attributes=first), Node(2, "b", COLL, attributes=second)]
    listed_last = [Node(2, "a", COLL, [9], attributes=first), Node(3, "b", COLL, attributes=second)]
    listed_last.append(Node(9, "c", COMP, duration_us=1))
    workload = read_workload(written(tmp_path / "w", before, plain, listed_last))
    assert [[node.name for node in trace] for trace in workload.traces] == [
        ["c", "a", "b"],
        ["a", "b"],
        ["c", "a", "b"],
    ]
    # of equal bytes, they would be paired wrongly: the second one waits for nobody
    for node in (before[2], plain[1], listed_last[1]):
        node.attributes = REDUCE
    before[0].duration_us = 50_000
    spans = run(read_workload(written(tmp_path / "v", before, plain))).spans[1]
    assert [(span.node.name, round(1e3 * span.end_s, 6)) for span in spans] == [("a", 58), ("b", 8)]


def test_messages_of_one_tag_are_paired_in_the_order_of_the_trace(tmp_path: Path) -> None:
    sizes = ({"comm_size": 5}, {"comm_size": 7})
    sender = [Node(1, "c", COMP, duration_us=1)]
    sender += [
        Node(2 + i, "s", SEND, [1] * (i == 0), attributes=size | {"comm_dst": 1}) for i, size in enumerate(sizes)
    ]
    receiver = [Node(1 + i, "r", RECV, attributes=size | {"comm_src": 0}) for i, size in enumerate(sizes)]
    assert read_workload(written(tmp_path / "w", sender, receiver)).ranks == 2


def test_texts_in_lists_come_back(tmp_path: Path) -> None:
    node = Node(1, "c", COMP, duration_us=1, attributes={"inputs": ["x", "y"]})
    assert read_workload(written(tmp_path / "w", [node])).traces == [[node]]


@pytest.mark.parametrize("name", ["job", "workload"])
def test_groups_may_have_the_name_of_the_traces(tmp_path: Path, name: str) -> None:
    """STAGE names the file after the traces, which may be as ringtap names its own file."""
    path = tmp_path / "w"
    trace = [Node(1, "c", COLL, attributes=REDUCE | {"pg_name": "2"})]
    written(path, trace, trace, [])
    (path / f"{name}.json").write_text(json.dumps({"2": [0, 1]}))
    for each in path.glob("job.*.et"):
        each.rename(path / each.name.replace("job", name))
    workload = read_workload(path)
    assert (workload.groups, workload.is_eager) == ({"2": [0, 1]}, True)
    assert run(workload).end_s[0] == pytest.approx([0.008, 0.008, 0.0])
