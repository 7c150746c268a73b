"""Ways of sending: processes and threads, connections, sources, flows that wait, flows without end."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import open_records
from ringtap.core.flow_plan_file import PlanFile
from ringtap.core.flow_plan_format import Flow
from ringtap.core.sent_flow_log import FIELDS as SENT_FIELDS
from ringtap.trafficgen import protocol
from ringtap.trafficgen.flow_log import FlowLog
from ringtap.trafficgen.outgoing_sockets import TcpState
from ringtap.trafficgen.sender import ipc
from ringtap.trafficgen.sender.connection import SenderConnection
from ringtap.trafficgen.sender.options import PAYLOAD, SendOptions
from ringtap.trafficgen.sender.sender import SendPlan, WorkerLink
from ringtap.trafficgen.sender.worker import SenderWorker
from ringtap.trafficgen.statistics import Ending
from tests.unit.traffic_processes import (
    LISTEN,
    MS,
    TIME_WAIT,
    Connection,
    by_flow,
    children,
    closed_port,
    connections,
    plan_for,
    plan_of,
    plan_of_kind,
    rows,
    running,
    send,
    serving,
    traffic,
    wait_for_log,
    wait_until,
)

pytestmark = pytest.mark.shares

# ``ringtap traffic`` with a receiver that closes connections late
LATE = """
import sys, time
from ringtap.cli import main
from ringtap.trafficgen.receiver.connection import ReceiverConnection
drop = ReceiverConnection.drop
def late(self):
    time.sleep(0.05)
    drop(self)
ReceiverConnection.drop = late
sys.exit(main(["traffic", *sys.argv[1:]]))
"""
CREWS = [(1, 1), (2, 1), (3, 1), (1, 2)]


@pytest.mark.parametrize(("mode", "workers", "threads"), [*(("kept", *crew) for crew in CREWS), ("new", 2, 2)])
def test_every_crew_sends_the_same_flows(workers: int, threads: int, mode: str, tmp_path: Path) -> None:
    """Some are sent by the launcher alone, some (above 64 kB) carried on; and the other side has as large a crew."""
    crew = ("--workers", workers, "--threads", threads)
    with serving("--log", tmp_path / "r.rec", *crew) as serve:
        plan = plan_for(tmp_path, serve.address, load_bps=80e6, seconds=0.4, scale=20)
        summary, _ = send(plan, "--log", tmp_path / "s.rec", "--connections", mode, *crew)
        received = serve.end()
    flows = list(PlanFile(plan).flows())
    assert sum(flow.size_bytes > 65_536 for flow in flows) > 5 < sum(flow.size_bytes < 65_536 for flow in flows)
    for figures in (summary, received):
        assert (figures["workers"], figures["threads"]) == (workers, threads)
        assert figures["flows"] == len(flows)
        assert figures["bytes"] == 4_000_000
    assert summary["finished"] == len(flows)
    assert summary["acked_bytes"] == 4_000_000
    sent = by_flow(tmp_path / "s.rec")
    assert [row["size_bytes"] for row in sent] == [flow.size_bytes for flow in flows]
    assert {row["state"] for row in sent} == {0}
    arrived = by_flow(tmp_path / "r.rec")
    assert [(row["received_bytes"], row["finish_ns"]) for row in arrived] == [
        (row["size_bytes"], row["received_ns"]) for row in sent
    ]
    assert {row["sender"] for row in arrived} == {open_records(tmp_path / "s.rec").about["sender"]}


@pytest.mark.parametrize(("workers", "threads"), CREWS)
def test_as_many_processes_and_threads_as_asked_for(workers: int, threads: int, tmp_path: Path) -> None:
    crew = ("--workers", workers, "--threads", threads)
    with serving(*crew) as serve:
        plan = plan_for(tmp_path, serve.address, seconds=20)
        with running(plan, tmp_path / "s.rec", *crew) as sender:
            wait_for_log(tmp_path / "s.rec")
            *processes, launcher = children(sender)
            assert [child.num_threads() for child in processes] == [threads] * workers
            assert launcher.num_threads() == 1
            assert [child.num_threads() for child in children(serve.process)] == [threads] * workers


def test_the_receivers_loops_share_the_connections(tmp_path: Path) -> None:
    """The kernel deals them out by hash: that 100 connections all go one of two ways happens once in 2^99 times."""
    with serving("--log", tmp_path / "r.rec", "--workers", 2) as serve:
        flows = [Flow(number * MS, "", serve.address, 100) for number in range(100)]
        send(plan_of(tmp_path / "p.plan", flows, 100 * MS), "--connections", "new")
        serve.end()
    # Loops number their connections in turns: this one 1, 3, 5 and the other one 2, 4, 6
    assert {row["connection"] % 2 for row in rows(tmp_path / "r.rec")} == {0, 1}


def _waiting(port: int) -> set[Connection]:
    """The connections that have ended: the kernel remembers them for a minute, those of a port's last user too."""
    return {one for one in connections(port) if one.state == TIME_WAIT}


