"""Exports to other simulators, runs of their programs, and their results."""

from __future__ import annotations

import json
import random
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_format import FLOW_LIST_COLUMNS
from ringtap.trafficgen.plans.common import PlanOutline
from ringtap.trafficgen.plans.hpcc_flow_lists import FlowListPlan
from ringtap.workload.astra_sim import write_astra_sim
from ringtap.workload.astra_sim_1 import workload_file
from ringtap.workload.execution_trace import Collective, Node, NodeType, read_trace
from ringtap.workload.export import goal, hpcc, param
from ringtap.workload.lowering import Algorithms, lower
from ringtap.workload.simulate_iterations import simulate
from ringtap.workload.simulator_logs import read_log
from ringtap.workload.simulator_programs import longest_chain_ns, run_simulator
from ringtap.workload.topologies import Topology, fat_tree, leaf_spine, ring, star, torus
from ringtap.workload.workload import Workload, check_workload, messages_of, read_workload, size_of

pytestmark = [pytest.mark.computes, pytest.mark.long]

COMP, SEND, RECV, COLL = NodeType.COMP, NodeType.COMM_SEND, NodeType.COMM_RECV, NodeType.COMM_COLL


def workload(ranks: int = 4, kind: Collective = Collective.ALL_REDUCE, group: str = "") -> Workload:
    def trace() -> list[Node]:
        attributes = {"comm_type": int(kind), "comm_size": 1 << 20} | ({"pg_name": group} if group else {})
        return [
            Node(1, "forward", COMP, duration_us=1000, start_us=5, attributes={"is_cpu_op": True, "tid": 3}),
            Node(2, "bucket0", COLL, [1], attributes=dict(attributes)),
            Node(3, "process_group:init", NodeType.METADATA),
            Node(4, "optimizer", COMP, [3], [2], duration_us=7),
        ]

    made = Workload([trace() for _ in range(ranks)], {group: list(range(ranks))} if group else {})
    check_workload(made)
    return made


def lowered(ranks: int = 4) -> Workload:
    made = lower(workload(ranks), Algorithms())
    check_workload(made)
    return made


# network.yml, read without a YAML library: name: [value, ...]
def network(path: Path) -> dict[str, list[str]]:
    lines = (path / "network.yml").read_text().splitlines()
    return {line.split(": ")[0]: line.split("[")[1].rstrip("]").split(", ") for line in lines}


def test_a_directory_has_only_what_astra_sim_accepts(tmp_path: Path) -> None:
    write_astra_sim(workload(), ring(4, 50 * 2**30 * 8), "ring", 500e-9, tmp_path / "x")
    assert network(tmp_path / "x") == {
        "topology": ["Ring"], "npus_count": ["4"], "bandwidth": ["50"], "latency": ["500"],
    }  # fmt: skip
    system = json.loads((tmp_path / "x" / "system.json").read_text())
    assert system["all-reduce-implementation"] == system["all-gather-implementation"] == ["ring"]
    assert system["all-to-all-implementation"] == ["direct1"]
    assert json.loads((tmp_path / "x" / "comm_group.json").read_text()) == {}
    assert json.loads((tmp_path / "x" / "remote_memory.json").read_text()) == {"memory-type": "NO_MEMORY_EXPANSION"}
    for rank in range(4):
        nodes = {node.id: node for node in read_trace(tmp_path / "x" / f"rank.{rank}.et")}
        assert {node.type for node in nodes.values()} == {COMP, COLL}
        assert all(node.attributes["is_cpu_op"] is False for node in nodes.values())
        assert nodes[1].attributes == nodes[3].attributes == {"is_cpu_op": False}
        assert nodes[2].attributes == {"is_cpu_op": False, "comm_type": 0, "comm_size": 1 << 20}
        assert (nodes[1].duration_us, nodes[4].deps) == (1000, {2, 3})
    assert read_workload(tmp_path / "x").ranks == 4


def test_groups_get_numbers_above_zero(tmp_path: Path) -> None:
    made = workload(group="data parallel")
    made.groups = {"0": [0, 1], "data parallel": [0, 1, 2, 3]}
    write_astra_sim(made, star(4, 1e9), "halving-doubling", 1e-6, tmp_path / "x")
    assert json.loads((tmp_path / "x" / "comm_group.json").read_text()) == {"1": [0, 1], "2": [0, 1, 2, 3]}
    again = read_workload(tmp_path / "x")
    assert again.traces[3][1].attributes["pg_name"] == "2"
    system = json.loads((tmp_path / "x" / "system.json").read_text())
    assert system["all-reduce-implementation"] == ["halvingDoubling"]
    assert network(tmp_path / "x")["latency"] == ["500"]  # two links to and from the switch


