"""Made-up jobs in the documented formats, through the real writers, whose every number is known."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtap.core.append_only_logs import Field, JsonLinesWriter, RecordWriter, open_records
from ringtap.core.run_directory import RunDirectory, write_json

START_NS = 1_700_000_000_000_000_000
MS = 1_000_000
STEP_NAMES = ("step", "optimizer", "start_ns", "end_ns", "start_mono_ns", "end_mono_ns", "kind", "backwards")
DDP_NAMES = (
    *("iteration", "module", "forward_start_ns", "backward_start_ns", "backward_end_ns", "comm_start_ns"),
    *("comm_end_ns", "forward_ns", "backward_ns", "comm_ns", "overlap_ns", "t_ns", "mono_ns"),
)
TIMES = [Field("t_ns", "<i8", "ns", "time"), Field("mono_ns", "<i8", "ns", "time")]
SOCKET_COUNTERS = (
    *("bytes_acked", "bytes_retrans", "bytes_received", "total_retrans", "delivered_ce"),
    *("busy_time_us", "rwnd_limited_us", "sndbuf_limited_us", "dsack_dups"),
)
SOCKET_FIELDS = [
    *TIMES,
    Field("family", "<u1", "", "index"),
    Field("state", "<u1", "", "gauge"),
    Field("sport", "V2", "", "index"),
    Field("dport", "V2", "", "index"),
    Field("source", "V16", "", "index"),
    Field("destination", "V16", "", "index"),
    Field("cookie", "<u8", "", "index"),
    Field("inode", "<u4", "", "index"),
    Field("rtt_us", "<u4", "us", "gauge"),
    Field("min_rtt_us", "<u4", "us", "gauge"),
    *(Field(name, "<u8", "", "counter", 64) for name in SOCKET_COUNTERS),
]
ESTABLISHED, GONE = 1, 0


def address_bytes(text: str) -> bytes:
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    return socket.inet_pton(family, text).ljust(16, b"\0")


@dataclass
class Socket:
    """One end of a connection as a node sees it."""

    cookie: int
    local: tuple[str, int]
    remote: tuple[str, int]
    counters: dict[str, int] = field(default_factory=dict)
    state: int = ESTABLISHED

    @property
    def inode(self) -> int:
        return 1000 + self.cookie

    def record(self, t_ns: int) -> tuple[object, ...]:
        family = 10 if ":" in self.local[0] else 2
        ports = [struct.pack(">H", end[1]) for end in (self.local, self.remote)]
        ends = [address_bytes(end[0]) for end in (self.local, self.remote)]
        counts = [self.counters.get(name, 0) for name in SOCKET_COUNTERS]
        return (t_ns, t_ns - START_NS, family, self.state, *ports, *ends, self.cookie, self.inode, 200, 100, *counts)


def write_run_delays(node: Path, pid: int, share: float, seconds: int) -> None:
    """Samples of a process that waits for a processor for a share of the time, once a second; NaN: not counted."""
    fields = [*TIMES, Field("pid", "<u4", "", "index"), Field("cpu_s", "<f8", "s", "counter")]
    fields.append(Field("run_delay_s", "<f8", "s", "counter"))
    writer = RecordWriter(node / "host" / "processes.rec", fields, {"every_s": 1.0})
    for at_s in range(-1, seconds):
        t_ns = START_NS + at_s * 10**9
        writer.append_many([(t_ns, t_ns - START_NS, pid, 0.0, 5 + share * at_s)])
    writer.close()


class Node:
    """Writes one node's logs."""

    def __init__(self, run: RunDirectory, name: str) -> None:
        self.path, self.name = run.node(name), name
        self.collectors: dict[str, dict[str, object]] = {}

    def steps(
        self,
        rank: int,
        records: list[tuple[int, ...]],
        pid: int | None = None,
        world_size: int | None = None,
        age_ns: int | None = None,
    ) -> None:
        """Step records in the order of STEP_NAMES; CLOCK_MONOTONIC as 0 follows from CLOCK_REALTIME."""
        path = self.path / "steps" / f"rank{rank}-{pid or 100 + rank}.rec"
        about = {"rank": rank, "pid": pid or 100 + rank}
        about |= {} if world_size is None else {"world_size": world_size}
        about |= {} if age_ns is None else {"age_ns": age_ns}
        writer = RecordWriter(path, [Field(name, "<i8", "", "gauge") for name in STEP_NAMES], about)
        writer.append_many(
            [(*one[:4], one[4] or one[2] - START_NS, one[5] or one[3] - START_NS, *one[6:]) for one in records]
        )
        writer.close()

    def ddp(self, rank: int, records: list[tuple[int, ...]], buckets: list[int], pid: int | None = None) -> None:
        """DDP's records in the order of DDP_NAMES, and its buckets at the first one."""
        stem = self.path / "steps" / f"rank{rank}-{pid or 100 + rank}"
        fields = [Field(name, "<i8", "", "gauge") for name in DDP_NAMES]
        writer = RecordWriter(stem.with_name(stem.name + ".ddp.rec"), fields, {})
        writer.append_many(records)
        writer.close()
        lines = JsonLinesWriter(stem.with_name(stem.name + ".buckets.jsonl"))
        lines.append({"t_ns": records[0][4], "module": 0, "bucket_bytes": buckets})
        lines.close()

    def sockets(
        self, records: list[tuple[object, ...]], every_s: float, owners: dict[int, int | None], **more: object
    ) -> None:
        """Socket records, and ranks by cookie; of a socket without a rank, the owner is not recorded."""
        about = {"collector": "sockets", "every_s": every_s} | more
        writer = RecordWriter(self.path / "sockets" / "sockets.rec", SOCKET_FIELDS, about)
        writer.append_many(records)  # type: ignore[arg-type]
        writer.close()
        lines = JsonLinesWriter(self.path / "sockets" / "owners.jsonl")
        for cookie, rank in owners.items():
            if rank is None:
                continue
            owner = {"pid": 100 + rank, "rank": rank, "command": "python train.py"}
            lines.append({"t_ns": START_NS, "inode": 1000 + cookie} | owner)
        lines.close()

    def wide(self, relative: str, columns: dict[str, str], rows: list[tuple[float, ...]], **about: object) -> None:
        """A log with one record a sample; columns by name and kind, rows start with the time."""
        fields = [
            *TIMES,
            *(Field(name, "<u8" if kind == "counter" else "<f8", "", kind, 64) for name, kind in columns.items()),  # type: ignore[arg-type]
        ]
        writer = RecordWriter(self.path / relative, fields, dict(about))
        writer.append_many([(row[0], row[0] - START_NS, *row[1:]) for row in rows])
        writer.close()

    def clock(self, offset_ns: int, error_ns: int, reference: str, drift_ppm: float = 0.0) -> None:
        fit = {"t0_ns": START_NS, "offset_ns": offset_ns, "drift_ppm": drift_ppm, "error_ns": error_ns}
        (self.path / "clock").mkdir(exist_ok=True)
        write_json(self.path / "clock" / "clock.json", {"reference": reference, "measurements": [], "fit": fit})

    def finish(self, **more: object) -> None:
        write_json(self.path / "node.json", {"status": "complete", "why": "", "collectors": self.collectors} | more)
        (self.path / "DONE").touch()


