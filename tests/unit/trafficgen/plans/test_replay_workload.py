"""Replay of workloads as real traffic: over loopback, each rank at an address of its own."""

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import open_records
from ringtap.core.flow_plan_file import PlanFile
from ringtap.core.flow_plan_format import Flow, Operation
from ringtap.core.thesis_neural_networks import profile_named
from ringtap.traffic import _Readdressed
from ringtap.workload.execution_trace import Node, NodeType
from ringtap.workload.lowering import Algorithms, lower
from ringtap.workload.model_workloads import model_workload
from ringtap.workload.scaling import Scaling, scale
from ringtap.workload.simulate_iterations import simulate
from ringtap.workload.topologies import star
from ringtap.workload.workload import Workload, check_workload, write_workload
from ringtap.workload.workload_to_flow_plan import operations
from tests.unit.agent_processes import ended
from tests.unit.traffic_processes import closed_port, plan_of, rows, send, serving, traffic, wait_until

pytestmark = pytest.mark.shares

MS = 1_000_000
RANKS = 3


def small(ranks: int = RANKS, collective: str = "ring", compute_s: float = 0.04) -> Workload:
    """ResNet-50 with a thousandth of its parameters, as messages."""
    made = scale(model_workload(profile_named("resnet50"), ranks, compute_s * 1000), Scaling(parameters=0.001))
    lowered = lower(made, Algorithms(collective))
    check_workload(lowered)  # puts the nodes in order
    return lowered


def nodes_of(ranks: int) -> list[str]:
    return [f"127.0.0.{rank + 2}:{closed_port().rpartition(':')[2]}" for rank in range(ranks)]


def planned(folder: Path, workload: Workload, iterations: int) -> tuple[Path, list[str]]:
    write_workload(workload, folder / "lowered")
    nodes = nodes_of(workload.ranks)
    words = list(itertools.chain.from_iterable(("--node", node) for node in nodes))
    kind = ("--kind", "workload", "--from", folder / "lowered", "--iterations", iterations)
    traffic("plan", *kind, *words, "-o", folder / "p.plan")
    return folder / "p.plan", nodes


def end_s(found: list[Operation], iterations: int) -> float:
    """The time at which the last rank ends the last iteration, if messages take no time."""
    before: list[int] = []
    for _ in range(iterations):
        now: list[int] = []
        for number, operation in enumerate(found):
            earlier = [(now[other] if other < number else before[other], delay_ns)
                       for other, delay_ns in operation.after if other < number or before]  # fmt: skip
            now.append(max((at_ns + delay_ns for at_ns, delay_ns in earlier), default=0))
        before = now
    return max(before) / 1e9


@pytest.mark.parametrize("collective", ["ring", "halving-doubling", "double-tree", "parameter-server", "in-network"])
def test_operations_take_as_long_as_the_simulation_where_messages_take_no_time(collective: str) -> None:
    workload = small(4, collective)
    found = operations(workload)
    fast = simulate(workload, star(workload.ranks, 1e18), Algorithms(), iterations=3)
    # the simulation counts in whole nanoseconds of messages that take less
    assert end_s(found, 3) == pytest.approx(fast.end_s.max(), rel=1e-4)
    sends = [node for trace in workload.traces for node in trace if node.type == NodeType.COMM_SEND]
    assert len([one for one in found if one.peer >= 0]) == len(sends)


def test_messages_that_cross_are_no_deadlock() -> None:
    def rank(own: int, other: int) -> list[Node]:
        receive = Node(1, "r", NodeType.COMM_RECV, attributes={"comm_src": other, "comm_size": 5})
        return [receive, Node(2, "s", NodeType.COMM_SEND, attributes={"comm_dst": other, "comm_size": 5})]

    workload = Workload([rank(0, 1), rank(1, 0)])
    check_workload(workload)
    assert [one[:3] for one in operations(workload) if one.peer >= 0] == [(0, 1, 5), (1, 0, 5)]
    for trace in workload.traces:
        trace[1].control_deps = [1]
    from ringtap.core.errors import UsageError

    with pytest.raises(UsageError, match="rank 0 node 1 waits for ever"):
        operations(workload)


