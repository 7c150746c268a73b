"""Bytes of a real DDP job by the join: against equation 3.1, and sockets, counters and packets against each other."""

import json
import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.analysis.model.bytes_per_iteration import demand
from tests.frameworks.ranks import quick

pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]
RINGTAP = [sys.executable, "-m", "ringtap.cli"]
SCALE_MODEL = str(Path(__file__).resolve().parents[2] / "examples" / "scale_model.py")
# what a job moved until all connections were asked for is spread over 0.3 s: half an iteration or two of so many
PARAMETERS, ITERATIONS = 1_383_574, 60
SHORT_ITERATIONS = 120
JOBS = Path(__file__).resolve().parents[1] / "frameworks" / "jobs"
COLLECT = ["--every", "10ms", "--collect", "default,packets"]
# gloo puts 48 bytes before each of its messages (gloo/transport/tcp/pair.h: Op::preamble)
GLOO_MESSAGE_BYTES = 48


def analyze(run: Path) -> dict[str, Any]:
    found = subprocess.run(
        [*RINGTAP, "analyze", str(run), "--json"], capture_output=True, text=True, check=True, timeout=120
    )
    data: dict[str, Any] = json.loads(found.stdout)
    return data


def check_demand(data: dict[str, Any], workers: int) -> None:
    """Within 1 % of equation 3.1, from above: what is more are gloo's own headers."""
    asked = demand(PARAMETERS, workers).worker_bytes
    assert data["demand"]["expected_bytes"] == pytest.approx(asked)
    assert data["demand"]["sent_bytes"] == pytest.approx(asked, rel=0.01)
    assert all(row["sent_bytes"] == pytest.approx(asked, rel=0.01) for row in data["ranks_table"])


def check_sides(data: dict[str, Any], nodes: set[str], path: str) -> None:
    """Packets and interface counters within 2 % of the sockets."""
    accounts = [one for one in data["byte_accounts"] if one["path"] == path and one["node"] in nodes]
    assert {one["node"] for one in accounts} == nodes
    for wire in accounts:
        assert abs(wire["nic_difference"]) < 0.02, wire
        assert abs(wire["packets_difference"]) < 0.02, wire
        assert 0 < wire["overhead_share"] < 0.1, wire
    moved = data["bytes"]["classes"]["training"]
    assert abs(moved["difference"]) < 0.02, moved


