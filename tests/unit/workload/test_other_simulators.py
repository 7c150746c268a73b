"""Exports to other simulators, runs of their programs, and their results."""

from __future__ import annotations

import json
import os
import random
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.errors import UsageError
from ringtap.flow_plan import FLOW_LIST_COLUMNS
from ringtap.trafficgen.plans.common import Frame
from ringtap.trafficgen.plans.hpcc import FlowListPlan
from ringtap.workload.astra_sim import write_astra_sim
from ringtap.workload.execution_trace import Collective, Node, NodeType, read_trace
from ringtap.workload.export import goal, hpcc
from ringtap.workload.lowering import Algorithms, lower
from ringtap.workload.simulated_iterations import simulate
from ringtap.workload.simulator_logs import read_log
from ringtap.workload.simulator_programs import run_simulator
from ringtap.workload.topologies import Topology, fat_tree, leaf_spine, ring, star, torus
from ringtap.workload.workload import Workload, check_workload, messages_of, read_workload, size_of

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
    # scripts/prepare.sh installs mlc-chakra there
    paths = [str(Path(sys.prefix) / "mlc-chakra"), *filter(None, [os.environ.get("PYTHONPATH")])]
    made = workload()
    made.groups = {"all": [0, 1, 2, 3]}
    for name, one in (("collective", made), ("lowered", lowered())):
        write_astra_sim(one, ring(4, 1e9), "ring", 0.0, tmp_path / name)
        source, destination = tmp_path / name / "rank.1.et", tmp_path / f"{name}.json"
        command = [sys.executable, "-m", "chakra.src.jsonizer.jsonizer"]
        command += [f"--input_filename={source}", f"--output_filename={destination}"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
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
            assert [int(dep) for dep in item.get("dataDeps", [])] == node.data_deps
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
    count, *lines = hpcc(made, simulated)
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
    halves = list(hpcc(made, simulate(made, star(2, 8e9), Algorithms(), ranks_per_host=2), 2))
    assert len(halves) == 1 + 12
    with pytest.raises(UsageError, match="no message of the workload goes from one host to another"):
        list(hpcc(made, simulate(made, star(1, 8e9), Algorithms(), ranks_per_host=4), 4))


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
    lines = list(hpcc(made, simulate(made, star(made.ranks, 8e9), Algorithms())))
    nodes = [f"10.0.0.{rank + 1}:100" for rank in range(made.ranks)]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "flows"
        path.write_text("".join(f"{line}\n" for line in lines))
        flows = list(FlowListPlan(path, Frame(0, nodes, [node.split(":")[0] for node in nodes]), nodes).flows())
    graph = algorithms.graph(kind, ranks, size_bytes)
    sent = [sum(flow.size_bytes for flow in flows if flow.source == node.split(":")[0]) for node in nodes]
    assert sent[: graph.endpoints] == graph.sent_bytes.tolist()


def test_schedules_have_no_message_of_zero_bytes() -> None:
    made = lower(workload(kind=Collective.BARRIER), Algorithms())
    made.traces[0][0].duration_us = 3
    text = "\n".join(goal(made, 10**6))
    assert "send 0b" not in text
    assert "calc 3000000" in text


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
    queue = "unexpected queue on host 1 contains 2 elements!\n"
    assert read_log(log(tmp_path, queue + LOGGOPSIM)).warnings == [f"{queue[:-2]} that no rank matches"]
    with pytest.raises(UsageError, match="of a run that did not finish: unexpected queue on host 1"):
        read_log(log(tmp_path, queue))


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
        print("Host 0: 1570000000\\nHost 3: 1573500600")
    """))  # fmt: skip
    assert run("loggopsim", simulator) == 1573501
    with pytest.raises(UsageError, match="choose --topology star"):
        run("loggopsim", simulator, topology=ring(4, 25e9))
    with pytest.raises(UsageError, match="runs rates of 4 kbit/s to 8 Tbit/s"):
        run("loggopsim", simulator, topology=star(4, 1e14))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", "printed no result: it printed nothing"),
        ("print('hello'); sys.exit(3)", "failed with exit code 3: hello"),
        ("import os; os.abort()", "failed with signal 6"),
        ("print('x' * 10**6)", "printed no result: xxx"),
        ("time.sleep(60)", "did not end within 1 s: see --time-limit"),
        ("print('sys[0] finished, 7 cycles')", "1 of 4 ranks finished"),
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
