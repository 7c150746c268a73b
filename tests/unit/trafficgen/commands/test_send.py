"""Sender and receiver as processes on loopback: what arrives, what is logged, and what happens when things go wrong."""

from __future__ import annotations

import json
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ringtap.core.append_only_logs import open_records
from tests.unit.traffic_processes import (
    COMMAND,
    FULL_DISK,
    MS,
    closed_port,
    peer,
    plan_for,
    rows,
    running,
    send,
    serving,
    wait_for_log,
    wait_until,
)
from tests.unit.web_plans import PlanSpec, web_plan

pytestmark = pytest.mark.shares


def test_every_byte_of_the_plan_arrives_and_both_logs_say_so(tmp_path: Path) -> None:
    with serving("--log", tmp_path / "r.rec") as serve:
        plan = plan_for(tmp_path, serve.address)
        summary, _ = send(plan, "--log", tmp_path / "s.rec")
        received = serve.end()
    flows = list(web_plan(PlanSpec("consistent", 20e6, 500 * MS, (serve.address,), 1, 100)).flows())
    assert summary["flows"] == summary["finished"] == received["flows"] == len(flows)
    assert summary["bytes"] == summary["acked_bytes"] == received["bytes"] == 1_250_000
    assert summary["offered_bps"] == pytest.approx(20e6)
    assert received["malformed"] == received["refused"] == received["unfinished"] == 0
    sent = sorted(rows(tmp_path / "s.rec"), key=lambda row: row["flow"])
    assert [row["size_bytes"] for row in sent] == [flow.size_bytes for flow in flows]
    origin_ns = open_records(tmp_path / "s.rec").about["origin_ns"]
    assert [row["intended_start_ns"] - origin_ns for row in sent] == [flow.start_ns for flow in flows]
    for row in sent:
        assert row["state"] == 0
        assert row["sent_bytes"] == row["acked_bytes"] == row["size_bytes"]
        assert row["start_ns"] <= row["received_ns"] <= row["finish_ns"]
        assert row["lateness_ns"] >= 0
    assert {row["flow"]: row["finish_ns"] for row in rows(tmp_path / "r.rec")} == {
        row["flow"]: row["received_ns"] for row in sent
    }


def test_the_header_of_the_log_says_what_was_in_force(tmp_path: Path) -> None:
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    with serving() as serve:
        plan = plan_for(tmp_path, serve.address, seconds=0.05)
        summary, _ = send(plan, "--log", tmp_path / "s.rec", "--congestion-control", allowed[0])
    about = open_records(tmp_path / "s.rec").about
    assert about["transport"]["congestion_control"] == summary["transport"]["congestion_control"] == allowed[0]
    assert about["destinations"] == [serve.address]
    assert about["plan"]["load_bps"] == 20e6


def test_large_flows_share_the_sender(tmp_path: Path) -> None:
    with serving() as serve:
        summary, _ = send(plan_for(tmp_path, serve.address, load_bps=500e6, seconds=0.4, scale=1))
        assert serve.end()["bytes"] == summary["bytes"] == 25_000_000


def test_one_connection_carries_every_flow_in_turn(tmp_path: Path) -> None:
    with serving() as serve:
        summary, _ = send(plan_for(tmp_path, serve.address), "--max-connections", 1)
        assert serve.end()["connections"] == summary["connections"] == 1
    assert summary["finished"] == summary["flows"]


def test_duration_stops_the_launches(tmp_path: Path) -> None:
    with serving() as serve:
        summary, _ = send(plan_for(tmp_path, serve.address, seconds=20), "--duration", "200ms")
    assert summary["stopped_by"] == "duration"
    assert summary["duration_s"] == pytest.approx(0.2)
    assert 0 < summary["flows"] == summary["finished"] < 200


@pytest.mark.alone(2)
def test_a_named_launch_time_is_kept(tmp_path: Path) -> None:
    began_ns = time.monotonic_ns()
    with serving() as serve:
        plan = plan_for(tmp_path, serve.address, seconds=0.1)
        # the sender is up by then, also where all takes longer, as the receiver did
        at_ns = time.time_ns() + max(1_500 * MS, 3 * (time.monotonic_ns() - began_ns))
        send(plan, "--log", tmp_path / "s.rec", "--start-at", at_ns)
        _, complaint = send(plan, "--start-at", at_ns, expect=2)
    assert abs(open_records(tmp_path / "s.rec").about["origin_ns"] - at_ns) < MS
    assert "--start-at" in complaint


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_a_whole_log_and_a_summary(number: signal.Signals, tmp_path: Path) -> None:
    with serving() as serve, running(plan_for(tmp_path, serve.address, seconds=20), tmp_path / "s.rec") as process:
        wait_for_log(tmp_path / "s.rec")
        wait_until(lambda: open_records(tmp_path / "s.rec").count > 10, 30)
        process.send_signal(number)
        out, err = process.communicate(timeout=10)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert summary["stopped_by"] == number.name
    logged = rows(tmp_path / "s.rec")
    assert sorted(row["flow"] for row in logged) == list(range(summary["flows"]))
    assert summary["flows"] > 10


