"""Cost of a hop through a testbed's nodes (docs/commands/testbed.md): python benchmarks/forwarding.py [--seconds N]."""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time

import _checkout  # noqa: F401 -- first: lets the others import ringtap
import numpy as np
import psutil
from _machine import describe

from ringtap.agents.testbed.launch import RunningTestbed, own_name
from ringtap.agents.testbed.topology import TestbedSpec

HOPS = (1, 2, 3, 4)
SEGMENTS = (1, 4, 44)
_CHUNK_BYTES = 262_144
_PORT = 5001


def transfer(seconds: float, address: str, role: str) -> None:
    """Send to or receive from the other role on one core for some seconds, and print bytes and CPU time."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    count = 0
    if role == "receive":
        with socket.create_server((address, _PORT)) as server:
            print("listening", flush=True)
            sock, begin = server.accept()[0], resource.getrusage(resource.RUSAGE_SELF)
        while size := len(sock.recv(_CHUNK_BYTES)):
            count += size
    else:
        sock, begin = socket.create_connection((address, _PORT)), resource.getrusage(resource.RUSAGE_SELF)
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            count += sock.send(bytes(_CHUNK_BYTES))
    sock.close()
    end = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime
    print(json.dumps({"bytes": count, "cpu_s": cpu_s}))


def softirq_s() -> float:
    """Return the CPU time of the kernel's thread that forwards on the core."""
    name = f"ksoftirqd/{min(os.sched_getaffinity(0))}"
    (thread,) = (process for process in psutil.process_iter(["name"]) if process.info["name"] == name)
    times = thread.cpu_times()
    return float(times.user + times.system)


def seconds_per_gbit(built: RunningTestbed, hops: int, seconds: float) -> float:
    """Return the CPU time that 1 Gbit takes at both ends and at the hosts between them.

    It is the time of both processes, in which the kernel also forwards, and of the kernel's thread for what it leaves.
    """
    target = built.hosts[hops]
    work = [sys.executable, __file__, "--seconds", str(seconds), "--address", built.address(target)]
    receiver = subprocess.Popen(built.command(target, *work, "--role", "receive"), stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    receiver.stdout.readline()
    before_s = softirq_s()
    sent = subprocess.run(built.command(built.hosts[0], *work, "--role", "send"), stdout=subprocess.PIPE, check=True)
    ends = [json.loads(sent.stdout), json.loads(receiver.communicate()[0])]
    cpu_s: float = sum(end["cpu_s"] for end in ends) + softirq_s() - before_s
    return cpu_s / (ends[1]["bytes"] * 8 / 1e9)


def main() -> None:
    """Measure, and print a JSON line per number of packets in one piece."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        transfer(options.seconds, options.address, options.role)
        return
    print(json.dumps(describe()))
    for segments in SEGMENTS:
        # links faster than a core
        hosts = tuple(f"S{number}" for number in range(2 * max(HOPS) + 1))
        spec = TestbedSpec(
            own_name("fw"), hosts, 30_000_000_000, 8_000_000, 4_000_000, topology="ring", offload_segments=segments
        )
        with RunningTestbed(spec, verify=False) as built:
            # what else runs on the machine adds to a measurement: the least is nearest to the cost
            costs = [
                min(seconds_per_gbit(built, hops, options.seconds) for _ in range(options.repeats)) for hops in HOPS
            ]
        per_hop, ends = np.polyfit(HOPS, costs, 1)
        item = {"offload_segments": segments, "cpu_s_per_gbit": [round(cost, 4) for cost in costs]}
        item |= {"ends_s_per_gbit": round(ends, 4), "hop_s_per_gbit": round(per_hop, 4)}
        print(json.dumps(item | {"hop_gbps_per_core": round(1 / per_hop, 2)}))


if __name__ == "__main__":
    main()