@dataclass
class Truth:
    """What a job of `write_ddp_job` really did."""

    iterations: int = 20
    iteration_ms: int = 200
    compute_ms: tuple[int, ...] = (100, 130)  # of each rank; the longest one is the slowest
    network_ms: int = 20  # exposed communication of the slowest rank
    gradient_bytes: int = 4_000_000
    cross_bytes: int = 1_000_000  # an iteration
    resent_bytes: int | None = None  # that rank 0 sends again in an iteration; None: 1448 of each million
    every_ms: int = 10
    busy_ms: tuple[float, ...] = ()  # in an iteration, of each rank's connection to the next one; () if not recorded
    offsets_ns: tuple[int, ...] = (0, 5_000_000)
    error_ns: int = 10_000
    is_on_gpu: bool = False  # then DDP's times are those at which the host queued the work
    slow: tuple[int, int, int, int] = (0, 0, 0, 0)  # a rank computes so many ms longer from one iteration to another

    @property
    def rank_bytes(self) -> int:
        """By equation 3.1."""
        count = len(self.compute_ms)
        return 2 * (count - 1) * self.gradient_bytes // count


def as_horovod(path: Path) -> None:
    """Make a job of `write_ddp_job` one of Horovod, whose forward passes are not timed."""
    for log in path.glob("nodes/*/steps/*.ddp.rec"):
        file = open_records(log)
        columns = [field.name for field in file.fields]
        writer = RecordWriter(log.with_name(log.name.replace(".ddp.", ".horovod.")), list(file.fields), file.about)
        for record in file.tail():
            values = dict(zip(columns, record, strict=True)) | {"forward_start_ns": 0, "forward_ns": -1}
            writer.append(*values.values())
        writer.close()
        log.unlink()


