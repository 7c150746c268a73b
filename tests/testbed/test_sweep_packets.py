"""Packets of a sweep on the real testbed: recorded at a load, bounded, and equal to what others count."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import read_json_lines
from tests.testbed.sweeps import SMALL, run
from tests.unit.agent_processes import ended, wait_for

pytestmark = [pytest.mark.shares, pytest.mark.together("sweeps"), pytest.mark.usefixtures("unchanged_machine")]
CAPTURED = SMALL.format(capacity="25gbit").replace("loads = [0, 0.7]", "loads = [0, 0.6]\ncapture = [0.6]")
CAPTURED = CAPTURED.replace('["iperf"]', '["consistent"]').replace('"small"\nscale', '"captured"\nscale')
# sockets are sampled every 20 ms, later on a busy machine: what a sample at either end misses is 1 % of 40 iterations
# of 70 ms, and was 4 % of 6
CAPTURED += "\n[capture]\niterations = 40\n"


@pytest.mark.alone(1)
def test_packets_are_recorded_after_the_window_and_agree_with_other_counts(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.toml", tmp_path / "run"
    plan.write_text(CAPTURED)
    dry = json.loads(run("sweep", plan, "--dry-run", "--json").stdout)
    done = run("sweep", plan, "-o", out, "--force")
    assert done.returncode == 0, done.stderr
    alone, loaded = read_json_lines(out / "points.jsonl")[0]
    assert "packets_start_ns" not in alone
    assert loaded["packets_why"] == ""
    assert loaded["window_end_ns"] < loaded["packets_start_ns"] < loaded["packets_end_ns"]
    nodes = out / loaded["directory"] / "nodes"
    found = {path.parent.parent.name: json.loads(path.read_text()) for path in nodes.glob("*/packets/001-*.json")}
    assert {node: facts["interface"] for node, facts in found.items()} == {
        "switch": "to-S0",
        "S0": "eth0",
        "S2": "eth0",
        "S3": "eth0",
    }
    assert {facts["ended"] for facts in found.values()} == {"as asked"}
    assert sum(facts["dropped_by_kernel"] for facts in found.values()) == 0
    assert not list(nodes.glob("*/.packets*")), "the folders of the recording are gone"
    size = sum(path.stat().st_size for path in nodes.glob("*/packets/*.pcap"))
    assert 0 < size < dry["packets_bytes"]

    report = run("report", out)
    assert report.returncode == 0, report.stderr
    (item,) = json.loads((out / "report" / "report.json").read_text())["packets"]
    assert item["iterations"] >= 40
    roles = [(flow["source"], flow["destination"], flow["captured_on"]) for flow in item["flows"]]
    assert roles == [("S3", "S1", "S3"), ("S1", "S0", "S0"), ("S2", "S0", "S2")]
    counts = item["bytes"]
    assert counts["reasons"] == {}
    assert counts["agree"], item["agreement"]
    # gloo's headers, and nothing else
    assert 0 < counts["header_share"] < 0.02
    assert item["agreement"] in report.stdout
    names = {path.stem for path in (out / "report" / "figures").glob("packets-*.png")}
    assert names == {"packets-histogram", "packets-flows", "packets-trace"}


@pytest.mark.needs_root("capture packets here")
def test_a_recording_that_is_full_ends_early_and_keeps_its_packets(tmp_path: Path) -> None:
    item = {"folder": str(tmp_path), "part": "001", "interfaces": ["lo"], "most_bytes": "1000", "filter": "udp"}
    command = [sys.executable, "-m", "ringtap.agents.node.packet_recorder_process", json.dumps(item)]
    with ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "recording packets\n"
        with socket.socket(type=socket.SOCK_DGRAM) as sender:
            for _ in range(50):
                sender.sendto(bytes(100), ("127.0.0.1", 9))
        # the size is looked at once a second; the files move to their place at the end
        told = tmp_path / ".packets-001" / "packets" / "001-lo.json"
        wait_for(lambda: json.loads(told.read_text())["ended"])
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "its files reached" in errors
    facts = json.loads((tmp_path / "packets" / "001-lo.json").read_text())
    assert facts["ended"].startswith("early: its files reached")
    assert (tmp_path / "packets" / "001-lo-0.pcap").stat().st_size > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["packets"]
