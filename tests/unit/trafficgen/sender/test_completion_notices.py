"""Plans in which flows wait for others, sent by several hosts: each learns from its own receiver what has arrived."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from ringtap.core.flow_plan_format import Flow
from ringtap.trafficgen.sender.completion_notices import Announcer, Listener
from tests.unit.traffic_processes import MS, plan_of, rows, running, serving, traffic, wait_until

pytestmark = pytest.mark.shares

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")


def ring(addresses: list[str], rounds: int) -> list[Flow]:
    """A token that goes round: every flow waits for the one before, which arrives at its own sender."""
    count = len(addresses)
    return [
        Flow(0, HOSTS[at % count], addresses[(at + 1) % count], 30_000, ((at - 1, MS),) if at else ())
        for at in range(count * rounds)
    ]


def test_a_ring_over_three_senders_goes_round(tmp_path: Path) -> None:
    with ExitStack() as stack:
        addresses = [
            stack.enter_context(serving("--bind", f"{host}:0", "--arrivals", tmp_path / f"{host}.socket")).address
            for host in HOSTS
        ]
        flows = ring(addresses, 20)
        plan = plan_of(tmp_path / "ring.plan", flows, 60_000 * MS)
        senders = []
        for host in (*HOSTS[1:], HOSTS[0]):  # the first one sends at once: the others listen by then
            path = tmp_path / f"{host}.socket"
            arguments = ("--as", host, "--arrivals", path)
            senders.append(stack.enter_context(running(plan, tmp_path / f"{host}.rec", *arguments)))
            if host != HOSTS[0]:
                wait_until(path.exists, 30)
        for sender in senders:
            _, complaint = sender.communicate(timeout=20)
            assert sender.returncode == 0, complaint
    sent = {row["flow"]: row for host in HOSTS for row in rows(tmp_path / f"{host}.rec")}
    assert sorted(sent) == list(range(len(flows)))
    for number in range(1, len(flows)):
        # both times are of this host's clock; the sender's log is shifted to it once, right to a few microseconds
        waited_ns = sent[number]["start_ns"] - sent[number - 1]["received_ns"]
        assert waited_ns >= MS - 50_000
    assert not list(tmp_path.glob("*.socket"))


def test_arrivals_are_kept_while_their_listener_is_busy_and_dropped_without_one(tmp_path: Path) -> None:
    announcer = Announcer(tmp_path / "socket")
    announcer.tell(1, 1)
    assert announcer.flush()  # nobody listens
    listener = Listener(tmp_path / "socket")
    wanted = [(number, -number) for number in range(5000)]
    for number, at_ns in wanted:
        announcer.tell(number, at_ns)
    got: list[tuple[int, int]] = []
    flushes = 0
    while not announcer.flush():
        flushes += 1
        got += listener.arrivals()
    got += listener.arrivals()
    announcer._sock.sendto(b"short", str(tmp_path / "socket"))  # from any other process
    got += listener.arrivals()
    assert got == wanted
    assert flushes > 0
    listener.close()
    assert not (tmp_path / "socket").exists()
    announcer.close()


def test_a_path_that_cannot_be_a_socket_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with serving() as serve:
        plan = plan_of(tmp_path / "p.plan", [Flow(0, "127.0.0.2", serve.address, 10)], 10 * MS)
        done = traffic("send", plan, "--arrivals", tmp_path / "file", expect=2)
    assert "--arrivals" in done.stderr.splitlines()[-1]
    assert (tmp_path / "file").read_text() == "mine"