@pytest.mark.parametrize(
    ("topology", "kinds", "sizes"),
    [
        (torus((2, 4), 8e9), ["Ring", "Ring"], ["4", "2"]),
        (torus((8, 1), 8e9), ["Ring"], ["8"]),
        (leaf_spine(8, 8e9, 4, 2.0), ["Switch", "Switch"], ["4", "2"]),
        (leaf_spine(8, 8e9, 8), ["Switch"], ["8"]),
    ],
)
def test_dimensions_begin_with_neighbours(
    tmp_path: Path, topology: Topology, kinds: list[str], sizes: list[str]
) -> None:
    write_astra_sim(workload(8), topology, "ring", 0.0, tmp_path / "x")
    found = network(tmp_path / "x")
    assert (found["topology"], found["npus_count"]) == (kinds, sizes)
    rates = [float(rate) * 2**30 for rate in found["bandwidth"]]
    assert rates == pytest.approx([1e9, 0.5e9 if kinds == ["Switch", "Switch"] else 1e9][: len(kinds)])
    assert len(json.loads((tmp_path / "x" / "system.json").read_text())["all-reduce-implementation"]) == len(kinds)


def test_sends_and_receives_are_exported(tmp_path: Path) -> None:
    made = lowered()
    write_astra_sim(made, ring(4, 1e9), "tree", 0.0, tmp_path / "x")
    again = read_workload(tmp_path / "x")
    for found, expected in zip(messages_of(again), messages_of(made), strict=True):
        assert {key: [size_of(node) for _, node in each] for key, each in found.items()} == {
            key: [size_of(node) for _, node in each] for key, each in expected.items()
        }
    one = next(node for node in again.traces[1] if node.type == RECV)
    assert one.attributes == {"is_cpu_op": False, "comm_size": 1 << 18, "comm_src": 0, "comm_dst": 1, "comm_tag": 0}


