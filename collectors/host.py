"""Records the load of a host: cores, memory, TCP counters and the job's processes, once a second at most.

Reading /proc/stat takes a millisecond or more on a node with a hundred cores, and its clock ticks are 10 ms: a higher
rate would cost more than it is worth.
"""

from __future__ import annotations

import contextlib
import struct
import time
from pathlib import Path
from typing import Any, Literal, cast

import psutil

from ringtap.collectors.collector_interface import Check, Context
from ringtap.collectors.kernel_files import PROC
from ringtap.collectors.process_facts import Process, command_of, counts_run_delay, rank_of
from ringtap.core.append_only_logs import Field, JsonLinesWriter, RecordWriter
from ringtap.core.errors import failure_message
from ringtap.core.run_directory_schema import HOST_REC, PROCESSES_JSONL, PROCESSES_REC, RUN_DELAY, TIME_FIELDS
from ringtap.core.units import counted

# our name -> protocol (line of the file), the kernel's name, unit, kind
COUNTERS: dict[str, tuple[str, str, str, str]] = {
    "tcp.active_opens": ("Tcp", "ActiveOpens", "connections", "counter"),
    "tcp.passive_opens": ("Tcp", "PassiveOpens", "connections", "counter"),
    "tcp.attempt_fails": ("Tcp", "AttemptFails", "connections", "counter"),
    "tcp.resets_while_established": ("Tcp", "EstabResets", "connections", "counter"),
    "tcp.established": ("Tcp", "CurrEstab", "connections", "gauge"),
    "tcp.segments_received": ("Tcp", "InSegs", "packets", "counter"),
    "tcp.segments_sent": ("Tcp", "OutSegs", "packets, without retransmissions", "counter"),
    "tcp.segments_retransmitted": ("Tcp", "RetransSegs", "packets", "counter"),
    "tcp.segments_in_error": ("Tcp", "InErrs", "packets", "counter"),
    "tcp.resets_sent": ("Tcp", "OutRsts", "packets", "counter"),
    "tcp.timeouts": ("TcpExt", "TCPTimeouts", "events", "counter"),
    "tcp.fast_retransmits": ("TcpExt", "TCPFastRetrans", "packets", "counter"),
    "tcp.slow_start_retransmits": ("TcpExt", "TCPSlowStartRetrans", "packets", "counter"),
    "tcp.lost_retransmits": ("TcpExt", "TCPLostRetransmit", "packets", "counter"),
    "tcp.syn_retransmits": ("TcpExt", "TCPSynRetrans", "packets", "counter"),
    "tcp.tail_loss_probes": ("TcpExt", "TCPLossProbes", "packets", "counter"),
    "tcp.duplicate_sacks_received": ("TcpExt", "TCPDSACKRecv", "packets", "counter"),
    "tcp.out_of_order_queued": ("TcpExt", "TCPOFOQueue", "packets", "counter"),
    "tcp.listen_overflows": ("TcpExt", "ListenOverflows", "connections", "counter"),
    "tcp.listen_drops": ("TcpExt", "ListenDrops", "connections", "counter"),
    "tcp.backlog_drops": ("TcpExt", "TCPBacklogDrop", "packets", "counter"),
    "tcp.receive_queue_drops": ("TcpExt", "TCPRcvQDrop", "packets", "counter"),
    "tcp.receive_prunes": ("TcpExt", "PruneCalled", "events", "counter"),
    "tcp.zero_window_advertised": ("TcpExt", "TCPToZeroWindowAdv", "events", "counter"),
    "ip.congestion_experienced_received": ("IpExt", "InCEPkts", "packets", "counter"),
}


def read_counters(net: Path) -> dict[str, int]:
    """Read the counters of `COUNTERS` that this kernel has, from the files ``snmp`` and ``netstat`` in a folder.

    Raises:
        OSError: a file cannot be read.
    """
    found: dict[tuple[str, str], int] = {}
    for name in ("snmp", "netstat"):
        lines = (net / name).read_text().splitlines()
        for heads, numbers in zip(lines[::2], lines[1::2], strict=False):
            protocol, _, names = heads.partition(":")
            if numbers.startswith(f"{protocol}:"):
                values = numbers.partition(":")[2].split()
                found.update({(protocol, one): int(value) for one, value in zip(names.split(), values, strict=False)})
    return {name: found[key[:2]] for name, key in COUNTERS.items() if key[:2] in found}


_MIN_EVERY_S = 1.0
_COST_SHARE = 0.005  # share of one core for finding the job's processes
_PROCESS_FIELDS = (
    *TIME_FIELDS,
    Field("pid", "<u4", "", "index"),
    Field("cpu_s", "<f8", "s", "counter"),
    Field("rss_bytes", "<u8", "bytes", "gauge"),
    Field("threads", "<u4", "threads", "gauge"),
    Field(RUN_DELAY, "<f8", "s", "counter"),
)


