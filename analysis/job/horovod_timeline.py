"""Reads Horovod's timeline, the Chrome trace of its first rank, as a table of collectives on CLOCK_REALTIME.

The file may be incomplete, as during a run or after a killed job: whole events are used.
Times are microseconds after the start time in the first event (Horovod 0.28: common/timeline.cc). A tensor is a "pid".
An end event has no name and closes the last open activity of its tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ringtap.core.errors import UsageError, file_errors
from ringtap.core.json_validation import COUNT, DECODER, Number, Shape, check, whole
from ringtap.core.untrusted_files import open_regular

_NEGOTIATE = "NEGOTIATE_"
_START = "start_time_since_epoch_in_micros"
_FUSED = "MEMCPY_IN_FUSION_BUFFER"
# Activities that move data between ranks: GLOO_ALLREDUCE, MPI_BCAST, NCCL_ALLGATHER, …
_TRANSPORT = re.compile(r"(GLOO|MPI|NCCL|CCL|DDL)_(?!.*MEMCPY)")
_ITEM_BYTES = {
    "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "int32": 4, "int64": 8,
    "float16": 2, "float32": 4, "float64": 8, "bool": 1,
}  # fmt: skip
_NEXT_EVENT = re.compile(r"\}\s*,\s*(?=\{)")
_TIMES = ("negotiate_start_ns", "first_ready_ns", "last_ready_ns", "transport_start_ns", "transport_end_ns")
_US = Number(0, 2**51, whole=True)
_EVENT: Shape = {"ph": str, "name?": (str, None), "pid?": COUNT, "ts?": _US, "args?": (dict, None)}
_MAX_BYTES = 2**62


def read_timeline(path: Path) -> pd.DataFrame:
    """Return the collectives of a timeline, as from `load_timeline`.

    Raises:
        UsageError: unreadable, or another kind of file.
    """
    return load_timeline(path)[0]


def load_timeline(path: Path) -> tuple[pd.DataFrame, int]:
    """Read a timeline, complete or as far as it has been written.

    Returns:
        One row per tensor and finished collective, in the order of their ends: ``tensor``; ``operation`` (ALLREDUCE,
        …); ``start_ns`` and ``end_ns`` of the whole operation; ``negotiate_start_ns``, when the first rank had the
        tensor; ``first_ready_ns``, ``last_ready_ns`` and ``last_rank``, the rank that the others waited for (Horovod
        logs these only the first time it negotiates a tensor, and always with HOROVOD_CACHE_CAPACITY=0); ``transport``
        (GLOO_ALLREDUCE, …), ``transport_start_ns`` and ``transport_end_ns``, while data moved between ranks; ``fused``,
        true if sent together with other tensors; ``bytes`` of the result. Times are CLOCK_REALTIME of the writing
        rank's node; unknown values are ``<NA>``.

        The number of unreadable events, except one cut off at the end of the file.

    Raises:
        UsageError: unreadable, or another kind of file.
    """
    with file_errors(path), open_regular(path) as file:
        text = file.read().decode(errors="replace")
    events = _Events(text)
    reader = _Reader()
    for event in events:
        try:
            reader.take(event)
        except (KeyError, TypeError, ValueError, AttributeError):
            events.damaged += 1
    if reader.start_us is None and (reader.seen or events.damaged or not _is_beginning(text)):
        raise UsageError(f"{path} is not a Horovod timeline: its first event does not say when it began")
    return reader.collectives(), events.damaged


def _is_beginning(text: str) -> bool:
    """Return True if a text without a whole event may be the beginning of a timeline."""
    head = '[\n{"name": "process_name", "ph": "M", "pid": 0, "args": {"' + _START + '":'
    return text.startswith(head) or head.startswith(text)


class _Events:
    """Iterator over the events of a trace; skips damaged events and stops where the text ends."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.damaged = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        decode = DECODER.raw_decode
        text, position = self._text, 0
        while True:
            while position < len(text) and text[position] in "[], \t\r\n":
                position += 1
            if position == len(text):
                return
            try:
                event, position = decode(text, position)
            except (ValueError, RecursionError):
                # Horovod does not escape names: a quote in a name damages that event only.
                following = _NEXT_EVENT.search(text, position)
                if not following:
                    return
                self.damaged += 1
                position = following.end()
                continue
            yield event


