"""Shares of jobs in the links of a testbed, by what their connections carry."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from ringtap.agents.testbed.start_testbed import RunningTestbed, own_name
from ringtap.agents.testbed.topology import JobShare, LinkCount, TestbedSpec
from ringtap.core.errors import UsageError

pytestmark = [pytest.mark.alone(1), pytest.mark.usefixtures("unchanged_machine")]
# at this rate, the buffer of a socket lasts while its process waits for a CPU
RATE_BPS, SECONDS, STARTS_S = 20_000_000, 2.0, 2.0
BOTH = {0: [0, 1], 3: [0, 1]}  # up from S0 and down to S1
RECEIVE = """
import socket, sys, threading
def receive(server):
    connection, _ = server.accept()
    while connection.recv(1 << 18):
        pass
for address in sys.argv[1:]:
    threading.Thread(target=receive, args=(socket.create_server((address, 5000)),)).start()
print("listens", flush=True)
"""
SEND = """
import socket, sys, threading
def send(connection):
    while True:
        connection.sendall(bytes(1 << 16))
for address in sys.argv[1:]:
    threading.Thread(target=send, args=(socket.create_connection((address, 5000)),)).start()
print("sends", flush=True)
"""


@pytest.fixture(scope="module")
def testbed() -> Iterator[RunningTestbed]:
    spec = TestbedSpec(own_name("sh"), ("S0", "S1"), RATE_BPS, queue_bytes=200_000, burst_bytes=8192, jobs=2)
    with RunningTestbed(spec, verify=False) as running:
        yield running


@contextmanager
def connections(testbed: RunningTestbed, jobs: Sequence[int], target: str = "S1") -> Iterator[None]:
    """Fill a connection of each job, from S0 to another host."""
    addresses = [testbed.state.spec.job_ip(target, job) for job in jobs]
    started = []
    try:
        for host, code in ((target, RECEIVE), ("S0", SEND)):
            command = testbed.command(host, sys.executable, "-c", code, *addresses)
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
            assert started[-1].stdout is not None
            assert started[-1].stdout.readline()
        time.sleep(STARTS_S)
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def received(testbed: RunningTestbed, target: str) -> tuple[float, list[int]]:
    """Return the time (s) and the bytes that a host has received of each job."""
    command = testbed.command(target, "cat", "/proc/uptime", "/proc/net/dev")  # one program, which reads both at once
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(words[0]), [int(words[words.index(f"job{job}:") + 1]) for job in (0, 1)]


def rates_bps(testbed: RunningTestbed, jobs: Sequence[int], target: str = "S1") -> list[float]:
    """Return the rates at which a host receives from the connections of jobs, which lead from S0."""
    with connections(testbed, jobs, target):
        begin_s, first = received(testbed, target)
        time.sleep(SECONDS)
        end_s, last = received(testbed, target)
    return [8 * (last[job] - first[job]) / (end_s - begin_s) for job in jobs]


def test_weights_and_priorities_divide_a_link_and_leave_nothing_unused(testbed: RunningTestbed) -> None:
    # TCP may still recover from the losses of its slow start, and a busy machine be late to fill a queue
    whole = pytest.approx(RATE_BPS, rel=0.15)
    testbed.share(BOTH, [JobShare(2.0), JobShare()])
    heavy_bps, light_bps = rates_bps(testbed, [0, 1])
    assert 1.3 < heavy_bps / light_bps < 2.3
    assert heavy_bps + light_bps == whole
    testbed.share(BOTH, [JobShare(priority=1), JobShare()])
    high_bps, low_bps = rates_bps(testbed, [0, 1])
    assert low_bps < 0.1 * high_bps
    assert rates_bps(testbed, [1])[0] == whole, "a job of a low priority that is alone has the link"
    testbed.share({}, [JobShare(), JobShare()])
    assert rates_bps(testbed, [0])[0] == whole, "the plain limit is back"


def test_connections_have_the_congestion_control_of_their_job(testbed: RunningTestbed) -> None:
    testbed.share({}, [JobShare(congestion_control="reno"), JobShare()])
    with connections(testbed, [0, 1]):
        assert testbed.congestion_controls() == [["reno"], ["cubic"]]
    with (
        RunningTestbed(TestbedSpec(own_name("sh"), ("S0", "S1"), RATE_BPS, jobs=1), verify=False) as other,
        pytest.raises(UsageError, match="no congestion control 'nonesuch' loaded"),
    ):
        other.share({}, [JobShare(congestion_control="nonesuch")])


def test_jobs_of_a_leaf_spine_have_their_paths_and_their_shares_of_links_between_switches() -> None:
    hosts = ("S0", "S1", "S2", "S3")
    keys = {"topology": "leaf-spine", "spines": 2, "oversubscription": 2.0, "jobs": 2}
    spec = TestbedSpec(own_name("sh"), hosts, 2 * RATE_BPS, queue_bytes=200_000, burst_bytes=8192, **keys)  # type: ignore[arg-type]
    up = {spine: next(n for n, link in enumerate(spec.links) if link.place == ("leaf0", f"to {spine}"))
          for spine in ("spine0", "spine1")}  # fmt: skip
    assert spec.links[up["spine0"]].rate_bps == RATE_BPS

    def ups(counts: Sequence[LinkCount]) -> list[int]:
        return [counts[number].size_bytes for number in up.values()]

    with RunningTestbed(spec, verify=False) as testbed:
        testbed.share({}, [JobShare()] * 2, [1, 0])
        before = ups(testbed.link_counts())
        # a connection of each job from one leaf to the other
        rates = rates_bps(testbed, [0, 1], "S2")
        # on a busy machine, processes are late to fill a link; on one spine, they had half of this together
        assert min(rates) > 0.6 * RATE_BPS, "each has a spine of its own"
        grown = [after - first for after, first in zip(ups(testbed.link_counts()), before, strict=True)]
        assert min(grown) > 0.6 * RATE_BPS / 8 * SECONDS
        testbed.share({up["spine1"]: [0, 1]}, [JobShare(), JobShare(priority=1)], [1, 1])
        low_bps, high_bps = rates_bps(testbed, [0, 1], "S2")
        assert low_bps < 0.1 * high_bps
        assert 0.6 * RATE_BPS < high_bps < 1.05 * RATE_BPS


def test_growing_weights_follow_the_bytes_of_classes(testbed: RunningTestbed) -> None:
    """A job with all bytes of its iteration behind it has 2 / 0.25 times the share of one that has just begun."""
    grows = JobShare(0.25, 1.75, iteration_bytes=1.0, gap_s=60.0)
    testbed.share(BOTH, [grows, grows._replace(iteration_bytes=1e15)])
    fast_bps, slow_bps = rates_bps(testbed, [0, 1])
    assert 4.0 < fast_bps / slow_bps < 10.0
    cost = testbed.share({}, [JobShare()] * 2)
    assert cost["ticks"] > 0.3 * cost["seconds"] / 0.015, "on a busy machine, ticks are late"
    assert 0 < cost["cpu_s"] < 0.3 * cost["seconds"]
    assert testbed.share({}, [JobShare()] * 2) == {}