@pytest.mark.shares
def test_exports_decode_with_the_reader_of_mlcommons(tmp_path: Path) -> None:
    made = workload()
    made.groups = {"all": [0, 1, 2, 3]}
    for name, one in (("collective", made), ("lowered", lowered())):
        write_astra_sim(one, ring(4, 1e9), "ring", 0.0, tmp_path / name)
        source, destination = tmp_path / name / "rank.1.et", tmp_path / f"{name}.json"
        command = [sys.executable, "-m", "chakra.src.jsonizer.jsonizer"]
        command += [f"--input_filename={source}", f"--output_filename={destination}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stderr
        text, items = destination.read_text(), []
        while text:
            item, end = json.JSONDecoder().raw_decode(text)
            items.append(item)
            text = text[end:]
        metadata, *found = items
        expected = list(read_trace(source))
        assert metadata == {"version": "0.0.4"}
        assert [int(item["id"]) for item in found] == [node.id for node in expected]
        assert [item["type"] for item in found] == [f"{node.type.name}_NODE" for node in expected]
        for item, node in zip(found, expected, strict=True):
            assert [int(dep) for dep in item.get("ctrlDeps", [])] == node.control_deps
            assert [int(dep) for dep in item.get("dataDeps", [])] == sorted(node.deps)
            assert int(item.get("durationMicros", 0)) == node.duration_us
            attributes = {}
            for attribute in item["attr"]:
                attributes[attribute.pop("name")] = attribute.popitem()[1]
            assert {name: str(value) for name, value in attributes.items()} == {
                name: str(value) for name, value in node.attributes.items()
            }


def with_kind(kind: Collective) -> Callable[[], Workload]:
    return lambda: workload(kind=kind)


def crossing_group() -> Workload:
    made = workload(group="1")
    made.groups = {"1": [0, 3], "2": [1, 2]}
    for rank in (1, 2):
        made.traces[rank][2 if made.traces[rank][2].type == COLL else 1].attributes["pg_name"] = "2"
    return made


@pytest.mark.parametrize(
    ("make", "topology", "all_reduce", "says"),
    [
        (with_kind(Collective.REDUCE), star(4, 1e9), "ring", "rank 0 node 2: ASTRA-sim cannot run reduce; lower"),
        (with_kind(Collective.BROADCAST), star(4, 1e9), "ring", "rank 0 node 2: ASTRA-sim cannot run broadcast; lower"),
        (with_kind(Collective.BARRIER), star(4, 1e9), "ring", "cannot run barrier"),
        (
            workload,
            star(4, 1e9),
            "tree",
            "has no tree all-reduce: choose ring, halving-doubling, double-tree, or lower",
        ),
        (workload, fat_tree(4, 1e9), "ring", "no fat-tree like this one: it has several paths"),
        (workload, leaf_spine(4, 1e9, 3), "ring", "no leaf-spine like this one: its leaves have different numbers"),
        (workload, torus((4, 4), 1e9), "ring", "the torus has 16 hosts for 4 ranks"),
        (lambda: workload(1), star(1, 1e9), "ring", "needs 2 ranks"),
        (lambda: lowered(4), torus((2, 2), 1e9), "ring", "between ranks 0 and 3, 2 dimensions apart"),
        (crossing_group, torus((2, 2), 1e9), "ring", "between ranks 0 and 3, 2 dimensions apart"),
    ],
)
def test_what_astra_sim_cannot_run_is_refused(
    tmp_path: Path, make: Callable[[], Workload], topology: Topology, all_reduce: str, says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        write_astra_sim(make(), topology, all_reduce, 0.0, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_numbers_that_a_trace_cannot_hold_are_refused(tmp_path: Path) -> None:
    made = lowered()
    node = next(node for node in made.traces[2] if node.type == SEND)
    node.attributes["comm_tag"] = 2**40
    with pytest.raises(UsageError, match=r"rank.2.et node \d+: comm_tag 1099511627776 cannot be written"):
        write_astra_sim(made, ring(4, 1e9), "ring", 0.0, tmp_path / "x")


def test_flows_start_when_their_messages_do() -> None:
    made = lowered()
    simulated = simulate(made, star(4, 8e9), Algorithms())
    (count, *lines), lost = hpcc(made, simulated)
    assert lost == []
    assert (int(count), len(lines)) == (24, 24)
    flows = [line.split() for line in lines]
    assert {len(flow) for flow in flows} == {len(FLOW_LIST_COLUMNS)}
    # ring: six steps of 2^18 bytes at 1 GB/s, after 1 ms of computation
    starts_s = [float(flow[5]) for flow in flows]
    assert starts_s == pytest.approx([1e-3 + step * 2**18 / 1e9 for step in range(6) for _ in range(4)], abs=2e-9)
    assert starts_s == sorted(starts_s)
    assert {(int(flow[1]) - int(flow[0])) % 4 for flow in flows} == {1}
    assert {(flow[2], flow[4]) for flow in flows} == {("3", str(2**18))}
    # two ranks at a host: one message of two leaves it
    halves, lost = hpcc(made, simulate(made, star(2, 8e9), Algorithms(), ranks_per_host=2), 2)
    assert len(halves) == 1 + 12
    assert lost == ["left out: 12 messages within a host or of 0 bytes"]
    with pytest.raises(UsageError, match="no message of the workload goes from one host to another"):
        hpcc(made, simulate(made, star(1, 8e9), Algorithms(), ranks_per_host=4), 4)


@given(
    st.integers(2, 6), st.integers(1, 10**6), st.sampled_from(["ring", "tree", "double-tree", "parameter-server"]),
    st.sampled_from([Collective.ALL_REDUCE, Collective.ALL_TO_ALL, Collective.BROADCAST]),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_flow_lists_read_back_as_plans(ranks: int, size_bytes: int, all_reduce: str, kind: Collective) -> None:
    algorithms = Algorithms(all_reduce)
    attributes = {"comm_type": int(kind), "comm_size": size_bytes}
    made = Workload([[Node(1, "sum", COLL, attributes=dict(attributes))] for _ in range(ranks)])
    made = lower(made, algorithms)
    check_workload(made)
    lines, _ = hpcc(made, simulate(made, star(made.ranks, 8e9), Algorithms()))
    nodes = [f"10.0.0.{rank + 1}:100" for rank in range(made.ranks)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "flows"
        path.write_text("".join(f"{line}\n" for line in lines))
        flows = list(FlowListPlan(path, PlanOutline(0, nodes, [node.split(":")[0] for node in nodes]), nodes).flows())
    graph = algorithms.graph(kind, ranks, size_bytes)
    sent = [sum(flow.size_bytes for flow in flows if flow.source == node.split(":")[0]) for node in nodes]
    assert sent[: graph.endpoints] == graph.sent_bytes.tolist()


def test_schedules_have_no_message_of_zero_bytes() -> None:
    made = workload(kind=Collective.BARRIER)
    made.traces[0][0].duration_us = 3
    text = "\n".join(goal(made, Algorithms(), 10**6))
    assert "send 0b" not in text
    assert "calc 3000000" in text


def computation(number: int, after: list[int], us: int) -> Node:
    return Node(number, f"k{number}", COMP, after, duration_us=us)


def collective(number: int, after: list[int], kind: Collective = Collective.ALL_REDUCE, size: int = 1 << 24) -> Node:
    return Node(number, f"c{number}", COLL, after, attributes={"comm_type": int(kind), "comm_size": size})


def alike(*trace: Node, ranks: int = 4) -> Workload:
    made = Workload([[replace(node, attributes=dict(node.attributes)) for node in trace] for _ in range(ranks)])
    check_workload(made)
    return made


@pytest.mark.parametrize(
    ("trace", "lines"),
    [
        # a bucket while the next one is computed; the optimizer waits for both, and so delays the end of each
        (
            (
                computation(1, [], 1000), collective(2, [1]), computation(3, [1], 2000), collective(4, [3, 2]),
                Node(6, "process_group:init", NodeType.METADATA, [2, 4]), computation(5, [6], 3000),
            ),
            [
                "DATA", "3", "layer2 -1 0 NONE 0 0 NONE 0 3000000 NONE 0 3000000",
                "c4 -1 0 NONE 0 0 NONE 0 2000000 ALLREDUCE 16777216 3000000",
                "c2 -1 0 NONE 0 0 NONE 0 1000000 ALLREDUCE 16777216 3000000",
            ],
        ),
        # a computation beside the last collective
        (
            (computation(1, [], 1000), collective(2, [1]), computation(3, [1], 20000)),
            [
                "DATA", "2", "layer1 -1 0 NONE 0 0 NONE 0 20000000 NONE 0 1",
                "c2 -1 0 NONE 0 0 NONE 0 1000000 ALLREDUCE 16777216 1",
            ],
        ),
        # one thing after the other: sizes are those of one rank's input
        (
            (
                computation(1, [], 1000), collective(2, [1], Collective.ALL_GATHER, 1000), computation(3, [2], 2000),
                collective(4, [3], Collective.REDUCE_SCATTER_BLOCK, 4000), computation(5, [4], 3000),
                collective(6, [5], Collective.ALL_TO_ALL, 0), computation(7, [6], 1),
            ),
            [
                "DISTRIBUTED_INFERENCE", "4", "c2 -1 1000000 ALLGATHER 1000 0 NONE 0 0 NONE 0 1",
                "c4 -1 2000000 REDUCESCATTER 4000 0 NONE 0 0 NONE 0 1",
                "c6 -1 3000000 ALLTOALL 4 0 NONE 0 0 NONE 0 1", "layer3 -1 1000 NONE 0 0 NONE 0 0 NONE 0 1",
            ],
        ),
    ],
)  # fmt: skip
def test_astra_sim_1_gets_a_loop_that_does_the_same(trace: tuple[Node, ...], lines: list[str]) -> None:
    assert workload_file(alike(*trace)) == (lines, [])


def test_other_computations_of_other_ranks_are_warned_of() -> None:
    made = alike(computation(1, [], 1000), collective(2, [1]))
    made.traces[2][0].duration_us = 1500
    lines, lost = workload_file(made)
    assert "1000000 ALLREDUCE" in lines[2]
    assert lost == [
        "computations differ between ranks (1 to 1.5 ms in all): the file has those of rank 0 (1 ms)"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "trace",
    [
        # a prefetched shard: the second collective runs beside a computation that waits for the first one
        (collective(1, []), computation(2, [1], 5), collective(3, [1]), computation(4, [2, 3], 5), collective(5, [4])),
        # two computations at once
        (computation(1, [], 5), computation(2, [], 5), collective(3, [1, 2])),
        # the last computation waits for one of two collectives
        (computation(1, [], 5), collective(2, [1]), collective(3, [1]), computation(4, [2], 5)),
        # two computations after collectives at once
        (collective(1, []), computation(2, [1], 5), computation(3, [1], 5)),
    ],
)
def test_what_no_loop_of_astra_sim_1_does_is_refused(trace: tuple[Node, ...]) -> None:
    with pytest.raises(UsageError, match="has no loop for this workload: each rank computes one thing at a time"):
        workload_file(alike(*trace))


def test_all_ranks_have_one_loop() -> None:
    made = alike(computation(1, [], 5), collective(2, [1]), computation(3, [2], 5), collective(4, [3]))
    assert workload_file(made)[0][0] == "DISTRIBUTED_INFERENCE"
    made.traces[1][2].control_deps = [1]  # one rank computes on, the others wait
    with pytest.raises(UsageError, match="has no loop for this workload"):
        workload_file(made)


def of_two_groups() -> Workload:
    made = workload(group="1")
    made.groups = {"1": [0, 1], "2": [2, 3]}
    for rank in (2, 3):
        next(node for node in made.traces[rank] if node.type == COLL).attributes["pg_name"] = "2"
    return made


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lowered, r"rank 0 node \d+ is a message between two ranks: choose --to chakra or --to goal"),
        (of_two_groups, "rank 0 node 2 is a collective of 2 of 4 ranks"),
    ],
)
@pytest.mark.parametrize("export", [workload_file, param])
def test_files_of_collectives_of_all_ranks_have_nothing_else(
    make: Callable[[], Workload], says: str, export: Callable[[Workload], object]
) -> None:
    with pytest.raises(UsageError, match=f"has collectives of all ranks only, and {says}"):
        export(make())


def test_nothing_is_not_exported() -> None:
    with pytest.raises(UsageError, match="there is no layer to write"):
        workload_file(Workload([[], []]))
    with pytest.raises(UsageError, match="there is nothing for PARAM to replay"):
        param(alike(computation(1, [], 5)))


def test_astra_sim_1_has_four_kinds_of_collectives() -> None:
    with pytest.raises(UsageError, match="rank 0 node 2 is a collective that it does not have, broadcast"):
        workload_file(workload(kind=Collective.BROADCAST))


def test_a_trace_for_param_has_the_elements_of_inputs_and_outputs() -> None:
    kinds = [kind for kind in Collective if kind != Collective.BARRIER]
    trace = [computation(1, [], 1500)]
    trace += [collective(number, [number - 1], kind, 4096) for number, kind in enumerate(kinds, start=2)]
    trace += [collective(11, [10], Collective.BARRIER, 0), computation(12, [11], 2)]
    found, lost = param(alike(*trace))
    sizes = {item["comms"]: (item.get("in_msg_size"), item.get("out_msg_size")) for item in found}
    assert sizes == {
        "all_reduce": (1024, 1024), "reduce": (1024, 1024), "all_gather": (1024, 4096), "gather": (1024, 4096),
        "scatter": (1024, 256), "broadcast": (1024, 1024), "all_to_allv": (1024, 1024), "reduce_scatter": (1024, 256),
        "barrier": (None, None),
    }  # fmt: skip
    assert len(found) == 10
    assert {item["comms"] for item in found if "root" in item} == {"reduce", "gather", "scatter", "broadcast"}
    assert next(item["in_split"] for item in found if "in_split" in item) == [256] * 4
    assert {item.get("dtype", "float") for item in found} == {"float"}
    assert {(item["startTime_ns"], item["world_size"]) for item in found} == {(1_500_000, 4)}
    assert len(lost) == 1
    assert lost[0].endswith("and the 0.002 ms after the last one are left out")


def test_sizes_that_param_cannot_have_are_warned_of() -> None:
    trace = (collective(1, [], size=4099), collective(2, [1], Collective.REDUCE_SCATTER, 4099))
    (whole, divided), lost = param(alike(*trace))
    assert (whole["in_msg_size"], whole["dtype"]) == (4099, "byte")
    assert (divided["in_msg_size"], divided["out_msg_size"]) == (4096, 1024)
    assert lost == ["1 collective has a size that 4 ranks cannot divide, of which PARAM leaves out the remainder"]


# ASTRA-sim 1.0's tables: columns as its CSVWriter and the tutorial's main.cc write them, in us
END_TO_END = (
    ",,fwd compute,wg compute,ig compute,fwd exposed comm,wg exposed comm,ig exposed comm,fwd total comm,"
    "wg total comm,ig total comm,workload finished at,total comp,total exposed comm,\n"
    "allreduce,run one,0.000000,0.001000,0.000000,0.000000,45.681000,0.000000,0.000000,45.681000,0.000000,45.682000,"
    "0.001000,45.681000,\n"
    "conv1,run one,2.500000,0.000000,0.000000,0.000000,0.000000,0.000000,0.000000,0.000000,0.000000,45.682000,,,\n"
    ",,,,,,,,,,,,,,\n"
)
DETAILED = """\
,,queuing delay phase 0,queuing delay phase 1,network delay phase 1,avg chunk delay dimension 1,,
allreduce,run one,0.000000,0.250000,6.430000,45.000000,,
"""
TUTORIAL = """\
Name,TotalTime(us),ComputeTime(us),ExposedCommunicationTime(us),TotalMessageSize(MB)
1MB,45.682000,0.001000,45.681000,1.500000
2MB,91.000000,0.001000,90.999000,3.000000
"""
BACKEND = """\
RunName,CommsTime,ComputeTime,ExposedCommsTime,Cost,TotalPayloadSize,DPCommsTime,MPCommsTime,PayloadSize_Dim0,PayloadSize_Dim1
run one,45.682000,0.001000,45.681000,0.000000,1.500000,45.681000,0.000000,1.500000,-1
"""
DIMENSIONS = """\
RunName,DimensionIndex,AverageChunkLatency
run one,0,45.000000
run one,1,2.500000
"""
# as LogGOPSim prints them for 2 and for more than 16 hosts
LOGGOPSIM = """\
LogGP network backend; size: 2 (1 CPUs, 1 NICs); L=1000000, o=0 g=0, G=320, O=0, P=2, S=2147483647
PERFORMANCE: Processes: 2 \t Events: 5 \t Time: 0 s \t Speed: inf ev/s
Times:\x20
Host 0: 1000000
Host 1: 326999680
"""
LOGGOPSIM_MANY = """\
LogGP network backend; size: 20 (1 CPUs, 1 NICs); L=1000, o=0 g=0, G=1, O=0, P=20, S=65535
PERFORMANCE: Processes: 20 \t Events: 5 \t Time: 0 s \t Speed: inf ev/s
Maximum finishing time at host 7: 34914 (3.4914e-05 s)
"""


def log(tmp_path: Path, text: str) -> Path:
    (tmp_path / "log").write_text(text)
    return tmp_path / "log"


def test_tables_of_astra_sim(tmp_path: Path) -> None:
    found = read_log(log(tmp_path, END_TO_END))
    assert (found.simulator, found.cycles, found.warnings) == ("ASTRA-sim 1.0", 45682, [])
    assert list(found.layers) == ["allreduce", "conv1"]
    # the keys of the log of the same run
    assert found.layers["allreduce"]["weight_grad_comm_cycles"] == 45681
    assert found.layers["allreduce"]["idle_waiting_for_weight_grad_finish_cycles"] == 45681
    assert found.layers["conv1"]["fwd_pass_compute_cycles"] == 2500
    assert read_log(log(tmp_path, BACKEND)).cycles == 45682
    assert read_log(log(tmp_path, BACKEND)).runs["run one"]["message_bytes"] == 3 * 2**19
    runs = read_log(log(tmp_path, TUTORIAL))
    assert (runs.cycles, runs.runs["2MB"]["cycles"]) == (None, 91000)
    assert runs.warnings == ["the table has 2 runs, and so no single time"]
    detailed = read_log(log(tmp_path, DETAILED))
    assert detailed.layers == {"allreduce": {
        "queuing_delay_phase_0_cycles": 0, "queuing_delay_phase_1_cycles": 250, "network_delay_phase_1_cycles": 6430,
    }}  # fmt: skip
    assert detailed.dimensions == [{"run": "run one", "dimension": 0, "chunk_cycles": 45000}]
    assert read_log(log(tmp_path, DIMENSIONS)).dimensions[1] == {"run": "run one", "dimension": 1, "chunk_cycles": 2500}
    assert detailed.sentence(1e-3) == "ASTRA-sim 1.0, without a time until the end, beside 1 ms in ringtap"
    two = END_TO_END.replace("conv1,run one", ",run two")
    assert list(read_log(log(tmp_path, two)).layers) == ["allreduce of run one", "allreduce of run two"]


def test_times_of_loggopsim(tmp_path: Path) -> None:
    found = read_log(log(tmp_path, LOGGOPSIM))
    assert (found.simulator, found.cycles, found.ranks[0]["cycles"]) == ("LogGOPSim", 326999680, 1000000)
    many = read_log(log(tmp_path, LOGGOPSIM_MANY))
    assert (many.cycles, list(many.ranks)) == (34914, [7])
    found.check_ranks(2, 0, "log")
    many.check_ranks(20, 0, "log")  # of which it has only the last one


# what the programs print for a collective that one rank leaves out, and for a receive with another tag: exit code 0
DEADLOCK_ASTRA_2 = """\
[workload] [info] sys[1] finished, 384385384 cycles, exposed communication 28385384 cycles.
[statistics] [info] sys[1]. Post statistics processing end.
"""
DEADLOCK_FEEDER_3 = """\
[HardwareResource] [critical] !!!Hardware Resource sys.id=0 has unreleased nodes!!!
[HardwareResource] [critical] GPU comm node id: 13
[HardwareResource] [critical] !!!Hardware Resource sys.id=2 has unreleased nodes!!!
"""
DEADLOCK_LOGGOPSIM = """\
PERFORMANCE: Processes: 4 \t Events: 6 \t Time: 0 s \t Speed: inf ev/s
unexpected queue on host 1 contains 1 elements!
 src: 0, tag: 0
receive queue on host 1 contains 1 elements!
 src: 0, tag: 9
receive queue on host 3 contains 1 elements!
"""
ASTRA_1 = """\
total nodes: 4
all passes finished at time: 45681, id of first layer: allreduce
Total streams injected: 4
Total streams finished: 4
"""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (DEADLOCK_ASTRA_2, "rank 0 of 2 did not finish"),
        (DEADLOCK_FEEDER_3 + DEADLOCK_ASTRA_2, "ranks 0 and 2 of 3 did not finish"),
        (DEADLOCK_FEEDER_3, "ranks 0, 1 and 2 of 3 did not finish"),
        (
            "".join(f"sys[{rank}] finished, 7 cycles\n" for rank in range(10, 30, 2)),
            "ranks 0, 1, .* 7 and 11 more of 29",
        ),
        (f"sys[0] finished, 7 cycles\n{'x' * 10**6} Node 3 did not finish, start_time=0\n", "time of the workload: 'x"),
        (DEADLOCK_LOGGOPSIM, "messages of ranks 1 and 3 have no counterpart"),
        (DEADLOCK_LOGGOPSIM + LOGGOPSIM, "messages of ranks 1 and 3 have no counterpart"),
        (LOGGOPSIM.replace("Host 1", "Host 7"), "ranks 1, 2, 3, 4, 5 and 6 of 8 did not finish"),
        (LOGGOPSIM.replace("size: 2", "size: 3"), "rank 2 of 3 did not finish"),
        (ASTRA_1.replace("finished: 4", "finished: 3"), "3 of 4 streams of rank 0 finished"),
    ],
)
def test_a_run_that_did_not_finish_has_no_time(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=rf"log is of a run that did not finish, and so has no .*{says}"):
        read_log(log(tmp_path, text))


