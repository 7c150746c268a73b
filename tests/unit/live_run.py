"""A run directory as the agents write it, record by record, for tests of the live view."""

import contextlib
import ipaddress
import json
from pathlib import Path

from ringtap.core.append_only_logs import Field, JsonLinesWriter, RecordWriter
from ringtap.core.run_directory import RunDirectory, write_json

T = [Field("t_ns", "<i8", "ns", "time"), Field("mono_ns", "<i8", "ns", "time")]
STEPS = [Field("step", "<i8", "", "index"), Field("optimizer", "<i8", "", "index")]
STEPS += [Field(name, "<i8", "ns", "time") for name in ("start_ns", "end_ns", "start_mono_ns", "end_mono_ns")]
STEPS += [Field("kind", "<i8", "", "index"), Field("backwards", "<i8", "", "gauge")]
DDP = [Field("iteration", "<i8", "", "index"), Field("module", "<i8", "", "index")]
DDP += [Field(f"{name}_ns", "<i8", "ns", "time") for name in ("forward_start", "backward_start", "backward_end")]
DDP += [Field(f"{name}_ns", "<i8", "ns", "time") for name in ("comm_start", "comm_end")]
DDP += [Field(f"{name}_ns", "<i8", "ns", "gauge") for name in ("forward", "backward", "comm", "overlap")]
_U4 = ["rqueue", "wqueue", "ca_state", "retransmits", "rtt_us", "rttvar_us", "snd_cwnd", "lost", "total_retrans"]
_U4 += ["notsent_bytes"]
_U8 = ["delivery_rate_bytes_per_s", "bytes_acked", "bytes_received", "bytes_sent", "bytes_retrans"]
SOCKETS = [
    *T,
    Field("family", "<u1", "", "index"),
    Field("state", "<u1", "", "gauge"),
    Field("sport", "V2", "", "index"),
    Field("dport", "V2", "", "index"),
    Field("source", "V16", "", "index"),
    Field("destination", "V16", "", "index"),
    Field("interface", "<u4", "", "index"),
    Field("cookie", "<u8", "", "index"),
    Field("inode", "<u4", "", "index"),
    *(Field(name, "<u4", "", "gauge") for name in _U4),
    *(Field(name, "<u8", "bytes", "counter", 64) for name in _U8),
]
QDISC = [*T, *(Field(name, "<u4", "", "index") for name in ("interface", "handle", "parent"))]
QDISC += [Field("bytes", "<u8", "bytes", "counter", 64), Field("packets", "<u4", "packets", "counter", 32)]
QDISC += [Field(name, "<u4", "", "gauge") for name in ("backlog_bytes", "backlog_packets")]
QDISC += [Field(name, "<u4", "packets", "counter", 32) for name in ("drops", "overlimits", "requeues")]
PROCESSES = [*T, Field("pid", "<u4", "", "index"), Field("cpu_s", "<f8", "s", "counter")]
PROCESSES += [Field("rss_bytes", "<u8", "bytes", "gauge"), Field("threads", "<u4", "", "gauge")]
PROCESSES += [Field("run_delay_s", "<f8", "s", "counter")]
NIC_COLUMNS = ("rx_bytes", "tx_bytes", "rx_packets", "tx_packets", "rx_errors", "tx_errors", "rx_drops", "tx_drops")
START_NS = 1_800_000_000 * 10**9


def nic_fields(*nics: str) -> list[Field]:
    return [*T, *(Field(f"{nic}.{name}", "<u8", "bytes", "counter", 64) for nic in nics for name in NIC_COLUMNS)]


