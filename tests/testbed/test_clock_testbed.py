"""Clocks over the testbed: all hosts have one kernel, so the true offset is 0 and every measurement is judged."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ringtap.agents.hosts import TestbedHosts
from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.core.run_directory import RunDirectory, read_json
from tests.unit.agent_processes import wait_for

pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]
# the queue holds 32 ms of the link's rate
SPEC = {"hosts": ("S0", "S1", "S2"), "rate_bps": 100_000_000, "queue_bytes": 400_000}
KEEPER = (
    "import json, signal, sys\n"
    "from pathlib import Path\n"
    "from ringtap.agents.clock.measure_clock_offset import ClockService\n"
    "from ringtap.core.run_directory import RunDirectory\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
    "keeper = ClockService(RunDirectory.open(Path(sys.argv[1])), sys.argv[2], period_s=0.5)\n"
    "keeper.start()\n"
    "print('up', flush=True)\n"
    "signal.sigwait({signal.SIGTERM})\n"
    "print(json.dumps(keeper.stop()))\n"
)
DRAIN = (
    "import socket\n"
    "server = socket.create_server(('0.0.0.0', 7000))\n"
    "taken, _ = server.accept()\n"
    "received = 0\n"
    "while data := taken.recv(1 << 20):\n"
    "    if received < 4_000_000 <= (received := received + len(data)):\n"
    "        print('the queue has been full', flush=True)\n"
)
BLAST = "import socket\nsock = socket.create_connection(('S0', 7000))\nwhile True:\n    sock.sendall(bytes(1 << 18))\n"


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def wait_for_measurements(run: RunDirectory, node: str, count: int, since_bytes: int = 1024) -> int:
    """By the log of pings, whose size is returned: clock.json is written now and then only."""
    path = run.path / "nodes" / node / "clock" / "pings.rec"
    end_s = time.monotonic() + 40
    while time.monotonic() < end_s:
        if path.exists() and (size := path.stat().st_size) > since_bytes + count * 20 * 53:
            return size
        time.sleep(0.1)
    raise AssertionError(f"{node} measured too little: {path.stat().st_size if path.exists() else 'nothing'}")


def judge(run: RunDirectory, node: str) -> dict[str, Any]:
    item = read_json(run.path / "nodes" / node / "clock" / "clock.json")
    assert len(item["measurements"]) >= 3, item["reason"]
    for one in item["measurements"]:
        assert abs(one["offset_ns"]) <= one["error_ns"], one
        assert one["error_ns"] == one["round_trip_ns"] // 2 + 1
    for part in item["measured"]:
        for t_ns in (part["from_ns"], part["to_ns"]):
            offset_ns = part["offset_ns"] + part["drift_ppm"] * 1e-6 * (t_ns - part["t0_ns"])
            assert abs(offset_ns) <= part["error_ns"], part
    assert (item["source"], item["fit"]["offset_ns"], item["fit"]["error_ns"]) == ("same kernel", 0, 0)
    assert item["kernel_stamps"]
    return dict(item)


def keep(hosts: TestbedHosts, run: RunDirectory, node: str) -> Any:
    (run.path / "reference").write_text("S0\n")
    return hosts.start(node, "keeper", python(KEEPER, str(run.path), node), run.path / f"{node}.log")


def test_three_hosts_agree_within_the_published_error_idle_and_with_a_queue_on_one_way(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    with RunningTestbed(TestbedSpec(name="clocks", **SPEC), verify=False) as lab:  # type: ignore[arg-type]
        hosts = TestbedHosts(lab.state.spec)
        try:
            keepers = {node: keep(hosts, run, node) for node in ("S0", "S1", "S2")}
            for node in ("S1", "S2"):
                wait_for_measurements(run, node, 3)
            # S1's uplink fills its queue; S2's does not, but S0's port is shared by both
            drain = hosts.start("S0", "drain", python(DRAIN), tmp_path / "drain.log")
            assert hosts.wait_for_port("S0", 7000, drain)
            hosts.start("S1", "blast", python(BLAST), tmp_path / "blast.log")
            wait_for(lambda: drain.last_words() == "the queue has been full", 40)
            sizes = {node: wait_for_measurements(run, node, 0) for node in ("S1", "S2")}
            for node, size in sizes.items():
                wait_for_measurements(run, node, 3, size)
            for node in ("S1", "S2"):
                keepers[node].ask_to_stop()
            for node in ("S1", "S2", "S0"):
                assert keepers[node].stop() == 0, keepers[node].last_words()
        finally:
            hosts.stop_all()
    first, second = judge(run, "S1"), judge(run, "S2")
    trips = [one["round_trip_ns"] for one in first["measurements"]]
    assert max(trips) > 5 * min(trips), "the queue was there"
    # what was measured before the queue stood keeps the error of the whole small
    assert first["measured"][0]["error_ns"] < max(trips) / 4
    assert {one["phase"] for one in second["measurements"]} >= {"before", "during"}
    assert read_json(run.path / "nodes/S0/clock/clock.json")["pings_answered"] >= 120
    server = read_json(run.path / "nodes/S0/clock/server.json")
    assert "token" not in server


def test_a_host_alone_listens_nowhere(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path / "run", "job", [], 0)
    with RunningTestbed(TestbedSpec(name="alone", **SPEC), verify=False) as lab:  # type: ignore[arg-type]
        hosts = TestbedHosts(lab.state.spec)
        try:
            keeper = keep(hosts, run, "S0")
            wait_for(lambda: keeper.last_words() == "up", 40)
            time.sleep(2)
            enter = [sys.executable, "-m", "ringtap.agents.testbed.run_on_host", "alone", "S0"]
            tables = ["cat", "/proc/net/udp", "/proc/net/udp6"]
            shown = subprocess.run([*enter, *tables], capture_output=True, text=True, check=True).stdout
            assert not [line for line in shown.splitlines() if line.split()[0][:-1].isdigit()]
            assert keeper.stop() == 0
        finally:
            hosts.stop_all()
    assert json.loads(keeper.log.read_text().splitlines()[-1])["source"] == "this node is the reference"