def test_ranks_of_a_log_are_those_of_the_workload(tmp_path: Path) -> None:
    finished = "".join(f"sys[{rank}] finished, 7 cycles\n" for rank in range(3))
    for text in (
        finished,
        LOGGOPSIM.replace("Host 1", "Host 2") + "Host 1: 7\n",
        ASTRA_1.replace("nodes: 4", "nodes: 3"),
    ):
        found = read_log(log(tmp_path, text.replace("size: 2", "size: 3")))
        assert (found.size, found.warnings) == (3, [])
        found.check_ranks(3, 0, "log")
        found.check_ranks(2, 1, "log")
        with pytest.raises(
            UsageError, match="log: ranks 3 and 4 did not finish, or it is of another workload: it has 3 "
        ):
            found.check_ranks(5, 0, "log")
        with pytest.raises(UsageError, match="log is of another workload: it has 3 ranks, and the workload has 2"):
            found.check_ranks(2, 0, "log")


def test_errors_in_a_log_are_warned_of(tmp_path: Path) -> None:
    text = "sys[0] finished, 7 cycles\n[system] [critical] warning! a callable is removed before call 3\n"
    says = "the log has an error: '[system] [critical] warning! a callable is removed before call 3'"
    assert read_log(log(tmp_path, text)).warnings == [says]