@dataclass
class _Tensor:
    """State of a tensor while its collective is under way."""

    name: str
    open: list[str] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)


class _Reader:
    """Parser that tracks every tensor through negotiation, operation and the activities within it."""

    def __init__(self) -> None:
        self.start_us: int | None = None
        self.seen = 0
        self._tensors: dict[int, _Tensor] = {}
        self._rows: list[dict[str, Any]] = []

    def take(self, event: dict[str, Any]) -> None:
        """Process the next event."""
        check(event, _EVENT)
        phase = event["ph"]
        if phase == "M":
            self._name(event)
            return
        self.seen += 1
        if phase == "i":  # a cycle began, with HOROVOD_TIMELINE_MARK_CYCLES
            return
        tensor = self._tensors[event["pid"]]
        if phase == "B":
            self._begin(tensor, event["name"], event["ts"])
        elif phase == "X":
            self._ready(tensor.row, int(event["name"]), event["ts"])
        elif phase == "E" and tensor.open:
            self._end(tensor, event)

    def _name(self, event: dict[str, Any]) -> None:
        if event["name"] != "process_name":
            return
        if _START in event["args"]:
            start_us = int(event["args"][_START])
            check(start_us, _US)
            self.start_us = start_us
        else:
            self._tensors[event["pid"]] = _Tensor(whole(str(event["args"]["name"])))

    @staticmethod
    def _begin(tensor: _Tensor, name: str, at_us: int) -> None:
        if name.startswith(_NEGOTIATE):
            tensor.open, tensor.row = [], {"negotiate_start_ns": at_us}
        elif not tensor.open:
            tensor.row |= {"operation": name, "start_ns": at_us, "fused": False}
        elif name == _FUSED:
            tensor.row["fused"] = True
        elif _TRANSPORT.match(name):
            tensor.row.setdefault("transport_start_ns", at_us)
            tensor.row["transport"] = name
        tensor.open.append(name)

    @staticmethod
    def _ready(row: dict[str, Any], rank: int, at_us: int) -> None:
        row.setdefault("first_ready_ns", at_us)
        row |= {"last_ready_ns": at_us, "last_rank": rank}

    def _end(self, tensor: _Tensor, event: dict[str, Any]) -> None:
        name = tensor.open.pop()
        if _TRANSPORT.match(name):
            tensor.row["transport_end_ns"] = event["ts"]
        if tensor.open or name.startswith(_NEGOTIATE) or "start_ns" not in tensor.row:
            return
        tensor.row |= {"tensor": tensor.name, "end_ns": event["ts"], "bytes": _bytes(event.get("args"))}
        self._rows.append(tensor.row)
        tensor.row = {}

    def collectives(self) -> pd.DataFrame:
        """Return the finished collectives of all events so far."""
        zero_ns = (self.start_us or 0) * 1000

        def integers(name: str, scale: int = 1, offset: int = 0) -> Any:
            values = [None if row.get(name) is None else row[name] * scale + offset for row in self._rows]
            return pd.array(values, dtype=pd.Int64Dtype())

        def text(name: str) -> Any:
            return pd.array([row.get(name) for row in self._rows], dtype=pd.StringDtype())

        columns = {name: text(name) for name in ("tensor", "operation")}
        columns |= {name: integers(name, 1000, zero_ns).astype("int64") for name in ("start_ns", "end_ns")}
        columns |= {name: integers(name, 1000, zero_ns) for name in _TIMES}
        columns |= {"last_rank": integers("last_rank"), "transport": text("transport")}
        columns |= {"fused": np.array([row["fused"] for row in self._rows], bool), "bytes": integers("bytes")}
        return pd.DataFrame(columns)


def _bytes(arguments: dict[str, Any] | None) -> int | None:
    """Return the size of a result by its dtype and shape; None if the event has none or the size is implausible."""
    item_bytes = _ITEM_BYTES.get((arguments or {}).get("dtype", ""))
    if arguments is None or item_bytes is None:
        return None
    size_bytes = item_bytes * math.prod(int(size) for size in re.findall(r"[0-9]{1,18}", arguments["shape"]))
    return size_bytes if size_bytes <= _MAX_BYTES else None