class NodeWriter:
    """One node's folder; its time is set by ``at`` in seconds from the run's beginning."""

    def __init__(self, run: Path, name: str, boot_ns: int = 5 * 10**9) -> None:
        self.name, self.folder, self._boot_ns = name, run / "nodes" / name, boot_ns
        self.folder.mkdir(parents=True)
        self._files: dict[str, RecordWriter] = {}
        self._lines: dict[str, JsonLinesWriter] = {}

    def t(self, at: float) -> tuple[int, int]:
        return START_NS + round(at * 1e9), self._boot_ns + round(at * 1e9)

    def node(self, **item: object) -> None:
        write_json(self.folder / "node.json", item)

    def records(self, path: str, fields: list[Field], *rows: tuple[float, ...], **about: object) -> None:
        if path not in self._files:
            about = {"collector": path.split("/", maxsplit=1)[0], "every_s": 0.1} | about
            self._files[path] = RecordWriter(self.folder / path, fields, about)
        self._files[path].append_many(rows)

    def line(self, name: str, **item: object) -> None:
        if name not in self._lines:
            self._lines[name] = JsonLinesWriter(self.folder / name)
        self._lines[name].append(item)

    def step(
        self,
        rank: int,
        pid: int,
        step: int,
        at: float,
        optimizer: int = 0,
        kind: int = 0,
        world: int = 2,
        **about: object,
    ) -> None:
        t, mono = self.t(at)
        row = (step, optimizer, t - 10**6, t, mono - 10**6, mono, kind, 1)
        self.records(f"steps/rank{rank}-{pid}.rec", STEPS, row, rank=rank, world_size=world, **about)

    def nic(self, at: float, **counters: tuple[int, int]) -> None:
        """Bytes received and sent of each interface."""
        row = [*self.t(at)]
        for rx, tx in counters.values():
            row += [rx, tx, rx // 1500, tx // 1500, 0, 0, 0, 0]
        self.records("nic/nic.rec", nic_fields(*counters), tuple(row))

    def socket(self, at: float, cookie: int, ends: tuple[str, int, str, int], state: int = 1, **values: int) -> None:
        source, sport, destination, dport = ends
        packed = [ipaddress.ip_address(address).packed for address in (source, destination)]
        row = [*self.t(at), 2 if len(packed[0]) == 4 else 10, state, sport.to_bytes(2, "big"), dport.to_bytes(2, "big")]
        row += [address.ljust(16, b"\0") for address in packed]
        row += [2, cookie, values.pop("inode", cookie)]
        row += [values.pop(name, 0) for name in (*_U4, *_U8)]
        assert not values, values
        self.records("sockets/sockets.rec", SOCKETS, tuple(row))

    def qdisc(self, at: float, sent: int, backlog: int, drops: int, interface: int = 2) -> None:
        row = (*self.t(at), interface, 0x10000, 0xFFFFFFFF, sent, sent // 1500, backlog, backlog // 1500, drops, 0, 0)
        about = {"interfaces": {"2": "eth0"}, "kinds": {f"2:{0x10000}": "tbf"}}
        self.records("qdisc/qdisc.rec", QDISC, row, **about)

    def host(self, at: float, busy: list[float], retransmitted: int) -> None:
        fields = [*T, *(Field(f"cpu{core}.busy_s", "<f8", "s", "counter") for core in range(len(busy)))]
        fields += [Field(f"memory.{name}_bytes", "<u8", "bytes", "gauge") for name in ("available", "total")]
        fields += [Field(f"tcp.segments_{name}", "<u8", "", "counter", 64) for name in ("sent", "retransmitted")]
        row = (*self.t(at), *busy, 6 * 10**9, 8 * 10**9, round(at * 1000), retransmitted)
        self.records("host/host.rec", fields, row)

    def process(self, at: float, pid: int, cpu_s: float) -> None:
        self.records("host/processes.rec", PROCESSES, (*self.t(at), pid, cpu_s, 500_000_000, 12, 0.0))

    def done(self) -> None:
        (self.folder / "DONE").touch()

    def close(self) -> None:
        for file in (*self._files.values(), *self._lines.values()):
            file.close()
        self._files.clear()
        self._lines.clear()


class RunWriter:
    """A run directory of some nodes; a context manager that closes its files."""

    def __init__(self, path: Path, *names: str) -> None:
        self.run = RunDirectory.create(path, "job", ["ringtap", "run"], 0, created_ns=START_NS)
        self.run.info["created_ns"] = START_NS
        self.run.save()
        self.path = path
        self._stack = contextlib.ExitStack()
        self.nodes = {name: NodeWriter(path, name) for name in names}

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes.values():
            node.close()

    def add(self, name: str) -> NodeWriter:
        self.nodes[name] = NodeWriter(self.path, name)
        return self.nodes[name]

    def finish(self, status: str = "complete", why: str = "") -> None:
        for node in self.nodes.values():
            node.done()
        self.run.finish(status, why)  # type: ignore[arg-type]

    def mark(self, at: float, text: str) -> None:
        with (self.path / "marks.jsonl").open("a") as file:
            file.write(json.dumps({"t_ns": START_NS + round(at * 1e9), "text": text}) + "\n")


GRADIENTS = 12_600_000
PATHS = {"S0": "10.77.0.1", "S1": "10.77.0.2"}


def second_of_training(run: RunWriter, second: int, iteration_s: float = 0.25) -> None:
    """Both nodes S0 and S1, one rank each, for the second that ends at ``second``; S2 sends cross traffic to S0."""
    begin, samples, per_second = second - 1, 10, round(1 / iteration_s)
    for rank, (name, node) in enumerate(run.nodes.items()):
        other = "S1" if name == "S0" else "S0"
        pid, cookie = 100 + rank, 1000 + rank
        if second == 1:
            node.node(
                status="running",
                jobs=[{"pid": pid, "command": ["python", "train.py"], "rank": rank}],
                collectors={
                    "nic": {"state": "ok", "reason": "", "every_s": 0.1, "missed_samples": 0},
                    "sockets": {"state": "ok", "reason": "", "every_s": 0.1, "missed_samples": 2},
                    "gpu": {"state": "unavailable", "reason": "no NVIDIA driver", "remedy": "", "every_s": 0.1},
                },
                before={"nics": {"eth0": {"speed": 10000, "driver": "mlx5_core"}}},
            )
            node.line(
                "sockets/owners.jsonl", t_ns=START_NS, inode=cookie, pid=pid, rank=rank, command="python train.py"
            )
            node.line("host/processes.jsonl", t_ns=START_NS, pid=pid, parent=1, rank=rank, command="python train.py")
        for number in range(1, samples + 1):
            at = begin + number / samples
            sent = round(GRADIENTS * at / iteration_s)
            node.nic(at, lo=(7, 7), eth0=(sent, sent))
            ends = (PATHS[name], 40000, PATHS[other], 29500)
            ends = ends if rank == 0 else (PATHS[name], 29500, PATHS[other], 40000)
            node.socket(
                at, cookie, ends, bytes_acked=sent, bytes_received=sent, rtt_us=250, snd_cwnd=40, notsent_bytes=99
            )
            if rank == 0:
                values = {"bytes_received": round(at * 50e6), "inode": 0}
                node.socket(at, 7, (PATHS["S0"], 5201, "10.77.0.3", 50001), **values)
            node.qdisc(at, sent, 30_000, 5 * second)
            node.host(at, [at * 0.9, at * 0.25], 3 * second)
            node.process(at, pid, at * 1.1)
        for number in range(per_second):
            step = begin * per_second + number
            at = begin + (number + 1) * iteration_s - 0.01 + 0.002 * rank
            node.step(rank, pid, step, at)
            t = node.t(at)[0]
            row = (step, 0, t, t, t, t, t, 20_000_000, 60_000_000, 90_000_000, 45_000_000)
            node.records(f"steps/rank{rank}-{pid}.ddp.rec", DDP, row)