@pytest.mark.alone(1)
@pytest.mark.needs_root("capture packets of lo")
def test_two_ranks_over_loopback(tmp_path: Path) -> None:
    run = tmp_path / "run"
    job = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCALE_MODEL]
    job += ["--parameters", str(PARAMETERS), "--iterations", str(SHORT_ITERATIONS), "--compute-s", "0.1"]
    command = [*RINGTAP, "run", *COLLECT, "--interface", "lo", "-o", str(run), "--", *job]
    done = subprocess.run(command, env=os.environ | quick(), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    data = analyze(run)
    assert (data["iterations"]["count"], data["run"]["ranks"]) == (SHORT_ITERATIONS, 2)
    check_demand(data, 2)
    nodes = set(data["run"]["nodes"])
    check_sides(data, nodes, "loopback")
    check_packets_iteration_by_iteration(run)
    check_slice(run, SHORT_ITERATIONS // 2, tmp_path / "slice.pcapng")
    # who talks to whom
    between = [flow for flow in data["flows_table"] if flow["why"] == "rank to rank"]
    assert {(flow["source_rank"], flow["destination_rank"]) for flow in between} == {(0, 1), (1, 0)}


def check_packets_iteration_by_iteration(run: Path) -> None:
    """Packets have no sampling: an iteration's payload is the gradients and gloo's headers, but for what is resent."""
    table = pd.read_parquet(run / "derived" / "iterations.parquet")
    table = table[~table["warm_up"] & (table["retransmissions"] == 0)]
    beyond = (table["packet_training_bytes"] - 2 * demand(PARAMETERS, 2).worker_bytes).median()
    assert 0 < beyond < 0.005 * 2 * demand(PARAMETERS, 2).worker_bytes
    assert beyond % GLOO_MESSAGE_BYTES == 0


def check_slice(run: Path, iteration: int, path: Path) -> None:
    """The slice of an iteration holds what tshark counts between its borders, and the payload of the analysis."""
    cut = [*RINGTAP, "packets", str(run), "--iteration", str(iteration), "-o", str(path)]
    subprocess.run(cut, check=True, capture_output=True, timeout=60)
    row = pd.read_parquet(run / "derived" / "iterations.parquet").iloc[iteration]
    begin, end = (f"{row[name] // 10**9}.{row[name] % 10**9:09d}" for name in ("start_ns", "end_ns"))
    within = f"frame.time_epoch >= {begin} && frame.time_epoch < {end}"
    expected = [line for capture in run.glob("nodes/*/packets/*.pcap") for line in fields(capture, "-Y", within)]
    expected.sort(key=lambda line: line[0])  # as the slice: the kernel may capture on two cores in another order
    assert len(expected) > 100
    found = fields(path)
    assert [line[:4] for line in found] == [line[:4] for line in expected]
    # each byte once: a busy machine's kernel resends over loopback, too
    payload = sum(int(line[3] or 0) for line in expected if not line[5])
    assert payload == sum(row[f"packet_{kind}_bytes"] for kind in ("training", "cross", "other"))
    comments = [line[4] for line in found if line[4]]
    (node,) = (folder.name for folder in run.glob("nodes/*"))
    who = f"packet here: node {node}, ranks 0, 1"
    assert comments == [f"iteration {iteration}, {end} {who}" for end in ("first", "last")]


def fields(path: Path, *only: str) -> list[list[str]]:
    """Time, lengths, TCP payload, comment and repetition of each packet of a file, as tshark shows them."""
    names = (
        "frame.time_epoch",
        "frame.len",
        "frame.cap_len",
        "tcp.len",
        "frame.comment",
        "tcp.analysis.retransmission",
    )
    command = ["tshark", "-n", "-r", str(path), "-T", "fields", "-E", "separator=|", *only]
    command += [word for name in names for word in ("-e", name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return [line.split("|") for line in done.stdout.splitlines()]


@pytest.mark.alone(1)
def test_three_ranks_on_three_hosts_under_cross_traffic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGTAP_TOKEN", "t")  # a receiver beyond loopback asks for one
    run = tmp_path / "run"
    spec = TestbedSpec("joined", ("S0", "S1", "S2"), 250_000_000)
    with RunningTestbed(spec, verify=False):
        started: list[subprocess.Popen[str]] = []

        def start(host: str, *command: str, **more: str) -> "subprocess.Popen[str]":
            enter = [sys.executable, "-m", "ringtap.agents.testbed.run_on_host", "joined", host, *command]
            output = (tmp_path / f"{host}-{len(started)}.txt").open("w")
            process = subprocess.Popen(enter, stdout=output, stderr=subprocess.STDOUT, text=True, env=os.environ | more)
            output.close()
            started.append(process)
            return process

        try:
            start("S0", *RINGTAP, "traffic", "serve", "--bind", f"{spec.cross_ip('S0')}:5001")
            plan = tmp_path / "flows.plan"
            load = ["--kind", "consistent", "--load", "20mbit", "--duration", "40s", "--scale", "100"]
            load += ["--to", f"{spec.cross_ip('S0')}:5001"]
            subprocess.run([*RINGTAP, "traffic", "plan", *load, "-o", str(plan)], check=True, capture_output=True)
            jobs = [start_rank(start, spec, rank, run) for rank in range(3)]
            wait_for_steps(run)
            sender = ["--source", spec.cross_ip("S1")]
            start("S1", *RINGTAP, "traffic", "send", str(plan), *sender)
            for job in jobs:
                assert job.wait(120) == 0, [path.read_text()[-2000:] for path in tmp_path.glob("*.txt")]
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait(20)
    data = analyze(run)
    assert (data["iterations"]["count"], data["run"]["ranks"]) == (ITERATIONS, 3)
    check_demand(data, 3)
    check_sides(data, {"S0", "S1", "S2"}, "network")
    assert data["bytes"]["classes"]["cross"]["sockets"] > 100_000
    between = [flow for flow in data["flows_table"] if flow["why"] == "rank to rank" and flow["payload_bytes"] > 1e6]
    assert {flow["measured_at"] for flow in between} == {"sender"}
    assert not any(flow["local"] for flow in between)


def start_rank(start: Any, spec: TestbedSpec, rank: int, run: Path) -> "subprocess.Popen[str]":
    """One rank as a launcher would start it: its environment says who it is."""
    host = spec.hosts[rank]
    job = [sys.executable, SCALE_MODEL, "--parameters", str(PARAMETERS), "--iterations", str(ITERATIONS)]
    environment = {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": spec.training_ip("S0"), "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0"}
    command = [*RINGTAP, "run", *COLLECT, "--interface", "eth0", "--join", str(run), "--node", host, "--", *job]
    found: subprocess.Popen[str] = start(host, *command, **environment, **quick())
    return found


def wait_for_steps(run: Path) -> None:
    end_s = time.monotonic() + 60
    while not any(run.glob("nodes/*/steps/*.rec")):
        assert time.monotonic() < end_s, "no rank stepped"
        time.sleep(0.1)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_given_in_code(tmp_path: Path, workers: int) -> None:
    """torch.multiprocessing.spawn sets no RANK: ranks and their number are those of the process group."""
    run = tmp_path / "run"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    job = [sys.executable, str(JOBS / "spawned_ddp.py"), "--port", str(port), "--workers", str(workers)]
    command = [*RINGTAP, "run", "--every", "20ms", "-o", str(run), "--", *job]
    done = subprocess.run(command, env=os.environ | quick(), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    data = analyze(run)
    gradient_bytes = int(done.stdout.split("gradients ")[1].split()[0])
    assert (data["run"]["ranks"], data["demand"]["ranks"], data["iterations"]["count"]) == (2, 2, 100)
    assert data["demand"]["expected_bytes"] == gradient_bytes  # 2(N-1)/N of them, for two ranks
    assert abs(data["demand"]["difference"]) < 0.01
    between = [flow for flow in data["flows_table"] if flow["why"] == "rank to rank" and flow["payload_bytes"] > 1e6]
    assert {(flow["source_rank"], flow["destination_rank"]) for flow in between} == {(0, 1), (1, 0)}
    assert [row["cpu_cores"] > 0 for row in data["ranks_table"]] == [True, True]


def test_processes_without_a_process_group(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [*RINGTAP, "run", "-o", str(run), "--", sys.executable, str(JOBS / "hogwild.py")]
    done = subprocess.run(command, env=os.environ | quick(), capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    data = analyze(run)
    assert data["iterations"]["restarts"] == 0
    assert sorted(one["steps"] for one in data["training_phases"]) == [60, 80, 100]
    (shown,) = (one for one in data["training_phases"] if one["shown"])
    assert shown["iterations_s"] == max(one["iterations_s"] for one in data["training_phases"])
    assert data["iterations"]["count"] == shown["steps"] - 1


STEPPING = """
import os, ringtap, time
time.sleep(float(os.environ["PAUSE_S"]))
for _ in range(20):
    time.sleep(0.01)
    ringtap.step()
"""


@pytest.mark.parametrize(("between", "restarts"), [("&", 0), (";", 1)])
def test_processes_that_step_one_after_the_other(tmp_path: Path, between: str, restarts: int) -> None:
    """Begun together, they are two processes; begun one after the other, a job that was started again."""
    run = tmp_path / "run"
    program = shlex.join([sys.executable, "-c", STEPPING])
    first_s = 1 if between == "&" else 0  # the other one has begun by then
    both = f"PAUSE_S={first_s} {program} {between} PAUSE_S=3 {program} & wait"
    command = [*RINGTAP, "run", "-o", str(run), "--", "sh", "-c", both]
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    data = analyze(run)
    assert data["iterations"]["restarts"] == restarts
    assert len(data["training_phases"]) == (1 if restarts else 2)