class HostCollector:
    """Recorder of ``host.rec``, ``processes.rec``, ``processes.jsonl`` in ``host/`` (docs/reference/collectors.md)."""

    name = "host"
    slow = True
    proc = PROC
    net = Path("/proc/net")

    def __init__(self, context: Context) -> None:
        self._folder = context.folder
        self._pids = context.pids
        self.every_s = max(context.every_s, _MIN_EVERY_S)
        self._processes: dict[int, Process] = {}
        self._refused: set[int] = set()
        self._unnamed: set[int] = set()  # processes whose command line was empty at the first look
        self._find_due_s = 0.0
        self._facts = {"processes": 0, "processes_most": 0}

    def check(self) -> Check:
        """Check which values of the host can be read."""
        try:
            cores = len(psutil.cpu_times(percpu=True))
            psutil.virtual_memory()
        except (OSError, ValueError, RuntimeError) as error:
            return Check(
                "unavailable", f"/proc/stat or /proc/meminfo cannot be read: {failure_message(error)}", "mount /proc"
            )
        absent = self._absent_counters()
        if len(absent) == len(COUNTERS):
            return Check(
                "degraded", f"{counted(cores, 'core')} and memory, but no TCP counters: {self.net} cannot be read"
            )
        absent += [] if counts_run_delay(self.proc) else [RUN_DELAY]
        missing = f"; this kernel does not count {', '.join(absent)}" if absent else ""
        return Check("ok", f"{counted(cores, 'core')}, memory, TCP counters and the job's processes{missing}")

    def start(self) -> None:
        """Open the logs and take the first sample."""
        self._cores = len(psutil.cpu_times(percpu=True))
        absent = self._absent_counters()
        self._tcp = [name for name in COUNTERS if name not in absent]
        fields = list(TIME_FIELDS)
        for core in range(self._cores):
            fields += [Field(f"cpu{core}.{what}_s", "<f8", "s", "counter") for what in ("busy", "iowait", "steal")]
        fields += [Field(f"memory.{what}_bytes", "<u8", "bytes", "gauge") for what in ("available", "total")]
        for name in self._tcp:
            _, _, unit, kind = COUNTERS[name]
            known_kind = cast(Literal["counter", "gauge"], kind)
            fields.append(Field(name, "<u8", unit, known_kind, 64 if kind == "counter" else 0))
        about = {"collector": self.name, "source": "/proc/stat, /proc/meminfo, /proc/net", "every_s": self.every_s}
        about |= {"absent": absent}
        self._pack = struct.Struct(f"<qq{3 * self._cores}dQQ{len(self._tcp)}Q").pack
        self._writer = RecordWriter(self._folder / HOST_REC, fields, about)
        about = {"collector": self.name, "source": "/proc/<pid>/stat, schedstat", "every_s": self.every_s}
        self._process_writer = RecordWriter(self._folder / PROCESSES_REC, _PROCESS_FIELDS, about)
        self._people = JsonLinesWriter(self._folder / PROCESSES_JSONL)
        self.sample()

    def sample(self) -> None:
        """Record the host and every running process of the job."""
        t_ns, mono_ns = time.time_ns(), time.monotonic_ns()
        memory = psutil.virtual_memory()
        tcp = read_counters(self.net)
        values = [number for core in self._core_times() for number in core]
        counters = [tcp.get(name, 0) for name in self._tcp]
        self._writer.append_packed(self._pack(t_ns, mono_ns, *values, memory.available, memory.total, *counters))
        if time.monotonic() >= self._find_due_s:
            self._find(t_ns)
        rows = []
        for pid, process in list(self._processes.items()):
            try:
                rows.append((t_ns, mono_ns, pid, *process.read()))
            except OSError:  # it has ended
                self._processes.pop(pid).close()
        self._process_writer.append_many(rows)

    def stop(self) -> dict[str, Any]:
        """Take a last sample and close; return the number of processes, in total and at most at once."""
        try:
            self.sample()
        finally:
            for process in self._processes.values():
                process.close()
            self._processes.clear()
            self._writer.close()
            self._process_writer.close()
            self._people.close()
        return dict(self._facts)

    def _core_times(self) -> list[tuple[float, float, float]]:
        """Return busy, I/O wait and stolen seconds of each core; zeros for as many cores as have gone offline."""
        times = [
            (core.user + core.nice + core.system + core.irq + core.softirq, core.iowait, core.steal)
            for core in psutil.cpu_times(percpu=True)
        ]
        return (times + [(0.0, 0.0, 0.0)] * self._cores)[: self._cores]

    def _find(self, t_ns: int) -> None:
        """Look for processes that the job has started since."""
        begun_s = time.thread_time()
        pids = self._pids()
        self._refused.intersection_update(pids)  # a pid may be used again
        self._unnamed.intersection_update(pids)
        for pid in pids:
            if pid in self._processes or pid in self._refused:
                continue
            try:
                process = Process(pid, self.proc)
            except OSError:  # it has ended, or it is another user's and /proc is mounted with hidepid
                self._refused.add(pid)
                continue
            command = command_of(pid, self.proc)
            if not command and pid not in self._unnamed:  # the kernel may still load its program
                self._unnamed.add(pid)
                process.close()
                continue
            self._processes[pid] = process
            who = {"pid": pid, "parent": process.parent, "rank": rank_of(pid, self.proc)}
            self._people.append(who | {"command": command, "t_ns": t_ns})
            self._facts["processes"] += 1
        self._facts["processes_most"] = max(self._facts["processes_most"], len(self._processes))
        self._find_due_s = time.monotonic() + (time.thread_time() - begun_s) / _COST_SHARE

    def _absent_counters(self) -> list[str]:
        with contextlib.suppress(OSError):
            return sorted(COUNTERS.keys() - read_counters(self.net).keys())
        return sorted(COUNTERS)
