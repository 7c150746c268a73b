"""What goes wrong around a sender or receiver: processes killed, disks full, plans edited, limits too low."""

from __future__ import annotations

import ctypes
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringtap.core.append_only_logs import open_records
from ringtap.core.flow_plan_format import Flow
from ringtap.core.run_directory_schema import FLOW_STATES
from tests.unit.agent_processes import ended
from tests.unit.traffic_processes import (
    FULL_DISK,
    MS,
    by_flow,
    children,
    plan_of,
    running,
    send,
    serving,
    traffic,
    wait_for_log,
    wait_until,
)

pytestmark = pytest.mark.shares

# A parent's death is noticed by a closing pipe, at once; the rest of the 2 s is for a busy host
SOON_S = 2.0

# ``ringtap traffic`` whose launcher reads the second half of a plan once a file is there
IN_HALVES = """
import os, sys, time
from ringtap.cli import main
from ringtap.trafficgen.sender.flow_launcher import FlowQueue
edited, advance = sys.argv[1], FlowQueue._advance
def late(self):
    for _ in range(3000):
        if self._line is None or self._line[0] != 500 or os.path.exists(edited):
            break
        time.sleep(0.01)
    advance(self)
FlowQueue._advance = late
sys.exit(main(["traffic", *sys.argv[2:]]))
"""


def busy_plan(folder: Path, address: str) -> Path:
    """20 s of an endless flow and a short one each 2 ms."""
    flows = [Flow(0, "", address, 0), *(Flow(2 * number * MS, "", address, 3000) for number in range(10_000))]
    return plan_of(folder / "busy.plan", flows, 20_000 * MS)


def wait_for_flows(log: Path, state: str = "finished") -> None:
    """Wait until flows that ended like this are in the log, which is still being written."""

    def are_there() -> bool:
        if not (log.exists() and log.stat().st_size):
            return False
        records = open_records(log)
        return FLOW_STATES[state] in records.values("state", records.packed())

    wait_until(are_there, 30)


def gone(processes: list[psutil.Process]) -> bool:
    end_s = time.monotonic() + SOON_S
    while not all(map(has_ended, processes)) and time.monotonic() < end_s:
        time.sleep(0.01)
    return all(map(has_ended, processes))


def has_ended(process: psutil.Process) -> bool:
    """True also for what its new parent, which a busy machine may hold up, has yet to reap."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("mode", ["kept", "new"])
@pytest.mark.parametrize("which", [0, -1], ids=["worker", "launcher"])
def test_a_process_of_the_sender_killed_ends_it_with_a_sentence(mode: str, which: int, tmp_path: Path) -> None:
    with serving() as serve:
        plan, log = busy_plan(tmp_path, serve.address), tmp_path / "s.rec"
        with running(plan, log, "--workers", 2, "--connections", mode) as process:
            wait_for_flows(log)
            crew = children(process)
            assert len(crew) == 3
            crew[which].kill()
            _, err = process.communicate(timeout=10)
            assert gone(crew)
        assert serve.end()["flows"] > 0
    assert process.returncode == 1
    assert "Traceback" not in err
    assert f"(pid {crew[which].pid}) ended unexpectedly with SIGKILL" in err.splitlines()[-1]


@pytest.mark.parametrize("stage", ["connecting", "waiting", "sending"])
def test_a_killed_sender_leaves_no_process(stage: str, tmp_path: Path) -> None:
    with serving() as serve:
        plan, log = busy_plan(tmp_path, serve.address), tmp_path / "s.rec"
        later = ("--start-at", time.time_ns() + 20_000 * MS) if stage == "waiting" else ()
        with running(plan, log, "--workers", 2, *later) as process:
            wait_until(lambda: len(children(process)) == 3)
            if stage == "sending":
                wait_for_log(log)
            if stage != "connecting":
                time.sleep(0.3)
            crew = children(process)
            process.kill()
            assert gone(crew)
        assert serve.end()["malformed"] == 0


@pytest.mark.parametrize("crew", [("--workers", 2), ("--threads", 2)])
def test_a_killed_receiver_leaves_no_process(crew: tuple[object, ...], tmp_path: Path) -> None:
    with serving(*crew) as serve, running(busy_plan(tmp_path, serve.address), tmp_path / "s.rec") as process:
        wait_for_flows(tmp_path / "s.rec")
        workers = children(serve.process)
        serve.process.kill()
        assert gone(workers)
        wait_for_flows(tmp_path / "s.rec", "failed")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "flows failed" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_process_of_the_receiver_killed_ends_it_with_a_sentence() -> None:
    with serving("--workers", 2) as serve:
        workers = children(serve.process)
        workers[1].kill()
        out, err = serve.process.communicate(timeout=10)
        assert gone(workers)
    assert serve.process.returncode == 1
    assert out == ""
    assert err.splitlines()[-1].startswith("ringtap: one of its processes")
    assert "SIGKILL" in err


def test_a_full_disk_ends_the_receiver_with_a_sentence(tmp_path: Path) -> None:
    """/dev/full takes the log's place once its header stands."""
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with serving("--log", tmp_path / "r.rec", command=[sys.executable, "-c", FULL_DISK]) as serve:
        plan = plan_of(tmp_path / "p.plan", [Flow(MS, "", serve.address, 10)], 2 * MS)
        send(plan)
        _, err = serve.process.communicate(timeout=10)
    assert serve.process.returncode == 1
    assert "Traceback" not in err
    assert "No space left on device" in err.splitlines()[-1]


def test_a_log_that_goes_away_is_a_sentence(tmp_path: Path) -> None:
    with serving() as serve, running(busy_plan(tmp_path, serve.address), tmp_path / "s.rec") as process:
        wait_for_log(tmp_path / "s.rec")
        (tmp_path / "s.rec").unlink()  # its processes hold it open, or are about to open it
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    assert process.returncode in (0, 1)
    assert "Traceback" not in err


