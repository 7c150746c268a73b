"""Flow plans as arrays (docs/commands/traffic-plans.md specifies them); it needs NumPy and pandas."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ringtap.core.errors import UsageError, error_message
from ringtap.core.flow_plan_format import COLUMNS, read_header
from ringtap.core.units import counted

if TYPE_CHECKING:
    import pandas as pd

_ROWS_AT_ONCE = 100_000
_NAMES = ("destination", "source")
_MAX_DURATION_NS = 24 * 3600 * 10**9
_NUMBERS = ("start_ns", "size_bytes", "destination", "source", "after", "delay_ns")

Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class FlowTable:
    """A flow plan; the arrays have one entry per line, in the plan's order: per flow, and per computation.

    Attributes:
        path: path of its file.
        header: first line of its file.
        start_ns: start after the sender's launch; the earliest possible one if the flow waits for another.
        size_bytes: payload; 0: open-ended, until the plan's end.
        destination: index into the header's destinations; -1: a computation, which sends nothing.
        source: index into the header's sources; -1: the flow is unbound.
        after: number of the first line that it waits for; -1: none.
        delay_ns: time from the end of that line to its start.
    """

    path: Path
    header: dict[str, Any]
    start_ns: Integers
    size_bytes: Integers
    destination: Integers
    source: Integers
    after: Integers
    delay_ns: Integers

    @property
    def duration_ns(self) -> int:
        """The plan's length."""
        return int(self.header["duration_ns"])

    @property
    def destinations(self) -> list[str]:
        """Every ``host:port``."""
        return list(self.header["destinations"])

    @property
    def is_flow(self) -> npt.NDArray[np.bool_]:
        """Mask of the lines that are flows."""
        return self.destination >= 0

    @property
    def sources(self) -> list[str]:
        """Every source address; empty if some flow is unbound."""
        return [] if (self.source < 0).any() else list(self.header.get("sources", []))

    @property
    def kind(self) -> str:
        """Kind of the plan, by its header."""
        return str(self.header.get("kind", "plan"))

    @property
    def bytes(self) -> int:
        """Payload of all flows; open-ended ones count as 0."""
        return int(self.size_bytes.sum())

    @property
    def load_bps(self) -> float:
        """Mean payload rate over the plan."""
        return self.bytes * 8e9 / self.duration_ns

    def planned_bytes(self, edges_ns: Integers) -> Numbers:
        """Return the bytes of the flows that start between each edge and the next."""
        sums = np.concatenate(([0], np.cumsum(self.size_bytes, dtype=np.int64)))
        return np.diff(sums[np.searchsorted(self.start_ns, edges_ns)]).astype(np.float64)


def read_plan(path: Path) -> FlowTable:
    """Read a plan file.

    Raises:
        UsageError: it cannot be read, is not a plan, or does not match its header.
    """
    import pandas as pd  # which takes 0.2 s, and who simulates without a plan needs none

    header = _checked_header(path)
    columns = COLUMNS[header["version"]]
    kinds: dict[str, Any] = dict.fromkeys(columns, "category") | {"start_ns": "int64", "size_bytes": "int64"}
    names = {name: {each: index for index, each in enumerate(header.get(f"{name}s", []))} for name in _NAMES}
    parts: list[dict[str, Integers]] = []
    try:
        with pd.read_csv(
            path, sep="\t", skiprows=1, names=list(columns), dtype=kinds, chunksize=_ROWS_AT_ONCE, na_filter=False,
            quoting=3,
        ) as chunks:  # fmt: skip
            parts += [_numbers(rows, names) for rows in chunks]
    except pd.errors.EmptyDataError:
        pass  # a header alone: the counts in it are checked below
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error_message(error)}") from error
    except (ValueError, OverflowError) as error:
        why = str(error).strip().splitlines()[-1]
        raise UsageError(f"{path} has a line that is not a flow ({why}): write it again") from error
    none = np.empty(0, np.int64)
    joined = {name: np.concatenate([none, *(part[name] for part in parts)]) for name in _NUMBERS}
    return _checked(FlowTable(path, header, **joined))


def _numbers(rows: pd.DataFrame, names: dict[str, dict[str, int]]) -> dict[str, Integers]:
    """Return the columns of a chunk of the file, with numbers instead of names."""
    found = {name: np.full(len(rows), -1) for name in names} | {"after": np.full(len(rows), -1)}
    found |= {name: rows[name].to_numpy(np.int64) for name in ("start_ns", "size_bytes")}
    found["delay_ns"] = np.zeros(len(rows), np.int64)
    for name, indexes in names.items():
        if name in rows:
            categories, codes = rows[name].cat.categories, rows[name].cat.codes
            none = {"-": -1}  # an unbound source, the destination of a computation
            unknown = [each for each in categories if each not in indexes and each not in none]
            if unknown:
                raise ValueError(f"{name} {unknown[0][:80]!r} is not among the header's")
            found[name] = np.array([(indexes | none)[each] for each in categories], np.int64)[codes]
    if "after" in rows:
        waits = [(-1, 0) if each == "-" else _wait(each) for each in rows["after"].cat.categories]
        of_rows = np.array(waits, np.int64).reshape(-1, 2)[rows["after"].cat.codes]
        found |= {"after": of_rows[:, 0], "delay_ns": of_rows[:, 1]}
    return found


def _wait(text: str) -> tuple[int, int]:
    """Return the number of the first line that a line waits for, and the delay in ns."""
    after, plus, delay = text.partition(",")[0].partition("+")
    if not after.isdecimal() or (plus and not delay.isdecimal()):
        raise ValueError(f"after {text[:40]!r} is not a flow")
    return int(after), int(delay or 0)


def _checked(plan: FlowTable) -> FlowTable:
    found, stated = (int(plan.is_flow.sum()), plan.bytes), (plan.header["flows"], plan.header["bytes"])
    if found != stated:
        raise UsageError(
            f"{plan.path} holds {counted(found[0], 'flow')} of {counted(found[1], 'byte')} but its header says "
            f"{stated[0]:,} of {stated[1]:,}: it was cut short or edited; write it again"
        )
    if len(plan.start_ns) and (plan.start_ns[0] < 0 or plan.size_bytes.min() < 0 or (np.diff(plan.start_ns) < 0).any()):
        raise UsageError(f"{plan.path} has flows that are not sorted by start, or a number below 0: write it again")
    if (plan.after >= np.arange(len(plan.after))).any():
        flow = int(np.argmax(plan.after >= np.arange(len(plan.after))))
        raise UsageError(f"{plan.path} line {flow + 2}: the flow waits for one that is not above it: write it again")
    return plan


def _checked_header(path: Path) -> dict[str, Any]:
    header = read_header(path)
    for key, least in (("duration_ns", 1), ("flows", 0), ("bytes", 0)):
        if not isinstance(header.get(key), int) or header[key] < least:
            raise UsageError(f"{path} line 1: {key} must be a whole number from {least}")
    if header["duration_ns"] > _MAX_DURATION_NS:
        raise UsageError(f"{path} lasts longer than a day: cut it into plans of a day at most")
    for key, default, what in (("destinations", None, "host:port"), ("sources", [], "addresses")):
        names = header.get(key, default)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UsageError(f"{path} line 1: {key} must be a list of {what}")
    return header
