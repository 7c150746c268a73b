"""Structure from packets alone: real DDP jobs on the testbed, captured by tcpdump, against their step logs."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.analysis.model.bytes_per_iteration import demand
from tests.unit.agent_processes import wait_for

pytestmark = [pytest.mark.alone(1), pytest.mark.usefixtures("unchanged_machine")]
RINGTAP = [sys.executable, "-m", "ringtap.cli"]
SCALE_MODEL = str(Path(__file__).resolve().parents[2] / "examples" / "scale_model.py")
PARAMETERS = 276_715  # VGG-16 over 500
HOSTS = ("S0", "S1", "S2", "S3", "S4")
SPEC = TestbedSpec("structure", HOSTS, 250_000_000)


@dataclass
class Processes:
    """Programs on hosts of the testbed, ended with the test."""

    folder: Path
    started: list["subprocess.Popen[str]"] = field(default_factory=list)

    def start(self, host: str, *command: str, **more: str) -> "subprocess.Popen[str]":
        enter = [sys.executable, "-m", "ringtap.agents.testbed.run_on_host", SPEC.name, host, *command]
        with (self.folder / f"{host}-{len(self.started)}.txt").open("w") as output:
            process = subprocess.Popen(enter, stdout=output, stderr=subprocess.STDOUT, text=True, env=os.environ | more)
        self.started.append(process)
        return process

    def listen(self, host: str, *command: str) -> None:
        """Start a program, and wait until it says that it listens."""
        output = self.folder / f"{host}-{len(self.started)}.txt"
        process = self.start(host, *command)
        wait_for(lambda: "listening on" in output.read_text() or process.poll() is not None, 60)
        assert process.poll() is None, output.read_text()

    def train(self, run: Path, hosts: tuple[str, ...], iterations: int) -> list["subprocess.Popen[str]"]:
        """A rank on each host, packets recorded on all of them."""
        job = [sys.executable, SCALE_MODEL, "--parameters", str(PARAMETERS), "--bucket-bytes", "100000"]
        job += ["--compute-s", "0.1", "--iterations", str(iterations)]
        collect = ["--collect", "steps,ddp,sockets,packets", "--interface", "eth0"]
        jobs = []
        for rank, host in enumerate(hosts):
            environment = {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            environment |= {"MASTER_ADDR": SPEC.training_ip(hosts[0]), "MASTER_PORT": "29511"}
            environment["GLOO_SOCKET_IFNAME"] = "eth0"
            command = [*RINGTAP, "run", *collect, "--join", str(run), "--node", host, "--", *job]
            jobs.append(self.start(host, *command, **environment))
        return jobs

    def finish(self, jobs: list["subprocess.Popen[str]"]) -> None:
        for job in jobs:
            assert job.wait(120) == 0, [path.read_text()[-2000:] for path in self.folder.glob("*.txt")]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with RunningTestbed(SPEC, verify=False):
        running = Processes(tmp_path)
        try:
            yield running
        finally:
            for process in reversed(running.started):
                process.terminate()
                process.wait(20)


def structure(*words: str) -> dict[str, Any]:
    done = subprocess.run([*RINGTAP, "structure", *words, "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    data: dict[str, Any] = json.loads(done.stdout)
    return data


def check(data: dict[str, Any], iterations: int, workers: int) -> None:
    steps = data["steps"]
    assert data["period"]["verdict"] in ("sure", "likely")
    # but for the first, and the second may begin before a silence has been seen
    assert iterations - 2 <= steps["iterations"] <= iterations - 1
    assert (steps["missed"], steps["extra"]) == (0, 0)
    # of 5 s: behind cross traffic, each of both ends may be 50 ms after the call of DDP's log
    assert abs(steps["period_error"]) < 0.02
    # of the begin of communication by DDP's own log: a bin of 1 ms, and the way from the call to the first packet
    assert abs(steps["boundary_median_s"]) < 0.005
    asked = demand(PARAMETERS, workers).worker_bytes
    # from above: gloo's headers are payload of TCP, and nothing is taken off
    assert 1 < data["volume"]["worker_bytes"] / asked < 1.02
    assert data["volume"]["parameters_least"] < PARAMETERS < data["volume"]["parameters"]


def test_a_ring_of_four(processes: Processes, tmp_path: Path) -> None:
    run, hosts = tmp_path / "run", HOSTS[:4]
    processes.finish(processes.train(run, hosts, 40))
    data = structure(str(run))
    check(data, 40, 4)
    # gloo's ring goes from each rank to the one before it
    assert data["shape"]["name"] == "ring"
    assert data["shape"]["hosts"] == ["S0", "S3", "S2", "S1"]
    assert data["shape"]["whole"]
    # from one host's packets alone: its neighbours, and no more
    one = structure(str(run / "nodes" / "S2" / "packets" / "eth0-0.pcap"))
    ends = [SPEC.training_ip(host) for host in ("S3", "S2", "S1")]
    assert (one["shape"]["name"], one["shape"]["hosts"]) == ("member of a ring", ends)
    assert one["period"]["mean_s"] == pytest.approx(data["period"]["mean_s"], rel=0.01)
    assert one["volume"]["parameters_least"] < PARAMETERS < one["volume"]["parameters_most"]


def test_a_ring_of_three_under_cross_traffic(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGTAP_TOKEN", "t")  # a receiver beyond loopback asks for one
    run, hosts = tmp_path / "run", HOSTS[:3]
    end = f"{SPEC.cross_ip('S0')}:5001"
    processes.listen("S0", *RINGTAP, "traffic", "serve", "--bind", end)
    plan = tmp_path / "flows.plan"
    load = ["--kind", "consistent", "--load", "120mbit", "--duration", "90s", "--scale", "100", "--to", end]
    subprocess.run([*RINGTAP, "traffic", "plan", *load, "-o", str(plan)], check=True, capture_output=True)
    processes.start("S4", *RINGTAP, "traffic", "send", str(plan), "--source", SPEC.cross_ip("S4"))
    processes.finish(processes.train(run, hosts, 40))
    data = structure(str(run))
    check(data, 40, 3)
    assert (data["shape"]["name"], data["shape"]["hosts"]) == ("ring", ["S0", "S2", "S1"])
    roles = {row["role"]: row for row in data["flows"]}
    crossing = roles["cross traffic"]
    assert (crossing["source"], crossing["destination"]) == (SPEC.cross_ip("S4"), "S0")
    shared, only = roles["training beside cross traffic"], roles["training only"]
    assert (shared["source"], shared["destination"]) == ("S1", "S0")
    assert only["destination"] != "S0"
    # both carry the same gradients; the cross traffic is what was asked for, but for what the link did not let pass
    assert shared["bytes_per_iteration"] == pytest.approx(only["bytes_per_iteration"], rel=0.02)
    assert 60e6 < crossing["iteration_bps"] < 140e6
    assert data["classes"]["cross"] > data["classes"]["other"]


def test_a_double_tree_of_a_real_job_is_named_from_its_packets(processes: Processes, tmp_path: Path) -> None:
    workers, run = ("S2", "S0", "S1"), tmp_path / "run"
    record = [*RINGTAP, "run", "--collect", "packets", "--interface", "eth0", "--join", str(run), "--node"]
    job = ["--", sys.executable, str(Path(__file__).with_name("double_tree_job.py"))]
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": SPEC.training_ip(workers[0]), "MASTER_PORT": "29512"}
    world |= {"GLOO_SOCKET_IFNAME": "eth0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    ranks = enumerate(workers)
    processes.finish([processes.start(host, *record, host, *job, **world, RANK=str(rank)) for rank, host in ranks])
    shape = structure(str(run))["shape"]
    assert (shape["name"], shape["whole"]) == ("double binary tree", True)
    assert sorted(shape["hosts"]) == sorted(map(SPEC.training_ip, workers))