@contextmanager
def _receiver_closes_first(port: int, count: int) -> Iterator[None]:
    """The side that closes first remembers a connection: the receiver does, for ``count`` that begin inside.

    The kernel forgets one of them if the receiver repeats its FIN after the sender's socket has gone: its answer, a
    reset, ends TIME_WAIT (RFC 1337). That happens if the machine is too busy to acknowledge the first FIN in time.
    """
    before, resets = _waiting(port), _sent_resets()
    yield
    # the last of them say goodbye while the summary is printed
    wait_until(lambda: all(one.state in (LISTEN, TIME_WAIT) for one in connections(port)))
    sides = Counter("receiver" if one.local[1] == port else "sender" for one in _waiting(port) - before)
    assert count - (_sent_resets() - resets) <= sides["receiver"] <= count
    assert sides["sender"] <= 1  # it asks beforehand whether anyone is there, and that connection it ends itself


def _sent_resets() -> int:
    """TCP resets that this network namespace has sent."""
    names, values = (line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:")
    return int(values[names.index("OutRsts")])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_connection_a_flow_leaves_the_senders_ports_free(workers: int, tmp_path: Path) -> None:
    with serving("--log", tmp_path / "r.rec") as serve:
        flows = [Flow(number * MS // 2, "", serve.address, (1, 1000, 300_000)[number % 3]) for number in range(300)]
        plan = plan_of(tmp_path / "p.plan", flows, 200 * MS)
        with _receiver_closes_first(serve.port, 300):
            summary, _ = send(plan, "--connections", "new", "--workers", workers)
        received = serve.end()
    assert summary["finished"] == received["flows"] == 300
    assert summary["connection_use"] == "new"
    assert received["bytes"] == summary["acked_bytes"] == 100 * 301_001
    assert received["unfinished"] == received["malformed"] == 0
    assert received["connections"] == 301  # with that of the sender's question
    assert len({row["connection"] for row in rows(tmp_path / "r.rec")}) == 300


def test_the_sender_waits_for_a_receiver_that_closes_late(tmp_path: Path) -> None:
    with serving(command=[sys.executable, "-c", LATE]) as serve:
        flows = [Flow(number * MS, "", serve.address, 1000) for number in range(20)]
        with _receiver_closes_first(serve.port, 20):
            send(plan_of(tmp_path / "p.plan", flows, 20 * MS), "--connections", "new")


@pytest.mark.parametrize("mode", ["kept", "new"])
def test_over_ipv6(mode: str, tmp_path: Path) -> None:
    with serving("--bind", "[::1]:0") as sixth, serving() as fourth:
        assert sixth.address.startswith("[::1]:")
        plan = plan_for(tmp_path, sixth.address, fourth.address)
        summary, _ = send(plan, "--connections", mode, "--dscp", 8)
        counted = [sixth.end(), fourth.end()]
        assert summary["transport"]["dscp"] == 8
    assert min(count["flows"] for count in counted) > 0
    assert sum(count["flows"] for count in counted) == summary["finished"] == summary["flows"]
    assert sum(count["bytes"] for count in counted) == summary["bytes"]


def test_a_source_of_the_sixth_family_and_one_of_the_wrong_family(tmp_path: Path) -> None:
    with serving("--bind", "[::1]:0") as serve:
        plan = plan_for(tmp_path, serve.address, seconds=0.05)
        send(plan, "--source", "::1")
        _, complaint = send(plan, "--source", "127.0.0.1", expect=2)
    assert "source address '127.0.0.1' cannot be used" in complaint
    assert "nknown error" not in complaint


def _senders(port: int, before: set[Connection]) -> set[str]:
    """The other ends of a receiver's connections that have ended since then, whichever side closed them first."""
    return {host for one in _waiting(port) - before for host, other in one[:2] if other != port}


@pytest.mark.parametrize("mode", ["kept", "new"])
def test_each_source_of_a_plan_is_sent_from_its_own_host(mode: str, tmp_path: Path) -> None:
    with serving("--log", tmp_path / "r.rec") as serve:
        flows = [Flow(number * MS, f"127.0.0.{2 + number % 2}", serve.address, 5000) for number in range(40)]
        plan = plan_of(tmp_path / "p.plan", flows, 50 * MS)
        before = _waiting(serve.port)
        used = []
        for source in ("127.0.0.2", "127.0.0.3"):
            log = tmp_path / f"{source}.rec"
            summary, _ = send(plan, "--as", source, "--connections", mode, "--log", log)
            assert summary["finished"] == summary["flows"] == 20
            about = open_records(log).about
            assert {about["sources"][row["source"]] for row in rows(log)} == {source}
            wait_until(lambda source=source: source in _senders(serve.port, before))
            used.append(_senders(serve.port, before))
        serve.end()
    assert used == [{"127.0.0.2"}, {"127.0.0.2", "127.0.0.3"}]
    received = by_flow(tmp_path / "r.rec")
    assert [row["flow"] for row in received] == list(range(40))
    assert len({row["sender"] for row in received[::2]}) == len({row["sender"] for row in received[1::2]}) == 1
    assert received[0]["sender"] != received[1]["sender"]


def test_the_source_option_is_for_flows_without_one(tmp_path: Path) -> None:
    with serving() as serve:
        flows = [Flow(0, "", serve.address, 10), Flow(0, "127.0.0.5", serve.address, 10)]
        before = _waiting(serve.port)
        send(plan_of(tmp_path / "p.plan", flows, MS), "--source", "127.0.0.4")
        wait_until(lambda: len(_senders(serve.port, before)) > 1)
        assert _senders(serve.port, before) == {"127.0.0.4", "127.0.0.5"}


def test_a_source_that_is_not_here_and_one_that_is_not_in_the_plan(tmp_path: Path) -> None:
    with serving() as serve:
        plan = plan_of(tmp_path / "p.plan", [Flow(0, "203.0.113.1", serve.address, 10)], MS)
        _, complaint = send(plan, expect=2)
        assert "source address '203.0.113.1' cannot be used here" in complaint
        _, complaint = send(plan, "--as", "127.0.0.2", expect=2)
        assert "no flow from '127.0.0.2'" in complaint
        assert serve.end()["connections"] == 0


@pytest.mark.parametrize("mode", ["kept", "new"])
def test_a_ring_waits_for_what_it_passes_on(mode: str, tmp_path: Path) -> None:
    with (
        serving("--bind", "127.0.0.2:0") as one,
        serving("--bind", "127.0.0.3:0", "--log", tmp_path / "r.rec") as other,
    ):
        plan = tmp_path / "ring.plan"
        nodes = ("--node", one.address, "--node", other.address)
        # it ends with its last flow, however late that is
        shape = ("--bytes", "400kB", "--iterations", 4, "--compute", "30ms", "--duration", "60s")
        traffic("plan", "--kind", "ring", *nodes, *shape, "-o", plan)
        summary, _ = send(plan, "--log", tmp_path / "s.rec", "--connections", mode)
    flows = list(PlanFile(plan).flows())
    sent = by_flow(tmp_path / "s.rec")
    assert len(sent) == len(flows) == summary["finished"] == 16
    origin_ns = open_records(tmp_path / "s.rec").about["origin_ns"]
    assert sum(delay_ns == 30 * MS for flow in flows for _, delay_ns in flow.after) == 6
    for flow, row in zip(flows, sent, strict=True):
        due_ns = origin_ns + flow.start_ns
        for after, delay_ns in flow.after:
            due_ns = max(due_ns, sent[after]["finish_ns"] + delay_ns)
        assert row["intended_start_ns"] == due_ns
        assert row["start_ns"] >= due_ns


def test_what_waits_for_a_failed_flow_never_starts(tmp_path: Path) -> None:
    with serving("--log", tmp_path / "r.rec") as serve:
        bad, good = closed_port(), serve.address
        flows = [Flow(0, "", bad, 10), Flow(0, "", good, 10, ((0, 0),))]
        flows += [Flow(0, "", good, 10), Flow(0, "", good, 10, ((1, 0),))]
        plan = plan_of(tmp_path / "p.plan", flows, 100 * MS)
        summary, complaint = send(plan, "--log", tmp_path / "s.rec", expect=1)
        assert serve.end()["flows"] == 1
    assert [(row["flow"], row["state"]) for row in by_flow(tmp_path / "s.rec")] == [(0, 2), (2, 0)]
    assert summary["flows"] == 2
    assert "1 of 2 flows failed" in complaint


def test_waiting_flows_of_several_hosts_are_refused(tmp_path: Path) -> None:
    flows = [Flow(0, "127.0.0.2", "127.0.0.1:9", 10), Flow(0, "127.0.0.3", "127.0.0.1:9", 10, ((0, 0),))]
    _, complaint = send(plan_of(tmp_path / "p.plan", flows, MS), "--as", "127.0.0.2", expect=2)
    assert "wait for flows of other sources" in complaint


@pytest.mark.alone(2)
@pytest.mark.parametrize(("mode", "workers", "cut"), [("kept", 1, False), ("new", 2, False), ("kept", 2, True)])
def test_endless_flows_end_with_the_plan(mode: str, workers: int, cut: bool, tmp_path: Path) -> None:
    with serving("--log", tmp_path / "r.rec") as serve:
        plan = plan_of_kind(tmp_path / "p.plan", "long-lived", duration=400 * MS, flows=3, to=[serve.address])
        sooner = ("--duration", "250ms") if cut else ()
        summary, _ = send(plan, "--log", tmp_path / "s.rec", "--connections", mode, "--workers", workers, *sooner)
        received = serve.end()
    sent, arrived = by_flow(tmp_path / "s.rec"), by_flow(tmp_path / "r.rec")
    assert summary["finished"] == received["flows"] == len(sent) == 3
    assert summary["unfinished"] == received["unfinished"] == summary["failed"] == 0
    assert [row["sent_bytes"] for row in sent] == [row["received_bytes"] for row in arrived]
    assert received["bytes"] == summary["acked_bytes"] == sum(row["sent_bytes"] for row in sent)
    assert min(row["sent_bytes"] for row in sent) > 1_000_000
    end_ns = open_records(tmp_path / "s.rec").about["origin_ns"] + (250 if cut else 400) * MS
    for row in sent:
        assert row["state"] == 0
        # What waits in the kernel's buffers, a few MB, goes out over loopback in milliseconds; a busy host takes longer
        assert end_ns <= row["finish_ns"] < end_ns + 1000 * MS


def test_an_endless_flow_beside_others_leaves_them_alone(tmp_path: Path) -> None:
    with serving() as serve:
        flows = [Flow(0, "", serve.address, 0), *(Flow(number * MS, "", serve.address, 2000) for number in range(200))]
        plan = plan_of(tmp_path / "p.plan", flows, 250 * MS)
        summary, _ = send(plan, "--log", tmp_path / "s.rec")
        assert serve.end()["flows"] == summary["finished"] == 201
    first, *others = by_flow(tmp_path / "s.rec")
    assert first["sent_bytes"] > 1_000_000
    assert all(row["sent_bytes"] == row["size_bytes"] == 2000 for row in others)
    # Times of completion are of flows that have a size
    assert sum(row["flows"] for row in summary["fct_by_size"]) == 200
    assert summary["bytes"] == 400_000


def test_the_launcher_keeps_to_its_processor(tmp_path: Path) -> None:
    mine = sorted(os.sched_getaffinity(0))[-1]
    with serving() as serve:
        plan = plan_for(tmp_path, serve.address, seconds=20)
        with running(plan, tmp_path / "s.rec", "--launcher-cpu", mine) as process:
            wait_for_log(tmp_path / "s.rec")
            worker, launcher = children(process)
            assert launcher.cpu_affinity() == [mine]
            # The workers leave it alone, where there is another one
            others = sorted(os.sched_getaffinity(0) - {mine}) or [mine]
            assert worker.cpu_affinity() == others
        _, complaint = send(plan, "--launcher-cpu", 100_000, expect=2)
    assert "--launcher-cpu 100000" in complaint


@pytest.mark.alone(2)
def test_two_senders_with_one_launch_time_have_one_origin(tmp_path: Path) -> None:
    began_ns = time.monotonic_ns()
    with serving("--log", tmp_path / "r.rec") as serve:
        plan = plan_for(tmp_path, serve.address, seconds=0.2)
        # Both are up within 1 s; twice as much is for a busy host, and more for one where the receiver took longer, too
        at_ns = time.time_ns() + max(2500 * MS, 4 * (time.monotonic_ns() - began_ns))
        logs = [tmp_path / "1.rec", tmp_path / "2.rec"]
        with (
            running(plan, logs[0], "--start-at", at_ns) as first,
            running(plan, logs[1], "--start-at", at_ns) as second,
        ):
            wait_until(lambda: first.poll() is not None and second.poll() is not None, 120)
            assert first.returncode == second.returncode == 0
        serve.end()
    origins_ns = [open_records(log).about["origin_ns"] for log in logs]
    assert max(abs(origin_ns - at_ns) for origin_ns in origins_ns) < MS
    flows = len(list(PlanFile(plan).flows()))
    assert sorted(row["flow"] for row in rows(tmp_path / "r.rec")) == sorted(2 * list(range(flows)))
    assert len({row["sender"] for row in rows(tmp_path / "r.rec")}) == 2


def test_a_sender_worker_begins_before_it_hears_of_the_first_flow(tmp_path: Path) -> None:
    """On a busy machine it may find both at once; what ended before the log was open would be missing there."""

    async def begin() -> None:
        here, there = ipc.pair()
        launcher = ipc.Channel(here)
        options = SendOptions(log_path=tmp_path / "s.rec")
        plan = plan_of(tmp_path / "p.plan", [Flow(0, "", "127.0.0.1:5001", 10)], MS)
        worker = SenderWorker(WorkerLink(here, there, ipc.SharedSlots(1)), SendPlan(PlanFile(plan), options))
        FlowLog(options.log_path, SENT_FIELDS, {}).close()
        launcher.put(ipc.BEGIN, 0, time.monotonic_ns(), time.time_ns())
        assert launcher.flush()
        worker._events()  # a connection has something to say
        worker.outcome.ended(ipc.FlowState(7, 10, 1, 2), Ending("finished", 2, 3), TcpState(0, 0, 0), -1, 0)
        worker.outcome.flush()
        here.close()
        there.close()
        worker.epoll.close()

    asyncio.run(begin())
    assert [row["flow"] for row in rows(tmp_path / "s.rec")] == [7]


@pytest.mark.parametrize("of_head", [0, protocol.FLOW.size])
def test_a_full_socket_takes_nothing_of_the_rest_of_a_flow(tmp_path: Path, of_head: int) -> None:
    """The launcher hands a flow over when the socket is full, and the socket may be full still."""
    size_bytes = 1000
    here, there = ipc.pair()
    slots = ipc.SharedSlots(1)
    slots.fill(0, 7, size_bytes, 1, 1)
    plan = plan_of(tmp_path / "p.plan", [Flow(0, "", "127.0.0.1:5001", size_bytes)], MS)
    worker = SenderWorker(WorkerLink(here, there, slots), SendPlan(PlanFile(plan), SendOptions()))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sock:
        accepted, _ = server.accept()
        sock.setblocking(False)
        filled = 0
        with pytest.raises(BlockingIOError):
            while True:
                filled += sock.send(bytes(1 << 16))
        connection = SenderConnection(worker, sock, 0, 0)
        worker.register(connection, sock.fileno(), select.EPOLLIN)
        connection._is_established = True
        connection.carry_on(of_head)
        while filled:
            filled -= len(accepted.recv(min(filled, 1 << 16)))
        connection.event(select.EPOLLOUT)
        sock.shutdown(socket.SHUT_WR)
        with accepted, accepted.makefile("rb") as arrived:
            assert arrived.read() == protocol.FLOW.pack(7, size_bytes)[of_head:] + PAYLOAD[:size_bytes]
    for end in (here, there, worker.epoll):
        end.close()
