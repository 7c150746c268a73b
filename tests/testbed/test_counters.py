"""What the counters say came through a bottleneck, against a packet capture of the same seconds."""

import json
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.core.append_only_logs import open_records
from ringtap.core.ethernet import frame_bytes
from tests.unit.traffic_processes import wait_until

pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]
RINGTAP = [sys.executable, "-m", "ringtap.cli"]


def wire_bytes(path: Path, mss: int) -> tuple[int, int]:
    """Frame bytes on the wire and payload bytes of a capture of IPv4 TCP (classic pcap, Ethernet)."""
    data = path.read_bytes()
    offset, wire, payload = 24, 0, 0
    while offset + 16 <= len(data):
        kept, length = struct.unpack_from("<II", data, offset + 8)
        frame = data[offset + 16 : offset + 16 + kept]
        header = 14 + (frame[14] & 15) * 4
        header += (frame[header + 12] >> 4) * 4
        body = length - header
        payload += body
        wire += body + max(1, -(-body // mss)) * header
        offset += 16 + kept
    return wire, payload


@pytest.mark.needs_root("capture packets here")
def test_cross_traffic_is_counted_as_a_capture_counts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 1 %: flows of 17 kB begin and end in a short segment, each of which hides up to one header of 66 bytes."""
    monkeypatch.setenv("RINGTAP_TOKEN", "t")  # a receiver beyond loopback asks for one
    run = tmp_path / "run"
    counters = run / "nodes" / "S0" / "nic" / "nic.rec"
    spec = TestbedSpec("counted", ("S0", "S1"), 50_000_000)
    with RunningTestbed(spec, verify=False):
        enter = [sys.executable, "-m", "ringtap.agents.testbed.run_on_host", "counted"]
        started = []

        def start(host: str, *command: str) -> "subprocess.Popen[bytes]":
            process = subprocess.Popen([*enter, host, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            started.append(process)
            return process

        try:
            capture = tmp_path / "cross.pcap"
            # without this mode the kernel keeps packets for up to a second, and an earlier end loses them
            options = ["--immediate-mode", "-U", "-n", "-s", "96", "-B", "65536", "-Z", "root", "-i", "cross0"]
            dump = start("S0", "tcpdump", *options, "-w", str(capture), "tcp and src host 10.78.0.2")
            recorder = start("S0", *RINGTAP, "record", "-o", str(run), "--node", "S0")
            server = start("S0", *RINGTAP, "traffic", "serve", "--bind", "10.78.0.1:5001")
            for process in (dump, server):
                assert process.stdout is not None
                said = process.stdout.readline()
                assert b"listening on" in said.lower(), said
            wait_until(lambda: counters.exists() and counters.stat().st_size, 30)
            wait_until(lambda: open_records(counters).count)
            plan = tmp_path / "flows.plan"
            arguments = ["--kind", "consistent", "--load", "30mbit", "--duration", "3s", "--scale", "100"]
            arguments += ["--to", "10.78.0.1:5001"]
            subprocess.run([*RINGTAP, "traffic", "plan", *arguments, "-o", str(plan)], check=True, capture_output=True)
            send = start("S1", *RINGTAP, "traffic", "send", str(plan), "--source", "10.78.0.2", "--json")
            assert send.stdout is not None
            *_, said = send.stdout.read().splitlines()  # a warning may come before
            summary = json.loads(said)
            assert send.wait(30) == 0, summary
            assert summary["finished"] == summary["flows"] > 0
            planned = json.loads(plan.read_text().splitlines()[0])["bytes"]
            wait_until(lambda: wire_bytes(capture, 1448)[1] >= planned, 30)
            time.sleep(0.3)  # three periods of the counters
        finally:
            for process in reversed(started):
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                process.wait(10)
                assert process.stdout is not None
                process.stdout.close()
    assert (dump.returncode, recorder.returncode, server.returncode) == (0, 0, 0)
    records = open_records(counters)
    names = [field.name for field in records.fields]
    rows = records.tail()
    counted_bytes, counted_packets = (
        rows[-1][names.index(f"cross0.rx_{unit}")] - rows[0][names.index(f"cross0.rx_{unit}")]
        for unit in ("bytes", "packets")
    )
    wire, payload = wire_bytes(capture, 1448)
    assert payload == pytest.approx(planned, rel=0.005)  # headers of the flow protocol on top
    assert frame_bytes(counted_bytes, counted_packets, 1500) == pytest.approx(wire, rel=0.01)
    assert planned * 8 / 3 == pytest.approx(30e6, rel=1e-6)
