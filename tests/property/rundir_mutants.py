"""Damaged and foreign run directories by the number, and what every reader must make of each.

python -m tests.property.rundir_mutants SEED|swaps FIRST COUNT [READER…]

Mutant N of a seed is the same in every run; with "swaps", it is the Nth pair of files in each other's place, of all
pairs of every base. A reader ends with exit code 0, or 2 and one line for the reader, and without a traceback, within
`MAX_S`, and all of them together take no more than `MAX_GROWTH_BYTES`. The last line is one JSON object; its list
"broken" names the mutants that break a rule.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import stat
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest import mock

from ringtap.agents.node.node_json import conclude, node_items
from ringtap.analysis.commands import live
from ringtap.analysis.live import plain
from ringtap.analysis.live.build_snapshot import SnapshotSource
from ringtap.analysis.live.diagnose_recent import diagnose
from ringtap.analysis.live.follow_run import RunFollower, write_mark
from ringtap.analysis.live.metrics import RunMetrics
from ringtap.analysis.live.plain import line_of
from ringtap.analysis.live.snapshot_for_browser import TableChoice, parts_of
from ringtap.analysis.live.summary import collector_states, headline, iteration_plot, job_line, throughput_plot
from ringtap.analysis.live.tables import TABLES
from ringtap.cli import main
from ringtap.core.append_only_logs import Field, RecordWriter
from ringtap.core.errors import RingtapError
from ringtap.core.run_directory import RunDirectory, write_json
from ringtap.slurm.submission_file_names import SubmitPaths
from tests.gold.analysis_sweep import write_sweep
from tests.gold.job_run import MS, START_NS, Truth, as_horovod, write_ddp_job
from tests.unit.live_run import RunWriter
from tests.unit.workload.test_workload_from_profile import ddp_lines

MAX_S = 10  # of processor time, for one reader of one mutant, which takes less than a second where nothing hangs
MANY = 100
MAX_GROWTH_BYTES = 1_500_000_000
_ROOT = Path(__file__).resolve().parents[2]
_GOLD, _RING = _ROOT / "tests" / "gold", _ROOT / "examples" / "ring.pcap.gz"
_DEEP = 100_000
_NOBODY = 65534
_HOSTILE_TEXTS = (
    "",
    "x" * 5000,
    "a\x1b[2J\r\u202e\0b",
    "$\\frac{$",
    "../../etc",
    "/",
    "..",
    "<script>",
    "{{ x }}",
    "nan",
)
_HOSTILE_NUMBERS = (
    0,
    -1,
    1,
    2,
    0.5,
    -0.0,
    1e308,
    5e-324,
    2**31,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
)
# written as they stand, where json.dumps would not
_RAW = ("NaN", "-Infinity", "1e999", "1" * 5000, "-" + "9" * 30, '"\\ud800"', '"\\udfff\\ud800"')
_PLACE = "@raw@"


def bases(folder: Path) -> list[Path]:
    """Run directories of every kind, which mutants are made from."""
    folder.mkdir(parents=True)
    job = folder / "job"
    write_ddp_job(job, Truth(iterations=34, every_ms=50))
    _enrich(job / "nodes" / "n0")
    for rank in range(2):
        lines = "".join(json.dumps(line) + "\n" for line in ddp_lines())
        (job / "nodes" / f"n{rank}" / "steps" / f"rank{rank}-{100 + rank}.profile.jsonl").write_text(lines)
    (job / "marks.jsonl").write_text(json.dumps({"t_ns": START_NS + 100 * MS, "text": "here"}) + "\n")
    _submitted(job)
    watched = folder / "watched"
    _watched(watched)
    horovod = folder / "horovod"
    write_ddp_job(horovod, Truth(iterations=34, every_ms=50))
    as_horovod(horovod)
    sweep = folder / "sweep"
    write_sweep(sweep, [("vgg16", "consistent")], loads_gbps=(0.0, 8.0, 14.0, 18.0), iterations=8)
    shutil.copyfile(sweep / "points.jsonl", sweep / "rejected.jsonl")
    parts = folder / "parts"
    _parts(parts, sweep)
    return [job, watched, sweep, parts, horovod]


def _enrich(node: Path) -> None:
    """Files that a node may have beside a job's usual logs."""
    (node / "nccl").mkdir()
    shutil.copyfile(_GOLD / "job_nccl.log", node / "nccl" / "n0.1.log")
    (node / "nccl-ras").mkdir()
    rank = {"communicator": "0xae", "size": 2, "rank": 1, "host": "10.0.0.2", "pid": 7, "state": "behind"}
    line = json.dumps({"t_ns": START_NS} | rank | {"operations": 8, "most_operations": 9})
    (node / "nccl-ras" / "ranks.jsonl").write_text(f"{line}\n")
    (node / "horovod").mkdir()
    shutil.copyfile(_GOLD / "horovod-cached.json", node / "horovod" / "timeline.json")
    (node / "sent").mkdir()
    shutil.copyfile(_GOLD / "iperf3-3.12-whole.json", node / "sent" / "iperf3.json")
    times = [Field("t_ns", "<i8", "ns", "time"), Field("mono_ns", "<i8", "ns", "time")]
    about = {"source": "sender", "origin_ns": START_NS, "destinations": ["10.0.0.2:5001"], "every_s": 0.1}
    for name in ("sent/flows.rec", "infiniband/mlx5_0-1.rec", "ethtool/eth0.rec", "gpu/gpu0.rec"):
        columns = {"infini": "port_xmit_data", "ethtoo": "rx_pause", "gpu/gp": "utilization_pct"}.get(name[:6], "bytes")
        kind = "gauge" if "pct" in columns else "counter"
        fields = [*times, Field(columns, "<u8", "4 octets", kind, 64)]  # type: ignore[arg-type]
        writer = RecordWriter(node / name, fields, about)
        writer.append_many([(START_NS + number * 50 * MS, number * 50 * MS, number * 10) for number in range(20)])
        writer.close()
    (node / "packets").mkdir()
    (node / "packets" / "eth0-0.pcap").write_bytes(gzip.decompress(_RING.read_bytes()))
    write_json(node / "packets" / "packets.json", {"tool": "tcpdump", "filter": "tcp", "dropped_by_kernel": 0})
    (node / "log").mkdir()
    (node / "log" / "job.out").write_text("step 1\nstep 2\n")
    facts = {"cpus": 4, "host": "n0", "kernel": "6.1", "nics": {"eth0": {"speed": 1000, "mtu": 1500, "driver": "x"}}}
    facts["links"] = {"eth0": {"below": [], "qdisc": "tbf", "rate_bps": 10**9}}
    collectors = {"nic": {"state": "ok", "missed_samples": 3}, "gpu": {"state": "failed", "reason": "x", "remedy": "y"}}
    jobs = [{"pid": 100, "command": ["python"], "rank": 0, "exit_code": 0, "began_ns": START_NS, "ended_ns": START_NS}]
    write_json(
        node / "node.json",
        {"status": "partial", "why": "x", "collectors": collectors, "jobs": jobs, "before": facts, "after": facts},
    )