def test_damaged_results_end_in_a_sentence(tmp_path: Path) -> None:
    chooser = random.Random(5)
    refused = 0
    for text in (END_TO_END, DETAILED, TUTORIAL, BACKEND, DIMENSIONS, LOGGOPSIM, LOGGOPSIM_MANY):
        for _ in range(300):
            damaged = bytearray(text.encode())
            for _ in range(chooser.randint(1, 6)):
                damaged[chooser.randrange(len(damaged))] = chooser.choice(b"\x00\xff,9e-.\n")
            (tmp_path / "log").write_bytes(damaged[: chooser.randint(1, len(damaged))])
            try:
                json.dumps(read_log(tmp_path / "log").to_json(), allow_nan=False)
            except UsageError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused > 500


# stands for a simulator: checks its files and arguments, and prints what the test wants
PROGRAM = """\
#!/usr/bin/env python3
import json, sys, time
from pathlib import Path
{body}
"""
ASTRA_BODY = """\
options = dict(argument[2:].split("=") for argument in sys.argv[1:])
prefix = options["workload-configuration"]
assert Path(f"{prefix}.3.et").is_file() and not Path(f"{prefix}.4.et").exists()
assert json.loads(Path(options["comm-group-configuration"]).read_text()) == {}
assert "Switch" in Path(options["network-configuration"]).read_text()
assert json.loads(Path(options["system-configuration"]).read_text())["endpoint-delay"] == 1
assert "NO_MEMORY" in Path(options["remote-memory-configuration"]).read_text()
for rank in range(4):
    print(f"[workload] [info] sys[{rank}] finished, {1000 + rank} cycles, exposed communication 900 cycles.")
"""


