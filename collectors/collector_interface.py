"""Defines the interface of every collector: checked before a run, started beside a job, sampled, stopped."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from ringtap.core.append_only_logs import Field, RecordWriter
from ringtap.core.errors import failure_message
from ringtap.core.run_directory_schema import TIME_FIELDS

State = Literal["ok", "degraded", "unavailable", "failed"]


@dataclass(frozen=True)
class Check:
    """The result of a check: what a node, a user and a job environment allow a collector.

    Attributes:
        state: ``ok``; ``degraded``: it collects less than it could; ``unavailable``: it collects nothing;
            ``failed``: the check gave no answer.
        reason: one sentence: what it found, or what is missing.
        remedy: one sentence: the command to run, the module to load, or whom to ask; empty if nothing is missing.
    """

    state: State
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class Context:
    """The context of a collector: the node's folder, the period, the job's processes and the options.

    Attributes:
        folder: the node's folder in the run directory.
        every_s: requested period; a collector with a shortest period of its own uses the longer of the two.
        pids: returns the pids of the recorded processes and their descendants at the time of the call; empty without a
            job. Expensive: not for every sample.
        options: command-line options of this collector (packets: ``interface``, ``filter``, ``snap_bytes`` and so on).
        disk_limit_bytes: size that the node's folder must not exceed, 0 for no limit; a collector that can spare its
            oldest files deletes them before.
    """

    folder: Path
    every_s: float
    pids: Callable[[], list[int]] = list
    options: dict[str, str] = field(default_factory=dict)
    disk_limit_bytes: int = 0


class Collector(Protocol):
    """One source of measurements on a node; it writes only below the folder of its own name.

    ``sample`` may raise ``OSError``: the agent then stops this collector, notes the reason, and keeps the others.

    Attributes:
        name: its name for ``--collect``, and its folder.
        slow: True if a sample may take more than a millisecond; the collector then runs on a thread of its own.
        every_s: its actual period.
    """

    name: str
    slow: bool
    every_s: float

    def __init__(self, context: Context) -> None: ...

    def check(self) -> Check:
        """Check this node without leaving a trace on disk; takes less than a second and never raises."""
        ...

    def start(self) -> None:
        """Open the logs and take the first sample."""
        ...

    def sample(self) -> None:
        """Take one sample."""
        ...

    def stop(self) -> dict[str, Any]:
        """Take the last sample and close the logs; return facts for node.json (losses, counts), numbers as numbers."""
        ...


class SampledCollector(ABC):
    """A collector that reads some numbers in each period; a subclass gives their columns and ``read``.

    Its log is ``NAME/NAME.rec`` in the node's folder, and ``job.table(NAME)`` reads it.

    Attributes:
        name: its name for ``--collect``: small letters, digits, - and _.
        columns: name of each column, with its unit as a suffix (``_us``, ``_bytes``), and its meaning over time:
            ``counter`` for a number that grows, ``gauge`` for a state.
        every_s: its period.
    """

    name: ClassVar[str]
    columns: ClassVar[Mapping[str, Literal["counter", "gauge"]]]
    slow: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        self.context = context
        self.every_s = context.every_s

    @abstractmethod
    def read(self) -> Sequence[float]:
        """Return a number for each column, in their order; whole numbers for a column are whole in every sample.

        Raises:
            OSError: the source cannot be read; the collector then ends with this reason, and the job goes on.
        """

    def check(self) -> Check:
        """Read once; the collector is unavailable if that fails."""
        try:
            self._fields(self._values())
        except Exception as error:
            return Check("unavailable", f"it cannot be read: {failure_message(error)}")
        text = (type(self).__doc__ or "").strip().partition("\n")[0]
        return Check("ok", text.rstrip(".") or f"{len(self.columns)} columns")

    def start(self) -> None:
        """Open the log and take the first sample."""
        values = self._values()
        fields = self._fields(values)
        self._whole = [item.type != "<f8" for item in fields]
        about = {"collector": self.name, "source": f"{type(self).__module__}.{type(self).__qualname__}"}
        path = self.context.folder / self.name / f"{self.name}.rec"
        self._log = RecordWriter(path, [*TIME_FIELDS, *fields], about | {"every_s": self.every_s})
        self._append(values)

    def sample(self) -> None:
        """Take one sample."""
        self._append(self._values())

    def stop(self) -> dict[str, Any]:
        """Take the last sample and close the log."""
        try:
            self.sample()
        finally:
            self._log.close()
        return {}

    def _append(self, values: Sequence[float]) -> None:
        for name, value, whole in zip(self.columns, values, self._whole, strict=True):
            if whole and not isinstance(value, int):
                raise ValueError(f"{name} was a whole number in the first sample and is {value!r} now")
        self._log.append(time.time_ns(), time.monotonic_ns(), *values)

    def _values(self) -> Sequence[float]:
        columns: object = getattr(self, "columns", None)
        if not isinstance(columns, Mapping) or not columns:
            raise ValueError(f"columns is {columns!r}: give each column's name and kind, as in {{'load': 'gauge'}}")
        read: object = self.read()
        if not isinstance(read, Iterable):
            raise ValueError(f"read() returned {read!r}, not a list of numbers")
        values = list(read)
        if len(values) != len(self.columns):
            raise ValueError(f"read() returned {len(values)} numbers for {len(self.columns)} columns")
        for name, value in zip(self.columns, values, strict=True):
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"read() returned {value!r} for {name}, not a number")
        return values

    def _fields(self, values: Sequence[float]) -> list[Field]:
        return [_field(name, kind, value) for (name, kind), value in zip(self.columns.items(), values, strict=True)]


def _field(name: str, kind: Literal["counter", "gauge"], value: float) -> Field:
    unit = name.rpartition("_")[2] if "_" in name else ""
    if kind not in ("counter", "gauge"):
        raise ValueError(f"the column {name} is a {kind!r}: it must be a counter or a gauge")
    if isinstance(value, int):
        return Field(name, "<u8" if kind == "counter" else "<i8", unit, kind, 64 if kind == "counter" else 0)
    return Field(name, "<f8", unit, kind)