def write_ddp_job(path: Path, truth: Truth, *, status: str = "complete", sockets: bool = True) -> Truth:
    """A DDP job with a rank on each of several nodes, cross traffic from the first to the second, and clocks apart.

    An iteration begins with compute. All ranks' communication ends ``network_ms`` after the slowest rank was ready; the
    rest of the iteration is the optimizer's step. Bytes move evenly while the slowest rank's communication is exposed.
    """
    run = RunDirectory.create(path, "job", ["ringtap", "run", "--", "torchrun", "train.py"], 1)
    ready_ms = max(truth.compute_ms)
    nodes = [Node(run, f"n{rank}") for rank in range(len(truth.compute_ms))]
    for rank, (node, compute_ms) in enumerate(zip(nodes, truth.compute_ms, strict=True)):
        begin = START_NS + 50 * MS + truth.offsets_ns[rank]
        steps, ddp = [], []
        slow_rank, first, after, by_ms = truth.slow
        for number in range(truth.iterations):
            at = begin + (number * truth.iteration_ms + by_ms * min(max(number - first, 0), after - first)) * MS
            longer_ms = by_ms if first <= number < after else 0
            done, end = at + (ready_ms + longer_ms + truth.network_ms) * MS, at + (truth.iteration_ms + longer_ms) * MS
            steps.append((number, 0, done, end, done - START_NS, end - START_NS, 0, 1))
            own_ms = compute_ms + (longer_ms if rank == slow_rank else 0)
            forward, ready = at + 30 * MS, at + own_ms * MS
            comm = ready - 20 * MS
            times = (at, forward, ready, comm, done)
            spans = (30 * MS, (own_ms - 30) * MS, done - comm, ready - comm)
            if truth.is_on_gpu:  # in 4 ms, long before the device is done
                times = (at, at + MS, 0, at + 3 * MS, at + 4 * MS)
            ddp.append((number, 0, *times, *spans, done, done - START_NS))
        node.steps(rank, steps)
        node.ddp(rank, ddp, [truth.gradient_bytes // 4, truth.gradient_bytes - truth.gradient_bytes // 4])
        node.clock(truth.offsets_ns[rank], 0 if rank == 0 else truth.error_ns, "n0")
        if sockets:
            _write_network(node, nodes, rank, truth)
        node.finish(before={"cpus": 4})
    run.finish(status)  # type: ignore[arg-type]
    return truth


def rewrite(log: Path, change: Callable[[list[list[Any]], dict[str, int]], Iterable[Sequence[Any]]]) -> None:
    """Replace the records of a log by what ``change`` makes of them and of the fields' positions."""
    file = open_records(log)
    records = [list(record) for record in file.tail()]
    log.unlink()
    writer = RecordWriter(log, list(file.fields), file.about)
    writer.append_many([tuple(record) for record in change(records, file.index)])
    writer.close()


def moved_share(t_ms: float, truth: Truth) -> float:
    """How many iterations' worth of bytes had moved at a time after the start, by the reference clock."""
    since = t_ms - 50
    if since <= 0:
        return 0.0
    whole, within = divmod(since, truth.iteration_ms)
    if whole >= truth.iterations:
        return float(truth.iterations)
    part = (within - max(truth.compute_ms)) / truth.network_ms
    return whole + min(1.0, max(0.0, part))


def _write_network(node: Node, nodes: list[Node], rank: int, truth: Truth) -> None:
    """Sockets and interface counters of a node: a ring, cross traffic between the first two nodes, a little else."""
    count = len(nodes)
    address = [f"10.0.{number // 250}.{number % 250 + 1}" for number in range(count)]
    onward, back = (rank + 1) % count, (rank - 1) % count
    ring_out = Socket(1, (address[rank], 40_000 + rank), (address[onward], 50_000 + onward))
    ring_in = Socket(2, (address[rank], 50_000 + rank), (address[back], 40_000 + back))
    cross = Socket(3, (address[rank], 5001 if rank else 45_000), (address[1 - rank], 45_000 if rank else 5001))
    other = Socket(4, (address[rank], 22), ("192.0.2.7", 33_000))
    mine = [ring_out, ring_in, other, *([cross] if rank < 2 else [])]
    samples_ms = range(0, truth.iterations * truth.iteration_ms + 100, truth.every_ms)
    records: list[tuple[object, ...]] = []
    nic: list[tuple[float, ...]] = []
    last: dict[int, tuple[object, ...]] = {}
    for t_ms in samples_ms:
        t_ns = START_NS + t_ms * MS + truth.offsets_ns[rank]
        share = moved_share(t_ms, truth)
        ring = round(share * truth.rank_bytes)
        crossed = round(truth.cross_bytes * min(max(0.0, (t_ms - 50) / truth.iteration_ms), truth.iterations))
        again = 1448 * (ring // 1_000_000) if truth.resent_bytes is None else round(share * truth.resent_bytes)
        again = again if rank == 0 else 0
        ring_out.counters = {
            "bytes_acked": 10_000 + ring,
            "bytes_retrans": again,
            "total_retrans": again // 1448,
            "busy_time_us": round(share * truth.busy_ms[rank] * 1000) if truth.busy_ms else 0,
        }
        ring_in.counters = {"bytes_received": 10_000 + ring}
        cross.counters = {"bytes_acked" if rank == 0 else "bytes_received": crossed}
        other.counters = {"bytes_acked": 7_000}
        for one in mine:
            record = one.record(t_ns)
            if last.get(one.cookie) != record[2:]:  # one that has not changed is not written
                records.append(record)
            last[one.cookie] = record[2:]
        sent = ring + again + (crossed if rank == 0 else 0)
        got = ring + (crossed if rank == 1 else 0)
        packets = [-(-amount // 1448) for amount in (sent, got)]
        nic.append((t_ns, got + 66 * packets[1], packets[1], sent + 66 * packets[0], packets[0]))
    node.sockets(records, truth.every_ms / 1000, {1: rank, 2: rank, 3: None, 4: None})
    names = ("eth0.rx_bytes", "eth0.rx_packets", "eth0.tx_bytes", "eth0.tx_packets")
    node.wide("nic/nic.rec", dict.fromkeys(names, "counter"), nic)


def pcap(path: Path, packets: list[tuple[int, tuple[str, int], tuple[str, int], int]]) -> None:
    """A capture of Ethernet frames with IPv4 and TCP; packets are (time in ns, source, destination, payload).

    Each packet continues its flow, and has its number as identification. A negative payload repeats that many bytes.
    """
    data = struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 128, 1)
    following: dict[tuple[object, ...], int] = {}
    for number, (t_ns, source, destination, amount) in enumerate(packets):
        payload, sent = abs(amount), following.get((source, destination), 0)
        sequence = sent + min(amount, 0)
        following[source, destination] = sequence + payload
        ends = b"".join(bytes(map(int, end[0].split("."))) for end in (source, destination))
        ip = struct.pack(">BBHHHBBH", 0x45, 0, 40 + payload, number % 2**16, 0, 64, 6, 0)
        frame = b"\0" * 12 + b"\x08\x00" + ip + ends
        frame += struct.pack(">HHIIBBHHH", source[1], destination[1], sequence % 2**32, 0, 0x50, 16, 0, 0, 0)
        data += struct.pack("<IIII", t_ns // 10**9, t_ns % 10**9, len(frame), len(frame) + payload) + frame
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def captured_twice(data: bytes) -> bytes:
    """A pcap file whose packets were all captured at two interfaces."""
    made, at = data[:24], 24
    while at < len(data):
        size = 16 + struct.unpack_from("<I", data, at + 8)[0]
        made += 2 * data[at : at + size]
        at += size
    return made
