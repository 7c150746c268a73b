"""Long sessions: memory of the live view over a compressed day, and a real session with a capture beside a job.

``day``: a run directory is written faster than real time, with nodes, ranks, sockets and processes that come and go,
and a viewer in a process of its own polls it as the live view does. ``session``: a job on this machine, with slow
iterations now and then, is recorded with packets around them; it prints memory of the agent, losses, and whether the
kept windows are those of the slow iterations.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import psutil

import ringtap
from ringtap.collectors.slow_iterations import SlowIterations, parse_rule
from ringtap.core.terminal import as_command

_MB = 1e6
_RULE = "p99.9:1s"
_SLOW_EVERY = 1500  # iterations of the job


def watch(run: Path) -> None:
    """Poll a run as the live view does, once per line on standard input, and answer with the resident bytes."""
    from ringtap.analysis.live.build_snapshot import SnapshotSource

    source = SnapshotSource(run)
    process = psutil.Process()
    for _ in sys.stdin:
        source.take()
        print(process.memory_info().rss, flush=True)


def day(hours: float, second: int) -> None:
    """Write hours of a run, ``second`` seconds between two polls of the viewer, and print its memory each hour."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.unit.live_run import RunWriter, second_of_training

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        viewer = subprocess.Popen(
            [sys.executable, __file__, "watch", str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert viewer.stdin is not None
        assert viewer.stdout is not None
        begun_s, resident = time.monotonic(), 0
        with RunWriter(run, "S0", "S1") as writer:
            for at in range(1, round(hours * 3600) + 1, second):
                second_of_training(writer, at)
                for node in writer.nodes.values():
                    # short-lived connections and processes
                    ends = ("10.77.0.1", 20000 + at % 40000, "10.77.0.9", 443)
                    node.socket(at, 10_000 + at, ends, bytes_acked=5000)
                    node.socket(at + 0.5, 10_000 + at, ends, state=0, bytes_acked=9000)
                    node.line("sockets/owners.jsonl", t_ns=at, inode=10_000 + at, pid=at, rank=None, command="curl")
                    node.line("host/processes.jsonl", t_ns=at, pid=at, parent=1, rank=None, command="worker")
                    node.process(at, at, 0.1)
                viewer.stdin.write("\n")
                viewer.stdin.flush()
                resident = int(viewer.stdout.readline())
                if at % 3600 < second:
                    speed = at / (time.monotonic() - begun_s)
                    print(f"{at / 3600:5.1f} h  {resident / _MB:6.1f} MB  {speed:.0f} times real time", flush=True)
        viewer.stdin.close()
        viewer.wait()


def job(seconds: float) -> None:
    """Iterations of 20 ms that send 20 kB over loopback; each 1500th takes 0.3 s."""
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_discard, args=(server,), daemon=True).start()
    client = socket.create_connection(server.getsockname())
    end_s, step = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        client.sendall(bytes(20_000))
        time.sleep(0.3 if step % _SLOW_EVERY == _SLOW_EVERY - 1 else 0.02)
        ringtap.step()
        step += 1


def _discard(server: socket.socket) -> None:
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass


def session(seconds: float, output: Path, limit: str) -> int:
    """Record the job, print the agent's memory each minute, and check the windows; returns 1 if one is wrong."""
    command = [sys.executable, "-m", "ringtap.cli", "run", "-o", str(output), "--node", "here"]
    command += ["--collect", "default,packets", "--interface", "lo", "--packets-around-slow", _RULE]
    command += ["--disk-limit", limit, "--", sys.executable, __file__, "job", str(seconds)]
    recording = subprocess.Popen(command)
    resident: list[int] = []
    due_s = time.monotonic() + 30
    while recording.poll() is None:
        time.sleep(1)
        if time.monotonic() < due_s:
            continue
        due_s += 60
        item = json.loads((output / "nodes/here/node.json").read_text())
        try:
            processes = [psutil.Process(item["agent"]["pid"])]
            processes += processes[0].children(recursive=True)
            own, all_of_them = (sum(one.memory_info().rss for one in some) for some in (processes[:1], processes))
        except psutil.NoSuchProcess:
            continue
        resident.append(own)
        print(f"agent {own / _MB:.1f} MB, with its capture {all_of_them / _MB:.1f} MB; disk {item['disk']}", flush=True)
    node = output / "nodes/here"
    item, facts = (json.loads((node / name).read_text()) for name in ("node.json", "packets/packets.json"))
    print(f"status {item['status']} {item['why']}; agent {item['agent']}; disk {item['disk']}")
    missed = {name: entry.get("missed_samples") for name, entry in item["collectors"].items()}
    print(f"missed samples {missed}; packets captured {facts['captured']}, dropped {facts['dropped_by_kernel']}")
    if len(resident) > 2:
        print(f"memory from minute 2 to the end: {(resident[-1] / resident[1] - 1):+.1%}")
    lines = [json.loads(line) for line in (node / "packets/lo-windows.jsonl").read_text().splitlines()]
    kept = [(one["begin_ns"], one["end_ns"]) for one in lines]
    wanted = _windows(node)
    outside = _packets_outside(node / "packets", kept)
    size = sum(path.stat().st_size for path in (node / "packets").glob("*.pcap"))
    print(
        f"windows kept {len(kept)}, wanted {len(wanted)}, equal: {kept == wanted}; packets outside: {outside}; "
        f"{sum(line['packets'] for line in lines)} packets, {size / _MB:.1f} MB"
    )
    return 0 if kept == wanted and not outside else 1


def _windows(node: Path) -> list[tuple[int, int]]:
    """Return the windows of the slow iterations, from the step records after the run."""
    rule = parse_rule(_RULE)
    around_ns = round(rule.around_s * 1e9)
    spans: list[tuple[int, int]] = []
    for one in SlowIterations(node / "steps", rule.share).poll():
        begin_ns, end_ns = one.begin_ns - around_ns, one.end_ns + around_ns
        if spans and begin_ns <= spans[-1][1]:
            begin_ns = spans.pop()[0]
        spans.append((begin_ns, end_ns))
    assert all(before[1] < after[0] for before, after in pairwise(spans))
    return spans


def _packets_outside(folder: Path, kept: list[tuple[int, int]]) -> int:
    from ringtap.analysis.pcap.reader import scan_packets

    outside = 0
    for path in folder.glob("*.pcap"):
        times_ns = scan_packets(path).packets["time_ns"]
        inside = sum(((times_ns >= begin) & (times_ns <= end)) for begin, end in kept)
        outside += int((inside == 0).sum())
    return outside


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("day")
    one.add_argument("--hours", type=float, default=24)
    one.add_argument("--poll-every", type=int, default=1, metavar="SECONDS", help="of the run, between two polls")
    one = verbs.add_parser("session")
    one.add_argument("--seconds", type=float, default=3600)
    one.add_argument("--output", type=Path, required=True)
    one.add_argument("--disk-limit", default="2GB")
    verbs.add_parser("watch").add_argument("run", type=Path)
    verbs.add_parser("job").add_argument("seconds", type=float)
    options = parser.parse_args()
    if options.verb == "day":
        day(options.hours, options.poll_every)
    elif options.verb == "watch":
        watch(options.run)
    elif options.verb == "job":
        job(options.seconds)
    else:
        os.makedirs(options.output.parent, exist_ok=True)  # noqa: PTH103
        return session(options.seconds, options.output, options.disk_limit)
    return 0


if __name__ == "__main__":
    sys.exit(as_command(main))