def line(*values: object) -> str:
    return "\t".join(map(str, values)) + "\n"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda address, other: line("x", "-", address, 10, "-"), "line 1002"),
        (lambda address, other: line(5, "-", address, 10, "-"), "is before the line above"),
        (lambda address, other: line(550 * MS, "-", "nowhere:1", 10, "-"), "line 1002"),
        (lambda address, other: line(550 * MS, "127.0.0.7", address, 10, "-"), "line 1002"),
        (lambda address, other: line(550 * MS, "-", other, 10, "-"), "changed"),
        (lambda address, other: line(550 * MS, "-", address, 10, 0), "changed"),
        (lambda address, other: "\x00\xff", "p.plan"),
    ],
    ids=["no number", "order", "destination", "source", "a route that was not there", "waits", "bytes"],
)
def test_a_plan_edited_after_its_check_is_a_sentence(
    edit: Callable[[str, str], str], words: str, tmp_path: Path
) -> None:
    """It is read again, in parts, while it is sent: lines further on than what was read ahead can still change."""
    with serving() as serve, serving() as another:
        flows = [Flow(number * MS // 2, "", serve.address, 10) for number in range(1000)]
        about = {"destinations": [serve.address, another.address]}
        plan = plan_of(tmp_path / "p.plan", flows, 600 * MS, **about)
        command = [sys.executable, "-c", IN_HALVES, str(tmp_path / "edited"), "send", str(plan)]
        command += ["--json", "--log", str(tmp_path / "s.rec")]
        with ended(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)) as process:
            wait_until((tmp_path / "s.rec").exists, 30)
            with plan.open("a", encoding="latin-1") as file:
                file.write(edit(serve.address, another.address))
            (tmp_path / "edited").touch()
            _, err = process.communicate(timeout=20)
    assert "Traceback" not in err, err
    assert process.returncode == 1
    assert words in err.splitlines()[-1]
    sent = [row["flow"] for row in by_flow(tmp_path / "s.rec")]
    assert sent == list(range(len(sent)))  # what was sent before is accounted for
    assert len(sent) > 600  # the file is read 8 kB ahead, which are some 300 lines


def without_rights(files: int) -> Callable[[], None]:
    """Run before a command: so many open files and no way to raise the limit, for root neither."""

    def lower() -> None:
        drop_bounding, sys_resource = 24, 24  # PR_CAPBSET_DROP, CAP_SYS_RESOURCE
        ctypes.CDLL(None).prctl(drop_bounding, sys_resource, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    return lower


def at_once(folder: Path, address: str, count: int) -> Path:
    return plan_of(folder / "once.plan", [Flow(0, "", address, 10)] * count, 10 * MS)


@pytest.mark.parametrize("mode", ["kept", "new"])
def test_more_flows_at_once_than_open_files_are_refused_beforehand(mode: str, tmp_path: Path) -> None:
    with serving() as serve:
        plan = at_once(tmp_path, serve.address, 400)
        arguments = ("send", plan, "--connections", mode, "--log", tmp_path / "s.rec")
        done = traffic(*arguments, expect=2, preexec_fn=without_rights(400))
        assert serve.end()["connections"] == 0
    complaint = done.stderr.splitlines()[-1]
    assert "starts 400 flows at once, but a process may open 400 files here" in complaint
    assert "ulimit -n" in complaint
    assert not (tmp_path / "s.rec").exists()


@pytest.mark.parametrize("mode", ["kept", "new"])
def test_just_as_many_as_open_files_allow_are_sent(mode: str, tmp_path: Path) -> None:
    with serving() as serve:
        plan = at_once(tmp_path, serve.address, 400)
        done = traffic("send", plan, "--connections", mode, "--json", preexec_fn=without_rights(400 + 128))
        assert json.loads(done.stdout)["finished"] == 400
        serve.end()


def test_more_flows_at_once_than_local_ports_are_refused_beforehand(tmp_path: Path) -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ports = last - first + 1
    with serving() as serve:
        done = traffic("send", at_once(tmp_path, serve.address, ports + 1), "--log", tmp_path / "s.rec", expect=2)
        assert serve.end()["connections"] == 0
    complaint = done.stderr.splitlines()[-1]
    # Where files are fewer than ports, and this user cannot have more, that is what is said
    assert f"starts {ports + 1} flows at once" in complaint
    assert ("local ports" if _may_open(ports + 1000) else "files here") in complaint
    assert (soft, hard) == resource.getrlimit(resource.RLIMIT_NOFILE)


def _may_open(files: int) -> bool:
    load = "import sys; from ringtap.trafficgen.worker_processes import raise_file_limit"
    code = f"{load}; sys.exit(raise_file_limit({files}) < {files})"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_receiver_with_few_files_takes_what_it_can(tmp_path: Path) -> None:
    """It turns away connections beyond its files, in words; the flows go over those that it has."""
    process: Any = subprocess.Popen(
        [sys.executable, "-m", "ringtap.cli", "traffic", "serve", "--bind", "127.0.0.1:0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=without_rights(100),  # noqa: PLW1509
    )
    try:
        address = next(words for words in process.stderr if words.startswith("listening")).split()[-1]
        flows = [Flow(number * MS, "", address, 2000) for number in range(100)]
        summary, _ = send(plan_of(tmp_path / "p.plan", flows, 100 * MS))
        process.terminate()
        received = json.loads(process.communicate(timeout=10)[0])
    finally:
        process.kill()
        process.communicate()
    assert received["refused"] > 0
    assert 0 < received["connections"] <= 36  # 64 files are for other things
    assert summary["finished"] == received["flows"] == 100
