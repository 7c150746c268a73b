"""Host load: of this machine, and on a written-down /proc."""

import contextlib
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringtap.collectors.collector_interface import Context
from ringtap.collectors.host import COUNTERS, HostCollector, read_counters
from ringtap.collectors.process_facts import Process, command_of, rank_of
from ringtap.core.append_only_logs import open_records, read_json_lines

pytestmark = pytest.mark.shares

SNMP = """Ip: Forwarding DefaultTTL
Ip: 1 64
Tcp: RtoAlgorithm RtoMin MaxConn ActiveOpens PassiveOpens AttemptFails EstabResets CurrEstab InSegs OutSegs RetransSegs
Tcp: 1 200 -1 11 12 13 14 15 16 17 18
"""
NETSTAT = """TcpExt: SyncookiesSent TCPFastRetrans TCPTimeouts
TcpExt: 1 2 3
IpExt: InNoRoutes InCEPkts
IpExt: 4 5
"""
BUSY = """
import sys, time
sys.stdin.readline()
begin_s = time.process_time()
while time.process_time() < begin_s + 0.5:
    pass
print("done", flush=True)
sys.stdin.read()
"""


def rows(path: Path) -> list[dict[str, Any]]:
    records = open_records(path)
    return [dict(zip([field.name for field in records.fields], row, strict=True)) for row in records.tail()]


def test_a_busy_process_shows_in_its_core_and_in_its_record(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"RANK": "5"},
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        collector = HostCollector(Context(tmp_path, 0.1, lambda: [os.getpid(), child.pid, 2**22 + 1]))
        assert collector.every_s == 1.0
        assert collector.slow
        assert collector.check().state == "ok"
        collector.start()
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        expected = psutil.Process(child.pid).memory_info().rss
        collector.sample()
    facts = collector.stop()
    assert facts["processes"] == 2
    people, _ = read_json_lines(tmp_path / "host" / "processes.jsonl")
    ours = next(one for one in people if one["pid"] == child.pid)
    assert (ours["parent"], ours["rank"]) == (os.getpid(), 5)
    assert ours["command"].startswith(sys.executable)
    seen = [row for row in rows(tmp_path / "host" / "processes.rec") if row["pid"] == child.pid]
    assert len(seen) == 2  # and none once it has ended
    assert 0.4 < seen[1]["cpu_s"] < 2
    assert seen[1]["rss_bytes"] == pytest.approx(expected, rel=0.2)
    assert seen[1]["threads"] == 1
    first, second, last = rows(tmp_path / "host" / "host.rec")
    cores = [name for name in first if name.endswith(".busy_s")]
    assert len(cores) == psutil.cpu_count()
    assert sum(second[name] - first[name] for name in cores) > 0.3
    assert last["memory.total_bytes"] == psutil.virtual_memory().total
    assert 0 < last["memory.available_bytes"] <= last["memory.total_bytes"]


def test_tcp_counters_of_an_old_kernel_that_lacks_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = tmp_path / "net"
    net.mkdir()
    (net / "snmp").write_text(SNMP)
    (net / "netstat").write_text(NETSTAT)
    monkeypatch.setattr(HostCollector, "net", net)
    counters = read_counters(net)
    assert counters["tcp.segments_received"] == 16
    assert counters["tcp.segments_sent"] == 17
    assert counters["tcp.segments_retransmitted"] == 18
    assert counters["tcp.fast_retransmits"] == 2
    assert counters["ip.congestion_experienced_received"] == 5
    collector = HostCollector(Context(tmp_path, 1))
    check = collector.check()
    assert check.state == "ok"
    assert "tcp.backlog_drops" in check.reason
    collector.start()
    collector.stop()
    records = open_records(tmp_path / "host" / "host.rec")
    names = [field.name for field in records.fields]
    assert "tcp.backlog_drops" not in names
    assert sorted(records.about["absent"] + [name for name in names if name in COUNTERS]) == sorted(COUNTERS)
    assert rows(tmp_path / "host" / "host.rec")[-1]["tcp.timeouts"] == 3


def test_without_proc_net_the_rest_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCollector, "net", tmp_path / "nothing")
    check = HostCollector(Context(tmp_path, 1)).check()
    assert check.state == "degraded"
    assert "TCP counters" in check.reason