def _watched(path: Path) -> None:
    """A run as the live view's tests write it: every kind of log."""
    with RunWriter(path, "a", "b") as run:
        for rank, node in enumerate(run.nodes.values()):
            for number in range(6):
                at = 0.2 * number
                node.step(rank, 10 + rank, number, at)
                node.nic(at, eth0=(number * 10**6, number * 10**6), lo=(0, 0))
                node.socket(at, 7, ("10.0.0.1", 1000, "10.0.0.2", 2000), bytes_acked=number * 1000, rtt_us=100)
                node.qdisc(at, number * 1000, 100, number)
                node.host(at, [number * 0.1, number * 0.2], number)
                node.process(at, 10 + rank, number * 0.1)
            node.line("sockets/owners.jsonl", inode=7, pid=10 + rank, rank=rank, command=["python", "train.py"])
            node.line("host/processes.jsonl", pid=10 + rank, rank=rank, parent=1, command="python train.py")
            fit = {"t0_ns": START_NS, "offset_ns": 10, "drift_ppm": 0.1, "error_ns": 50, "from_ns": 0}
            (node.folder / "clock").mkdir()
            write_json(
                node.folder / "clock" / "clock.json",
                {
                    "reference": "a",
                    "fit": fit,
                    "segments": [fit, fit | {"from_ns": START_NS}],
                    "steps": [{"t_ns": 1, "mono_ns": 1, "mono_before_ns": 1, "step_ns": 0}],
                }
                | {"measurements": [{"t_ns": START_NS, "offset_ns": 10, "error_ns": 50}]},
            )
            node.node(
                status="complete", why="", collectors={"nic": {"state": "ok", "every_s": 0.2}}, jobs=[{"pid": 10}]
            )
        run.finish()


def _submitted(path: Path) -> None:
    paths = SubmitPaths(path)
    paths.states.mkdir(parents=True)
    write_json(paths.request, {"jobs": [{"id": "7", "submitted_ns": 1}], "tasks": [[0]]})
    paths.state("7").write_text("1 begun on n0\n9 ended 0\n")
    paths.state("7_0").write_text("1 begun on n0\n9 ended 0\n")


def _parts(path: Path, sweep: Path) -> None:
    """A submitted sweep of two series; a part holds the sweep's points."""
    info = json.loads((sweep / "run.json").read_text())
    plan = info["plan"] | {"traffic": ["consistent", "iperf"]}
    RunDirectory.create(path, "sweep", [], 0, plan=plan).finish("running")
    _submitted(path)
    part = SubmitPaths(path).parts / "000-vgg16-consistent"
    shutil.copytree(sweep, part)
    lines = [json.loads(line) for line in (sweep / "points.jsonl").read_text().splitlines()]
    (part / "points.jsonl").write_text(
        "".join(json.dumps(line | {"step": number}) + "\n" for number, line in enumerate(lines))
    )


class Mutants:
    """Damaged copies of run directories.

    Args:
        folder: where to make them.
        seed: of all that is random; "swaps": every pair of files swapped.
    """

    def __init__(self, folder: Path, seed: str) -> None:
        self.folder, self.seed = folder, seed
        self.bases = bases(folder / "bases")
        self._files = [[path for path in sorted(base.rglob("*")) if path.is_file()] for base in self.bases]
        self._kinds = sorted({path.name: path for files in self._files for path in files}.values())
        self.pairs = [
            (base, *pair)
            for base, files in zip(self.bases, self._files, strict=True)
            for pair in combinations(files, 2)
        ]

    def make(self, number: int) -> tuple[Path, str]:
        """Mutant ``number`` and what was done to it."""
        draw = random.Random(f"{self.seed} {number}")
        if self.seed == "swaps":
            return self._swapped(*self.pairs[number])
        which = number // 2 % len(self.bases)
        base, told = self.bases[which], []
        files = self._files[which]
        if draw.random() < 0.2:
            return self._swapped(base, *draw.sample(files, 2))
        run = self._copied(base)
        # one of each name first: a run has many record files and one run.json
        names = sorted({_kind(path) for path in files})
        for name in draw.sample(names, draw.choice((1, 1, 1, 2, 4))):
            chosen = draw.choice([path for path in files if _kind(path) == name])
            relative = chosen.relative_to(base)
            if (run / relative).is_file():  # its folder may have been replaced
                told.append(f"{relative}: {self._harm(run / relative, draw)}")
        return run, f"{base.name} {'; '.join(told)}"

    def _copied(self, base: Path) -> Path:
        run = self.folder / "mutant"
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(base, run, symlinks=True)
        return run

    def _swapped(self, base: Path, first: Path, second: Path) -> tuple[Path, str]:
        run = self._copied(base)
        (run / first.relative_to(base)).write_bytes(second.read_bytes())
        (run / second.relative_to(base)).write_bytes(first.read_bytes())
        return run, f"{base.name} {first.relative_to(base)} and {second.relative_to(base)} are swapped"

    def _harm(self, path: Path, draw: random.Random) -> str:
        """Damage a file; returns how."""
        choice = draw.random()
        if choice < 0.02 and path.parent.parent != self.folder:
            shutil.rmtree(path.parent)
            return f"instead of its folder {_replace(path.parent, draw)}"
        if choice < 0.09:
            path.unlink()
            return _replace(path, draw)
        if choice < 0.15:
            other = draw.choice(self._kinds)
            shutil.copyfile(other, path)
            return f"the content of {other.name}"
        if choice < 0.26 or path.suffix not in (".json", ".jsonl", ".rec"):
            return _harm_bytes(path, draw)
        if path.suffix == ".rec":
            return _harm_records(path, draw)
        if path.suffix == ".json":
            path.write_text(_harm_json(json.loads(path.read_text()), draw))
        else:
            lines = path.read_text().splitlines()
            place = draw.randrange(len(lines))
            lines[place] = _harm_json(json.loads(lines[place]), draw).replace("\n", " ")
            path.write_text("\n".join(lines) + draw.choice(("\n", "")))
        return "another value"


def _kind(path: Path) -> str:
    return path.name if path.suffix != ".rec" else f"{path.parent.name}.rec"


def _replace(path: Path, draw: random.Random) -> str:
    """Put something else than it was in a place that is empty."""
    kind = draw.choice(
        (
            *("nothing", "a folder", "a pipe", "a socket", "a dangling link", "a link to itself", "no rights"),
            *("/dev/zero", "/dev/full", "/dev/tty"),
            *("another's link", "a hard link", "a device", "a folder's link"),
        )
    )
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as bound, contextlib.chdir(path.parent):
            bound.bind(path.name)  # its path may be too long for an address
    elif kind == "a dangling link":
        path.symlink_to("nowhere")
    elif kind == "a link to itself":
        path.symlink_to(path.name)
    elif kind == "another's link":
        path.symlink_to("/etc/hostname")
        if os.geteuid() == 0:
            os.lchown(path, _NOBODY, _NOBODY)
    elif kind == "a folder's link":
        path.symlink_to(path.parent)
    elif kind == "a hard link":
        with contextlib.suppress(OSError):  # of a checkout on another file system: nothing is there
            os.link(max(path.parent.parent.rglob("*.*"), default=_RING), path)
    elif kind == "a device":
        with contextlib.suppress(PermissionError):  # of no privilege: nothing is there
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # endless zeros
    elif kind.startswith("/dev/"):
        path.symlink_to(kind)
    elif kind == "no rights":
        path.touch(mode=0)
    return kind


def _harm_bytes(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    kind = draw.choice(("cut", "flips", "block", "empty", "deep", "long line", "doubled", "noise"))
    if kind == "cut":
        del data[draw.randrange(len(data) + 1) :]
    elif kind == "flips" and data:
        for _ in range(draw.choice((1, 3, 30))):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif kind == "block" and data:
        place = draw.randrange(len(data))
        data[place : place + 64] = bytes([draw.choice((0, 255, 0x7F))]) * 64
    elif kind == "empty":
        data.clear()
    elif kind == "deep":
        data[:] = draw.choice((b"[", b'{"a":', b'[{"a":')) * _DEEP
    elif kind == "long line":
        data += b"x" * 2_000_000
    elif kind == "doubled":
        data += bytes(data)
    elif kind == "noise":
        data[:] = draw.randbytes(2000)
    path.write_bytes(data)
    return kind


def _hostile(draw: random.Random) -> Any:
    kind = draw.randrange(7)
    if kind == 0:
        return draw.choice((None, True, False, [], {}, [[]], [None], {"a": None}, [{}]))
    if kind == 1:
        return draw.choice(_HOSTILE_TEXTS)
    if kind == 2:
        return f"{_PLACE}{draw.choice(_RAW)}{_PLACE}"
    if kind == 3:
        return f"{_PLACE}{'[' * _DEEP}{']' * _DEEP}{_PLACE}"
    if kind == 4:
        return [draw.choice(_HOSTILE_NUMBERS)] * draw.choice((1, 3))
    return draw.choice(_HOSTILE_NUMBERS)


def _harm_json(item: Any, draw: random.Random) -> str:
    """JSON with one value changed or gone."""
    places = list(_places(item))
    for _ in range(draw.choice((1, 1, 3))):
        if not places:
            break
        holder, key = draw.choice(places)
        kind = draw.randrange(6)
        if (isinstance(holder, dict) and key not in holder) or (isinstance(holder, list) and key >= len(holder)):
            continue
        if kind == 0 and isinstance(holder, dict):
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[draw.choice(_HOSTILE_TEXTS)] = holder.pop(key)
        elif kind == 2:
            holder[key] = json.loads(json.dumps(draw.choice(places)[0]))
        else:
            holder[key] = _hostile(draw)
    text = json.dumps(_hostile(draw) if draw.random() < 0.03 else item)
    for raw in (*_RAW, "[" * _DEEP + "]" * _DEEP):
        text = text.replace(json.dumps(f"{_PLACE}{raw}{_PLACE}"), raw)
    return text


def _places(item: Any) -> Iterator[tuple[Any, Any]]:
    pairs = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    for key, value in pairs:
        yield item, key
        yield from _places(value)


def _harm_records(path: Path, draw: random.Random) -> str:
    data = bytearray(path.read_bytes())
    end = data.index(b"\n") + 1
    if draw.random() < 0.5:
        path.write_bytes(_harm_json(json.loads(data[:end]), draw).encode() + b"\n" + data[end:])
        return "another header"
    header = json.loads(data[:end])
    size = header["record_bytes"]
    if draw.random() < 0.25:
        return _set_clock(path, data, end, header, draw)
    sizes = [int(field["type"][1 + (field["type"][0] == "<") :]) for field in header["fields"]]
    column = draw.randrange(len(sizes))
    offset, rows = sum(sizes[:column]), (len(data) - end) // size
    value = draw.choice((0, 1, 2**7, 2**31 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, draw.getrandbits(64)))
    for row in range(rows):
        if draw.random() < draw.choice((0.05, 1)) or row == 0:
            at = end + row * size + offset
            data[at : at + sizes[column]] = value.to_bytes(8, "little")[: sizes[column]].ljust(sizes[column], b"\0")
    path.write_bytes(data)
    return f"other {header['fields'][column]['name']}"


def _set_clock(path: Path, data: bytearray, end: int, header: dict[str, Any], draw: random.Random) -> str:
    """Set the clock of the records from some one on."""
    step_ns = draw.choice((-1, 1)) * draw.choice((1, 10**6, 10**9, 3600 * 10**9, 10**18))
    at, count = 0, (len(data) - end) // header["record_bytes"]
    rows = range(draw.randrange(count + 1), count)
    for field in header["fields"]:
        width = int(field["type"][1 + (field["type"][0] == "<") :])
        if field["kind"] == "time" and "mono" not in field["name"] and width == 8:
            for row in rows:
                place = end + row * header["record_bytes"] + at
                value = int.from_bytes(data[place : place + 8], "little") + step_ns
                data[place : place + 8] = (value % 2**64).to_bytes(8, "little")
        at += width
    path.write_bytes(data)
    return f"the clock set by {step_ns} ns"


def _command(*words: str) -> Callable[[Path], int]:
    return lambda run: main([words[0], str(run), *words[1:]])


def _live(run: Path) -> int:
    """Show a run once as ``live`` does, which would go on for as long as the run seems to."""
    try:
        RunDirectory.open(run)
    except RingtapError as error:
        return error.exit_code
    snapshot = SnapshotSource(run).take()
    assert line_of(snapshot)
    assert headline(snapshot, False).plain
    assert job_line(snapshot, "").plain
    for _, bars in (iteration_plot(snapshot, 100), throughput_plot(snapshot, 100)):
        assert len(bars) == 100
    collector_states(snapshot.collectors)
    follower = RunFollower(run)
    follower.poll()
    if follower.ranks:
        assert all(diagnose(follower, follower.ranks).lines)
    assert json.dumps(parts_of(snapshot, TableChoice()))
    for page in TABLES:
        for column in range(len(page.columns)):
            items = page.select(snapshot, "", column, True)
        texts = [[column.text(item) for column in page.columns] for item in items]
        page.lay_out([[column.title for column in page.columns], *texts], 100)
        assert all(isinstance(page.style(item, snapshot), str) for item in items)
    return 0


def _plain(run: Path) -> int:
    """Run ``live --plain``, which goes on for as long as an undamaged run.json says that the run does."""

    def later(_: float) -> None:
        with contextlib.suppress(RingtapError):
            if RunDirectory.open(run).info.get("status", "running") == "running":
                raise KeyboardInterrupt

    with mock.patch.object(live, "_APPEARS_S", 0.0), mock.patch.object(plain.time, "sleep", later):
        return main(["live", str(run), "--plain"])


def _export(run: Path) -> int:
    """Export to every format, one run after another."""
    draw = random.Random(str(run.stat().st_mtime_ns))
    to = draw.choice(("parquet", "csv", "duckdb", "perfetto", "tensorboard"))
    return main(["export", str(run), "--to", to, "--force", "-o", str(run.parent / f"exported-{to}")])


def _packets(run: Path) -> int:
    what = ["--point", "vgg16-consistent:0"] if (run / "points.jsonl").exists() else []
    return main(["packets", str(run), *what, "--force", "-o", str(run.parent / "packets.pcapng")])


def _flows(run: Path) -> int:
    return main(["flows", "--no-cache", str(next(run.glob("nodes/n0/packets"), run))])


def _workload(run: Path) -> int:
    to = run.parent / "workload"
    shutil.rmtree(to, ignore_errors=True)
    return main(["workload", "new", "--run", str(run), "-o", str(to)])


def _metrics(run: Path) -> int:
    """Collect what a scrape reads."""
    families = list(RunMetrics(run).collect())
    assert all(sample.name for family in families for sample in family.samples)
    return 0


def _mark(run: Path) -> int:
    try:
        write_mark(run, START_NS, "text")
    except RingtapError as error:
        return error.exit_code
    return 0


def _agents(run: Path) -> int:
    """Read a run that another process has written, as agents do."""
    try:
        opened = RunDirectory.open(run)
    except RingtapError as error:
        return error.exit_code
    node_items(opened)
    conclude(opened, 0, None, "")
    return 0


def _table(run: Path) -> int:
    """The library's tables."""
    import ringtap

    try:
        found: Any = ringtap.open_run(run)
        _ = found.points if hasattr(found, "points") else (found.rank_iterations, found.iterations)
    except RingtapError as error:
        return error.exit_code
    return 0


READERS: dict[str, Callable[[Path], int]] = {
    "analyze": _command("analyze"),
    "status": _command("status"),
    "live": _live,
    "table": _table,
    "structure": _command("structure", "--no-cache"),
    "report": _command("report", "--force"),
    "plain": _plain,
    "export": _export,
    "compare": lambda run: main(["compare", str(run), str(run.parent / "bases" / "job")]),
    "packets": _packets,
    "flows": _flows,
    "fit": _command("fit", "--bootstrap", "40"),
    "workload": _workload,
    "metrics": _metrics,
    "mark": _mark,  # these three write into the run
    "merge": _command("merge"),
    "agents": _agents,
}


WITHOUT_A_LINE = ("agents", "live", "mark", "table")  # functions
_SENTENCE = re.compile(r"ringtap: .{10,2000}")


class HangError(Exception):
    """A reader takes too long."""


def _late(*_: object) -> None:
    raise HangError


def judge(number: int, run: Path, told: str, readers: dict[str, Callable[[Path], int]]) -> Iterator[tuple[str, str]]:
    """Names of the readers, each with its exit code on a mutant or with its fault."""
    for name, read in readers.items():
        out = io.StringIO()
        for number_of_signal in (signal.SIGALRM, signal.SIGPROF):
            signal.signal(number_of_signal, _late)
        signal.alarm(6 * MAX_S)  # other processes may take turns; who waits uses no processor time
        signal.setitimer(signal.ITIMER_PROF, MAX_S)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out), warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                code = read(run)
            found = str(code) if code in (0, 2) and "Traceback" not in out.getvalue() else f"exit code {code}"
            last = (out.getvalue().splitlines() or [""])[-1]
            if code == 2 and name not in WITHOUT_A_LINE and not _SENTENCE.fullmatch(last):
                found = f"no sentence: {out.getvalue()[-500:]}"
        except BaseException as error:  # SystemExit and HangError, too
            found = "".join(traceback.format_exception(error)[-6:])
        finally:
            signal.alarm(0)
            signal.setitimer(signal.ITIMER_PROF, 0)
        yield name, found if len(found) < 2 else f"mutant {number}, {name}: {told}\n{found}"


def peak_bytes() -> int:
    """The most memory that this process has ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def judge_many(folder: Path, seed: str, first: int, count: int, names: list[str]) -> dict[str, Any]:
    """Make mutants and have them read; ``broken`` is empty where all is well."""
    readers = {name: READERS[name] for name in names} if names else READERS
    mutants, broken, codes = Mutants(folder, seed), [], Counter[str]()
    begin_bytes = 0
    for number in range(first, first + count):
        run, told = mutants.make(number)
        # of few mutants, each is read by every other reader
        chosen = [name for place, name in enumerate(readers) if names or count > MANY or (place + number) % 2]
        for name, found in judge(number, run, told, {name: readers[name] for name in chosen}):
            codes[f"{name} {found if len(found) < 2 else 'broken'}"] += 1
            if len(found) > 1:
                broken.append(found)
        begin_bytes = begin_bytes or peak_bytes()
    grown = peak_bytes() - begin_bytes
    if grown > MAX_GROWTH_BYTES:
        broken.append(f"memory grew by {grown} bytes")
    return {"mutants": count, "codes": dict(sorted(codes.items())), "grown_bytes": grown, "broken": broken}


if __name__ == "__main__":
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        result = judge_many(Path(place), sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    print(json.dumps(result | {"seconds": round(time.monotonic() - began, 1)}, indent=1))