def program(path: Path, body: str) -> Path:
    path.write_text(PROGRAM.format(body=body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_longest_chain_is_a_bound_for_every_simulator() -> None:
    rate_bps, latency_s = 8e9, 1e-6  # 1 byte per ns
    # forward, one message with a quarter of the data, optimizer
    chain_ns = 1_000_000 + 1000 + (1 << 18) - 1 + 7000
    assert chain_ns - 1 <= longest_chain_ns(workload(), rate_bps, latency_s) <= chain_ns  # whole ns
    late = workload()
    late.traces[2][0].duration_us = 5000  # on another rank: a collective waits for all
    assert chain_ns + 3_999_999 <= longest_chain_ns(late, rate_bps, latency_s) <= chain_ns + 4_000_000
    late.traces[2][0].type = NodeType.METADATA  # whose recorded duration is no work
    assert chain_ns - 1 <= longest_chain_ns(late, rate_bps, latency_s) <= chain_ns
    # a root does not wait for the others
    assert longest_chain_ns(workload(kind=Collective.BROADCAST), rate_bps, latency_s) == 1_007_000
    # a ring: 2 (N - 1) messages, one after the other
    chain_ns += 5 * (1000 + (1 << 18) - 1)
    assert chain_ns - 6 <= longest_chain_ns(lowered(), rate_bps, latency_s) <= chain_ns
    for each in (workload(), lowered()):
        simulated = simulate(each, star(4, rate_bps), Algorithms(), latency_s=latency_s)
        assert longest_chain_ns(each, rate_bps, latency_s) <= simulated.iteration_s * 1e9
    assert longest_chain_ns(workload(1), rate_bps, latency_s) == 1_007_000
    assert longest_chain_ns(Workload([[], []]), rate_bps, latency_s) == 0


def test_a_run_that_ends_before_the_longest_chain_is_warned_of(tmp_path: Path) -> None:
    chain_ns = longest_chain_ns(workload(), 25e9, 1e-5)
    for cycles, says in (
        (chain_ns, []),
        (chain_ns - 1, ["ASTRA-sim 2.x ended after 1.10088 ms, but the longest chain"]),
    ):
        body = f"for rank in range(4):\n    print(f'sys[{{rank}}] finished, {cycles} cycles')"
        astra = program(tmp_path / "astra", body)
        found = run_simulator("astra-sim", astra, workload(), star(4, 25e9), Algorithms(), 1e-5, 30.0)
        assert [text[: len(says[0])] for text in found.warnings] == says


def run(name: str, path: Path, limit_s: float = 30.0, topology: Topology | None = None) -> object:
    return run_simulator(name, path, workload(), topology or star(4, 25e9), Algorithms(), 1e-5, limit_s).cycles


def test_astra_sim_is_run_on_its_export(tmp_path: Path) -> None:
    assert run("astra-sim", program(tmp_path / "astra", ASTRA_BODY)) == 1003


def test_loggopsim_is_run_on_its_schedule(tmp_path: Path) -> None:
    program(tmp_path / "txt2bin", textwrap.dedent("""\
        assert sys.argv[1:] == ["-i", "schedule.goal", "-o", "schedule.bin"]
        text = Path("schedule.goal").read_text()
        assert "calc 1000000000" in text and "send 262144b to 1 tag 0" in text
        Path("schedule.bin").write_text(text)
    """))  # fmt: skip
    simulator = program(tmp_path / "LogGOPSim", textwrap.dedent("""\
        arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
        assert Path(arguments.pop("-f")).is_file()
        assert arguments == {"-L": "10000000", "-G": "320", "-o": "0", "-g": "0", "-O": "0", "-S": "2147483647"}
        for host, time in enumerate((1570000000, 1, 2, 1573500600)):
            print(f"Host {host}: {time}")
    """))  # fmt: skip
    assert run("loggopsim", simulator) == 1573501
    with pytest.raises(UsageError, match="choose --topology star"):
        run("loggopsim", simulator, topology=ring(4, 25e9))
    with pytest.raises(UsageError, match="runs rates of 4 kbit/s to 8 Tbit/s"):
        run("loggopsim", simulator, topology=star(4, 1e14))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", "astra is no log of a finished run of .*; its last line: it printed nothing"),
        ("print('hello'); sys.exit(3)", "failed with exit code 3: hello"),
        ("import os; os.abort()", "failed with signal 6"),
        ("print('x' * 10**6)", "astra is no log of a finished run of .*; its last line: xxx"),
        ("time.sleep(60)", "did not end within 1 s: see --time-limit"),
        ("print('sys[0] finished, 7 cycles')", "astra: ranks 1, 2 and 3 did not finish"),
        (
            "print('sys[0] finished, 7 cycles\\n!!!Hardware Resource sys.id=1 has unreleased nodes!!!')",
            "unreleased nodes",
        ),
    ],
)
def test_a_run_without_a_result_ends_in_a_sentence(tmp_path: Path, body: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        run("astra-sim", program(tmp_path / "astra", body), 1.0 if "sleep" in body else 30.0)


def test_a_program_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere cannot be run: No such file"):
        run("astra-sim", tmp_path / "nowhere")
    (tmp_path / "text").write_text("text")
    with pytest.raises(UsageError, match=r"text cannot be run: Permission denied"):
        run("astra-sim", tmp_path / "text")
    with pytest.raises(UsageError, match=r"txt2bin cannot be run: No such file"):
        run("loggopsim", tmp_path / "LogGOPSim")