def test_a_process_of_somebody_else_tells_nothing_and_fails_nothing(tmp_path: Path) -> None:
    assert rank_of(4711, tmp_path) is None
    assert command_of(4711, tmp_path) == ""
    with pytest.raises(FileNotFoundError):
        Process(4711, tmp_path)


def test_ranks_of_several_launchers(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    for variables, rank in (
        ("RANK=3 SLURM_PROCID=0", 3),
        ("OMPI_COMM_WORLD_RANK=12", 12),
        ("SLURM_PROCID=7 RANKING=1", 7),
        ("RANK=", None),
        ("RANK=-1", None),
        ("A", None),
    ):
        (tmp_path / "1" / "environ").write_bytes(variables.replace(" ", "\0").encode() + b"\0\xff=\xff\0")
        assert rank_of(1, tmp_path) == rank


def test_a_name_with_brackets_and_blanks_is_read_over(tmp_path: Path) -> None:
    (tmp_path / "9").mkdir()
    numbers = ["S", "5", *(str(number) for number in range(5, 60))]
    (tmp_path / "9" / "stat").write_text(f"9 (a) b (c) {' '.join(numbers)}\n")
    process = Process(9, tmp_path)
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    assert process.parent == 5
    *read, run_delay_s = process.read()
    assert read == [(14 + 15) / ticks, 24 * page, 20]  # the fields' numbers in proc(5)
    assert math.isnan(run_delay_s)
    process.close()
    (tmp_path / "9" / "schedstat").write_text("7000000000 2500000000 12\n")
    process = Process(9, tmp_path)
    assert process.read()[3] == 2.5
    process.close()


def test_a_process_that_shares_its_processor_waits_for_it(tmp_path: Path) -> None:
    one = {min(os.sched_getaffinity(0))}
    with contextlib.ExitStack() as stack:
        pids = []
        for _ in range(2):
            command = [sys.executable, "-c", "while True: pass"]
            child = stack.enter_context(subprocess.Popen(command))
            stack.callback(child.kill)
            os.sched_setaffinity(child.pid, one)
            pids.append(child.pid)
        collector = HostCollector(Context(tmp_path, 1, lambda: pids))
        collector.start()
        time.sleep(1)
        collector.stop()
    for pid in pids:
        first, last = (row["run_delay_s"] for row in rows(tmp_path / "host" / "processes.rec") if row["pid"] == pid)
        assert last - first > 0.2  # of half a second, if nothing else runs


def test_a_kernel_that_does_not_count_run_delays_is_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "run_delay_s" not in HostCollector(Context(tmp_path, 1)).check().reason
    monkeypatch.setattr(HostCollector, "proc", tmp_path)
    assert "this kernel does not count run_delay_s" in HostCollector(Context(tmp_path, 1)).check().reason


@pytest.mark.parametrize("command", [b"python\0train.py\0", b""])  # some programs blank their command line
def test_a_process_is_noted_once_its_program_is_loaded(command: bytes, tmp_path: Path) -> None:
    # until execve has set the command line and the environment, both are empty
    proc = tmp_path / "proc"
    (proc / "9").mkdir(parents=True)
    (proc / "9" / "stat").write_text(f"9 (python) S 5 {' '.join(map(str, range(5, 60)))}\n")
    for name in ("cmdline", "environ"):
        (proc / "9" / name).write_bytes(b"")
    collector = HostCollector(Context(tmp_path, 1, lambda: [9]))
    collector.proc = proc
    collector.start()
    (proc / "9" / "cmdline").write_bytes(command)
    (proc / "9" / "environ").write_bytes(b"RANK=3\0")
    collector._find_due_s = 0.0
    collector.stop()
    (person,), _ = read_json_lines(tmp_path / "host" / "processes.jsonl")
    assert person["rank"] == 3
    assert person["command"] == command.replace(b"\0", b" ").decode().strip()


def test_looking_for_processes_is_paced_by_what_it_costs(tmp_path: Path) -> None:
    calls = []

    def costly() -> list[int]:
        calls.append(1)
        end_s = time.thread_time() + 0.05
        while time.thread_time() < end_s:
            pass
        return []

    collector = HostCollector(Context(tmp_path, 1, costly))
    collector.start()
    for _ in range(5):
        collector.sample()
    collector.stop()
    assert len(calls) == 1  # 50 ms: not again within ten seconds