@pytest.mark.alone(2)
def test_after_sigkill_all_but_the_last_second_reads_back(tmp_path: Path) -> None:
    with serving() as serve, running(plan_for(tmp_path, serve.address, seconds=20), tmp_path / "s.rec") as process:
        wait_for_log(tmp_path / "s.rec")
        time.sleep(1.8)
        killed_ns = time.time_ns()
        process.kill()
        process.wait(10)
    logged = {row["flow"] for row in rows(tmp_path / "s.rec")}
    about = open_records(tmp_path / "s.rec").about
    flows = web_plan(PlanSpec("consistent", 20e6, 20_000 * MS, (serve.address,), 1, 100)).flows()
    old = {number for number, flow in enumerate(flows) if about["origin_ns"] + flow.start_ns < killed_ns - 1e9}
    assert len(old) > 20
    assert old <= logged


def test_a_receiver_that_stops_midway_logs_the_unfinished_flow(tmp_path: Path) -> None:
    huge = tmp_path / "huge.plan"
    size = 2**40
    with serving("--log", tmp_path / "r.rec") as serve:
        header = {"format": "ringtap-flow-plan", "version": 1, "duration_ns": 10**9, "flows": 2, "bytes": size + 10}
        flows = f"\n0\t{serve.address}\t{size}\n0\t{serve.address}\t10\n"
        huge.write_text(json.dumps(header | {"destinations": [serve.address]}) + flows)
        with running(huge, tmp_path / "s.rec") as process:
            wait_for_log(tmp_path / "s.rec")
            # that the second one has arrived is there: the first began before it
            wait_until(lambda: open_records(tmp_path / "s.rec").count > 0, 30)
            summary = serve.end()
            _, err = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "1 of 2 flows failed" in err
    assert "Traceback" not in err
    row, short = sorted(rows(tmp_path / "r.rec"), key=lambda row: row["flow"])
    assert (short["state"], short["received_bytes"]) == (0, 10)
    assert summary["unfinished"] == row["state"] == 1
    assert row["received_bytes"] == summary["bytes"] - 10 > 0
    sent, short = sorted(rows(tmp_path / "s.rec"), key=lambda row: row["flow"])
    assert (short["state"], sent["state"]) == (0, 2)
    assert 0 < sent["acked_bytes"] <= sent["sent_bytes"] < size


@pytest.mark.alone(2)
def test_nothing_listening_is_one_sentence_and_soon(tmp_path: Path) -> None:
    began = time.monotonic()
    _, complaint = send(plan_for(tmp_path, closed_port()), expect=1)
    assert time.monotonic() - began < 3
    assert "no receiver answers" in complaint
    assert "connection refused" in complaint


def test_a_wrong_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGTAP_TOKEN", "right")
    with serving() as serve:
        monkeypatch.setenv("RINGTAP_TOKEN", "wrong")
        _, complaint = send(plan_for(tmp_path, serve.address), expect=1)
        assert serve.end()["refused"] > 0
    assert "give both sides the same (RINGTAP_TOKEN or --token-file)" in complaint


def reset(connection: socket.socket) -> None:
    connection.recv(10)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def lie(connection: socket.socket) -> None:
    connection.sendall(b"\xff" * 8 + b"\0" * 8 + b"\x7f" * 64)
    while connection.recv(65536):
        pass


def chatter(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3)


def stall(connection: socket.socket) -> None:
    connection.sendall(b"\xff" * 8 + b"\0" * 8)
    hang_up = select.poll()
    hang_up.register(connection, select.POLLRDHUP)
    hang_up.poll(10_000)


@pytest.mark.parametrize("behave", ["refuse", "silent", reset, lie, chatter, stall])
def test_a_bad_destination_fails_its_flows_and_no_others(behave: Any, tmp_path: Path) -> None:
    with serving() as serve, peer(None if isinstance(behave, str) else behave) as address:
        bad = closed_port() if behave == "refuse" else address
        plan = plan_for(tmp_path, serve.address, bad)
        arguments = ("--log", tmp_path / "s.rec", "--patience", "2s")
        summary, complaint = send(plan, *arguments, expect=1)
        received = serve.end()
    good = [row for row in rows(tmp_path / "s.rec") if row["destination"] == 0]
    lost = [row for row in rows(tmp_path / "s.rec") if row["destination"] == 1]
    assert all(row["state"] == 0 for row in good)
    assert received["flows"] == len(good) > 20
    assert len(lost) > 20
    assert {row["state"] for row in lost} <= {1, 2}
    assert summary["failed"] == sum(row["state"] == 2 for row in lost) > 0
    assert f"{summary['failed']} of {summary['flows']} flows failed" in complaint
    assert bad in complaint


def test_a_port_in_use_is_one_sentence(tmp_path: Path) -> None:
    with serving() as serve:
        command = [*COMMAND, "serve", "--bind", serve.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert "in use" in done.stderr.splitlines()[-1]


def test_a_log_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "s.rec").write_text("mine")
    with serving() as serve:
        _, complaint = send(plan_for(tmp_path, serve.address), "--log", tmp_path / "s.rec", expect=2)
    assert "never overwritten" in complaint
    assert (tmp_path / "s.rec").read_text() == "mine"


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with serving() as serve:
        process = subprocess.run(
            [
                sys.executable,
                "-c",
                FULL_DISK,
                "send",
                plan_for(tmp_path, serve.address, seconds=1),
                "--log",
                tmp_path / "s.rec",
            ],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    assert process.returncode == 1, process.stderr
    assert "No space left on device" in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr
