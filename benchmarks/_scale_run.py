"""Generator of a run directory of many nodes: copies of two nodes with other names, addresses, ranks and clocks.

A longer run than the recorded one repeats the recorded iterations: times and counters go on as they grew.

python benchmarks/_scale_run.py SOURCE TARGET NODES [SECONDS]
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _checkout  # noqa: F401
import numpy as np
import numpy.typing as npt

from ringtap.analysis.runs.run import map_records
from ringtap.core.records import RecordFile
from ringtap.core.rundir import write_json

_REALTIME_NS = 10**18  # a number of nanoseconds above this (2001) is a time of CLOCK_REALTIME, below it a duration
_SHIFT_NS = 1_000_003  # lead of each node's clock over that of the previous node
_FIRST_ADDRESS = "10.128.0.1"
_ALIGN = 64
# objects of logs with one record per object and sample
_OBJECTS = {"sockets.rec": ("cookie",), "qdisc.rec": ("interface", "handle"), "processes.rec": ("pid",)}
_NUMBERED = ("step", "iteration")  # columns that count the iterations of a process
_FIRST_REPEATED = 10  # iteration: DDP changes its buckets and times rarely after the first ones
JOB = "series/scale-consistent-1"
"""Path of the job's run directory in the sweep's."""


@dataclass(frozen=True)
class Repeat:
    """The part of a recording that is repeated, and how often.

    Attributes:
        begin_ns: begin, CLOCK_REALTIME; just after the end of an iteration at both nodes.
        end_ns: end, likewise.
        iterations: iterations in it.
        times: how often it is in the result.
    """

    begin_ns: int
    end_ns: int
    iterations: int
    times: int

    @classmethod
    def of(cls, folders: list[Path], seconds: float) -> Repeat:
        """Choose the part of a recording of nodes, whose clocks agree, that fills the given time."""
        logs = [next(path for path in folder.glob("steps/*.rec") if ".ddp." not in path.name) for folder in folders]
        ends_ns = np.max([map_records(path)[1]["end_ns"][_FIRST_REPEATED:-2] for path in logs], axis=0)
        # the next iteration of any node ends later than that
        begin_ns, end_ns = (int(ends_ns[place]) + int(np.diff(ends_ns).min()) // 4 for place in (0, -1))
        return cls(begin_ns, end_ns, len(ends_ns) - 1, max(1, round(seconds * 1e9 / (end_ns - begin_ns))))

    @property
    def added_ns(self) -> int:
        """Time by which the result is longer than the recording."""
        return (self.times - 1) * (self.end_ns - self.begin_ns)

    def records(self, file: RecordFile, records: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Repeat the records of a log."""
        at_ns = records["t_ns"] if "t_ns" in (records.dtype.names or ()) else records["end_ns"]
        begin, end = np.searchsorted(at_ns, (self.begin_ns, self.end_ns))
        copies = np.repeat(np.arange(self.times), end - begin)
        numbers = np.concatenate((np.zeros(begin, np.int64), copies, np.full(len(records) - end, self.times - 1)))
        repeated = np.tile(np.arange(begin, end), self.times)
        rows = np.concatenate((np.arange(begin), repeated, np.arange(end, len(records))))
        made = np.array(records[rows])
        keys = _OBJECTS.get(file.path.name)
        _, of = np.unique(records[list(keys)], return_inverse=True) if keys else ((), np.zeros(len(records), np.int64))
        for item in file.fields:
            if item.kind == "time":
                made[item.name] += np.where(made[item.name] > 0, numbers * (self.end_ns - self.begin_ns), 0)
            elif item.name in _NUMBERED:
                made[item.name] += numbers * self.iterations
            elif item.kind == "counter":
                grown = _growth(of, records[item.name], int(begin), int(end))[of[rows]]
                made[item.name] += (numbers * grown).astype(made[item.name].dtype)
        return made


def _growth(of: npt.NDArray[Any], values: npt.NDArray[Any], begin: int, end: int) -> npt.NDArray[Any]:
    """Return the growth of each object's counter from the last record before one place to the last before another."""
    grown = np.zeros(of.max(initial=0) + 1, values.dtype)
    for number in range(len(grown)):
        mine = np.flatnonzero(of[:end] == number)
        if len(mine):
            grown[number] = values[mine[-1]] - values[mine[max(np.searchsorted(mine, begin) - 1, 0)]]
    return grown


@dataclass(frozen=True)
class Copy:
    """Properties that distinguish a copy of a recorded node."""

    number: int
    name: str
    reference: str
    shift_ns: int
    addresses: dict[bytes, bytes]
    repeat: Repeat

    @classmethod
    def of(cls, number: int, own: list[bytes], repeat: Repeat) -> Copy:
        """Derive the properties from the copy's number; nodes are paired as the two recorded ones were."""
        pair = number - number % 2
        addresses = {old: _address(pair + index) for index, old in enumerate(own)}
        return cls(number, node_name(number), node_name(0), number * _SHIFT_NS, addresses, repeat)


def node_name(number: int) -> str:
    """Return the name of a copied node."""
    return f"n{number:04d}"


def _address(number: int) -> bytes:
    first = int.from_bytes(socket.inet_aton(_FIRST_ADDRESS), "big")
    return (first + number).to_bytes(4, "big")


Made = tuple[str, bytes]


def _records(file: RecordFile, records: npt.NDArray[Any], relative: str) -> Callable[[Copy], Made]:
    """Return a function that makes a log of packed records with a copy's times, rank and addresses."""
    with file.path.open("rb") as stream:
        header = json.loads(stream.readline())
    times = [field.name for field in file.fields if field.type == "<i8" and field.name.endswith("_ns")]
    addresses = [field.name for field in file.fields if field.type == "V16"]

    def make(copy: Copy) -> Made:
        made = np.array(records)
        for name in times:
            made[name] += np.where(made[name] > _REALTIME_NS, copy.shift_ns, 0)
        for name in addresses:
            raw = np.ascontiguousarray(made[name]).view(np.uint8).reshape(-1, 4)
            for old, new in copy.addresses.items():
                raw[(raw == np.frombuffer(old, np.uint8)).all(axis=1)] = np.frombuffer(new, np.uint8)
            made[name] = raw.reshape(-1, 16).copy().view("V16")[:, 0]
        line = json.dumps(_changed(header, copy)).encode()
        line += b" " * (-(len(line) + 1) % _ALIGN) + b"\n"
        return _renamed(relative, copy), line + made.tobytes()

    return make


def _changed(item: Any, copy: Copy, key: str = "") -> Any:
    """Return a JSON value with a copy's times, rank and clock."""
    if isinstance(item, dict):
        return {name: _changed(value, copy, name) for name, value in item.items()}
    if isinstance(item, list):
        return [_changed(value, copy, key) for value in item]
    # the drift of a short recording is noise, which an hour would show
    values = {"drift_ppm": 0.0, "rank": copy.number, "reference": copy.reference}
    if key in values and item is not None:
        return values[key]
    if key == "offset_ns" or (isinstance(item, int) and item > _REALTIME_NS):
        later_ns = copy.repeat.added_ns if key != "offset_ns" and item >= copy.repeat.end_ns else 0
        return item + copy.shift_ns + later_ns
    return item


def _renamed(relative: str, copy: Copy) -> str:
    folder, _, name = relative.rpartition("/")
    if folder == "steps":
        name = f"rank{copy.number}-{name.partition('-')[2]}"
    return f"{folder}/{name}" if folder else name


def _text(path: Path, relative: str) -> Callable[[Copy], Made]:
    """Return a function that makes a copy's file of JSON or JSON lines; other files stay unchanged."""
    text = path.read_text()
    if path.suffix == ".json":
        item = json.loads(text)
        return lambda copy: (_renamed(relative, copy), json.dumps(_changed(item, copy), indent=1).encode())
    if path.suffix == ".jsonl":
        lines = [json.loads(line) for line in text.splitlines()]
        return lambda copy: (
            _renamed(relative, copy),
            b"".join(json.dumps(_changed(line, copy)).encode() + b"\n" for line in lines),
        )
    return lambda _: (relative, text.encode())


def _files(folder: Path, repeat: Repeat) -> Iterator[Callable[[Copy], Made]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            relative = str(path.relative_to(folder))
            file, records, _ = map_records(path) if path.suffix == ".rec" else (None, None, 0)
            if file is None or records is None:
                yield _text(path, relative)
            else:
                yield _records(file, repeat.records(file, records), relative)


def _own_address(folder: Path) -> bytes:
    """Return the most frequent source address of a node's sockets."""
    _, records, _ = map_records(folder / "sockets" / "sockets.rec")
    seen, counts = np.unique([bytes(row)[:4] for row in records["source"]], return_counts=True)
    return bytes(seen[np.argmax(counts)]).ljust(4, b"\0")


def multiply(source: Path, target: Path, nodes: int, seconds: float = 0.0) -> None:
    """Write a sweep of one series, whose job has ``nodes`` nodes.

    Args:
        source: a job's run directory with two nodes.
        target: the sweep's folder, which is created.
        nodes: number of nodes.
        seconds: length of the repeated part; less than that of the recording: it is not repeated.
    """
    folders = sorted(path for path in (source / "nodes").iterdir() if path.is_dir())
    own = [_own_address(folder) for folder in folders]
    repeat = Repeat.of(folders, seconds)
    recorded = [list(_files(folder, repeat)) for folder in folders]
    job = target / JOB
    for number in range(nodes):
        copy = Copy.of(number, own, repeat)
        for make in recorded[number % 2]:
            relative, data = make(copy)
            path = job / "nodes" / copy.name / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    info = json.loads((source / "run.json").read_text())
    write_json(job / "run.json", info | {"nodes": [node_name(number) for number in range(nodes)]})
    _sweep(target, job, info, nodes)


def _sweep(target: Path, job: Path, info: dict[str, Any], nodes: int) -> None:
    """Turn the job into a sweep: add a plan, and one window from its first record to its last."""
    _, records, _ = map_records(job / "nodes" / node_name(0) / "nic" / "nic.rec")
    names = [name for name in records.dtype.names or () if name.endswith(".tx_bytes") and not name.startswith("lo.")]
    counter = {"node": node_name(0), "nic": names[0].rpartition(".")[0], "direction": "tx"}
    plan = {"name": f"{nodes} nodes", "scale": 1.0, "capacity_bps": 25e9, "traffic": ["consistent"]}
    plan["topology"] = {"workers": [node_name(number) for number in range(nodes)]}
    plan["models"] = [{"name": "scale", "title": "the scale model", "parameters": 1_383_574}]
    sweep = info | {"kind": "sweep", "plan": plan, "bottleneck": {"cross": counter, "total": counter}}
    write_json(target / "run.json", sweep)
    window = {"series": "scale-consistent", "model": "scale", "traffic": "consistent", "requested_bps": 0.0}
    window |= {"directory": str(job.relative_to(target)), "ended": "time"}
    window |= {"window_start_ns": int(records["t_ns"][1]), "window_end_ns": int(records["t_ns"][-2])}
    (target / "points.jsonl").write_text(json.dumps(window) + "\n")


if __name__ == "__main__":
    multiply(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), *map(float, sys.argv[4:]))