def test_a_plan_repeats_the_iteration(tmp_path: Path) -> None:
    path, nodes = planned(tmp_path, small(), 4)
    plan = PlanFile(path)
    flows = list(plan.flows())
    count = len(flows) // 4
    assert len(flows) == 4 * count
    assert plan.iterations == 4
    for number, flow in enumerate(flows[count:], count):
        before = flows[number - count]
        assert flow[:4] == before[:4]
        inside = [(after - count, delay_ns) for after, delay_ns in flow.after if after >= number // count * count]
        assert inside == [one for one in before.after if one[0] >= (number // count - 1) * count]
    # a ring sends 2 (N - 1) / N of the gradient
    sent = [sum(flow.size_bytes for flow in flows if flow.source == node.partition(":")[0]) for node in nodes]
    gradient = 4 * 25_557_032 / 1000
    assert sent == [pytest.approx(4 * 2 * 2 / 3 * gradient, rel=0.001)] * 3


def test_a_replay_computes_and_sends_what_the_job_does(tmp_path: Path) -> None:
    path, _ = planned(tmp_path, small(), 6)
    summary, _ = send(path, "--receive", "--log", tmp_path / "s.rec")
    assert summary["finished"] == summary["flows"] == 6 * 60
    assert summary["stopped_by"] == "plan"
    assert summary["iterations"]["count"] == 6
    # 40 ms of computation; sixty messages over loopback take some milliseconds, on a busy machine longer
    lines, messages_s = len(list(PlanFile(path).flows())), [0.0] * 6
    for row in rows(tmp_path / "s.rec"):
        messages_s[row["flow"] * 6 // lines] += (row["finish_ns"] - row["intended_start_ns"]) / 1e9
    assert 0.04 < summary["iterations"]["median_s"] < 0.041 + max(messages_s)
    checked = traffic("verify", path, "--sent", tmp_path / "s.rec", "--json")
    found = json.loads(checked.stdout)
    assert found["flows"]["planned"] == 360
    assert found["load"]["whole"]["over_s"] < 60


def test_ranks_replay_on_hosts_of_their_own(tmp_path: Path) -> None:
    path, nodes = planned(tmp_path, small(), 5)
    command = [sys.executable, "-m", "ringtap", "traffic", "send", path, "--receive", "--json", "--as"]
    hosts = [node.partition(":")[0] for node in nodes]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        started = []
        for host in hosts:
            started.append(stack.enter_context(ended(subprocess.Popen([*command, host], **pipes))))
            time.sleep(0.5)  # a host waits for those that start later, and forgets nothing that they send meanwhile
        found = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0] * 3, found
    summaries = [json.loads(out) for out, _ in found]
    assert [summary["iterations"]["count"] for summary in summaries] == [5] * 3
    assert [summary["flows"] for summary in summaries] == [100] * 3


def test_a_host_that_waits_for_others_ends_when_it_is_told_to(tmp_path: Path) -> None:
    path, nodes = planned(tmp_path, small(), 2)
    command = [
        sys.executable,
        "-m",
        "ringtap",
        "traffic",
        "send",
        path,
        "--receive",
        "--as",
        nodes[0].partition(":")[0],
    ]
    host, _, port = nodes[1].partition(":")
    with (
        socket.create_server((host, int(port))) as other,
        ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)) as process,
    ):
        other.settimeout(60)
        with other.accept()[0]:  # now it looks for the others, of which none answers
            os.kill(process.pid, signal.SIGINT)
            out, errors = process.communicate(timeout=20)  # it would wait for a minute
    assert "Traceback" not in errors
    assert out.startswith("0 iterations")


def test_a_plan_of_a_replay_goes_to_other_nodes(tmp_path: Path) -> None:
    path, nodes = planned(tmp_path, small(), 2)
    others = [f"127.0.0.{rank + 2}:6001" for rank in range(RANKS)]
    readdressed = _Readdressed(PlanFile(path), others)
    to = dict(zip(nodes, others, strict=True)) | {"": ""}
    before = PlanFile(path).flows()
    assert list(readdressed.flows()) == [flow._replace(destination=to[flow.destination]) for flow in before]
    assert readdressed.header["version"] == 3


def test_the_rate_of_a_replay_is_not_known_before(tmp_path: Path) -> None:
    write_workload(small(), tmp_path / "lowered")
    nodes = itertools.chain.from_iterable(("--node", node) for node in nodes_of(3))
    kind = ("--kind", "workload", "--from", tmp_path / "lowered", "--iterations", 2)
    done = traffic("plan", *kind, *nodes, "--summary", "--json")
    assert json.loads(done.stdout)["offered_bps"] is None


def test_a_replay_under_ringtap_run_has_iterations(tmp_path: Path) -> None:
    path, _ = planned(tmp_path, small(), 8)
    words = [sys.executable, "-m", "ringtap"]
    command = [*words, "run", "--collect", "steps", "-o", tmp_path / "run", "--", *words, "traffic", "send", path]
    done = subprocess.run([*command, "--receive"], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    import ringtap

    assert len(ringtap.open_job(tmp_path / "run").iterations) == 7


def test_a_sender_that_has_sent_for_long_ends_when_it_is_told_to(tmp_path: Path) -> None:
    with serving() as serve:
        # for longer than the patience with processes that do not end; then none is outstanding
        flows = [Flow(number * 100 * MS, "", serve.address, 10) for number in range(110)]
        plan, log = plan_of(tmp_path / "p.plan", flows, 90_000 * MS), tmp_path / "s.rec"
        command = [sys.executable, "-m", "ringtap", "traffic", "send", plan, "--json", "--log", log]
        with ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)) as process:
            wait_until(lambda: log.exists() and log.stat().st_size and open_records(log).count == 110, 60)
            os.kill(process.pid, signal.SIGTERM)
            out, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert json.loads(out)["unfinished"] == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("--node", "127.0.0.9:5001"),
            "lowered has 3 ranks, servers and switches among them, but 4 nodes",
        ),
        (("--iterations", "0"), "--iterations 0 is below 1"),
        (("--from", "elsewhere"), "--from names the workload's directory once"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    write_workload(small(), tmp_path / "lowered")
    nodes = itertools.chain.from_iterable(("--node", node) for node in nodes_of(3))
    kind = ("--kind", "workload", "--from", tmp_path / "lowered", "--iterations", 2)
    done = traffic("plan", *kind, *nodes, *change, "-o", tmp_path / "p.plan", expect=2)
    assert words in done.stderr


def test_an_exported_plan_is_the_one_of_the_lowered_workload(tmp_path: Path) -> None:
    path, nodes = planned(tmp_path, small(), 2)
    made = scale(model_workload(profile_named("resnet50"), RANKS, 40), Scaling(parameters=0.001))
    write_workload(made, tmp_path / "w")
    words = [word for node in nodes for word in ("--node", node)]
    command = [sys.executable, "-m", "ringtap", "workload", "export", tmp_path / "w", "--to", "plan", *words]
    command += ["--iterations", "2", "-o", tmp_path / "exported.plan"]
    subprocess.run(command, check=True, capture_output=True)
    assert list(PlanFile(tmp_path / "exported.plan").flows()) == list(PlanFile(path).flows())


def test_collectives_have_to_be_lowered_first(tmp_path: Path) -> None:
    write_workload(model_workload(profile_named("resnet50"), 2), tmp_path / "w")
    nodes = itertools.chain.from_iterable(("--node", node) for node in nodes_of(2))
    done = traffic(
        "plan", "--kind", "workload", "--from", tmp_path / "w", "--iterations", 2, *nodes, "--summary", expect=2
    )
    assert "rank.0.et node 3 is a collective: replace it by messages with ringtap workload lower" in done.stderr
