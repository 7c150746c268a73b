"""Flow plans as arrays (docs/commands/traffic-plans.md specifies them), and their bursts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.errors import UsageError
from ringtap.flow_plan import COLUMNS, read_header
from ringtap.units import counted

_ROWS_AT_ONCE = 100_000
_MAX_DURATION_NS, _MAX_WINDOWS = 24 * 3600 * 10**9, 10**7
_NUMBERS: dict[str, Any] = {
    "start_ns": np.int64,
    "size_bytes": np.int64,
    "destination": np.int64,
    "dependent": np.bool_,
}

Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Plan:
    """A flow plan; the arrays have one entry per line, in the plan's order: per flow, and per computation.

    Attributes:
        path: path of its file.
        header: first line of its file.
        start_ns: start after the sender's launch; the earliest possible one if the flow waits for another.
        size_bytes: payload; 0: open-ended, until the plan's end.
        destination: index into the header's destinations; -1: a computation, which sends nothing.
        dependent: mask of the flows that wait for another flow.
        sources: every source address of the flows; empty if some flow is unbound.
    """

    path: Path
    header: dict[str, Any]
    start_ns: Integers
    size_bytes: Integers
    destination: Integers
    dependent: Flags
    sources: frozenset[str]

    @property
    def duration_ns(self) -> int:
        """The plan's length."""
        return int(self.header["duration_ns"])

    @property
    def destinations(self) -> list[str]:
        """Every ``host:port``."""
        return list(self.header["destinations"])

    @property
    def is_flow(self) -> Flags:
        """Mask of the lines that are flows."""
        return self.destination >= 0

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


@dataclass(frozen=True)
class Windows:
    """Bursts of a plan and the quiet parts between them.

    Attributes:
        edges_ns: start of each part after the launch, and the end of the last one.
        burst: mask of the parts that are bursts.
    """

    edges_ns: Integers
    burst: Flags


def read_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        UsageError: it cannot be read, is not a plan, or does not match its header.
    """
    header = _checked_header(path)
    columns = COLUMNS[header["version"]]
    kinds: dict[str, Any] = dict.fromkeys(columns, "category") | {"start_ns": "int64", "size_bytes": "int64"}
    parts: list[pd.DataFrame] = []
    sources: set[str] = set() if "source" in columns else {"-"}
    try:
        with pd.read_csv(
            path, sep="\t", skiprows=1, names=list(columns), dtype=kinds, chunksize=_ROWS_AT_ONCE, na_filter=False,
            quoting=3,
        ) as chunks:  # fmt: skip
            for rows in chunks:
                sources.update(rows["source"].cat.categories if "source" in columns else ())
                parts.append(_numbers(rows, {name: index for index, name in enumerate(header["destinations"])}))
    except pd.errors.EmptyDataError:
        pass  # a header alone: the counts in it are checked below
    except (ValueError, OverflowError, OSError) as error:
        why = str(error).strip().splitlines()[-1]
        raise UsageError(f"{path} has a line that is not a flow ({why}): write it again") from error
    table = pd.concat(parts) if parts else pd.DataFrame({name: np.empty(0, np.int64) for name in _NUMBERS})
    arrays = {name: table[name].to_numpy(kind) for name, kind in _NUMBERS.items()}
    return _checked(Plan(path, header, sources=frozenset(() if sources & {"-", ""} else sources), **arrays))


def _numbers(rows: pd.DataFrame, indexes: dict[str, int]) -> pd.DataFrame:
    """Return a chunk of the file with numbers instead of names."""
    names = rows["destination"].cat
    indexes["-"] = -1
    unknown = [name for name in names.categories if name not in indexes]
    if unknown:
        raise ValueError(f"destination {unknown[0][:80]!r} is not among the header's")
    numbers = np.array([indexes[name] for name in names.categories], np.int64)[names.codes]
    dependent = (rows["after"] != "-").to_numpy() if "after" in rows else np.zeros(len(rows), bool)
    return pd.DataFrame(
        {"start_ns": rows["start_ns"], "size_bytes": rows["size_bytes"], "destination": numbers, "dependent": dependent}
    )


def _checked(plan: Plan) -> Plan:
    """Return the plan, if it matches its header."""
    found, stated = (int(plan.is_flow.sum()), plan.bytes), (plan.header["flows"], plan.header["bytes"])
    if found != stated:
        raise UsageError(
            f"{plan.path} holds {counted(found[0], 'flow')} of {counted(found[1], 'byte')} but its header says "
            f"{stated[0]:,} of {stated[1]:,}: it was cut short or edited; write it again"
        )
    if len(plan.start_ns) and (plan.start_ns[0] < 0 or plan.size_bytes.min() < 0 or (np.diff(plan.start_ns) < 0).any()):
        raise UsageError(f"{plan.path} has flows that are not sorted by start, or a number below 0: write it again")
    return plan


def _checked_header(path: Path) -> dict[str, Any]:
    header = read_header(path)
    for key, least in (("duration_ns", 1), ("flows", 0), ("bytes", 0)):
        if not isinstance(header.get(key), int) or header[key] < least:
            raise UsageError(f"{path} line 1: {key} must be a whole number from {least}")
    if header["duration_ns"] > _MAX_DURATION_NS:
        raise UsageError(f"{path} lasts longer than a day: cut it into plans of a day at most")
    names = header.get("destinations")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{path} line 1: destinations must be a list of host:port")
    return header


def burst_windows(plan: Plan) -> Windows | None:
    """Return the windows of a burst plan's bursts and quiet parts (Algorithm 2); None for a plan without bursts.

    Each period begins with a burst. A last period that is cut short by the plan's end is scaled down in proportion.
    """
    length, period = plan.header.get("burst_length_ns"), plan.header.get("burst_period_ns")
    if plan.kind != "burst" or not isinstance(length, int) or not isinstance(period, int):
        return None
    if not 0 < length < period or plan.duration_ns // period > _MAX_WINDOWS:
        return None
    begins = np.arange(0, plan.duration_ns, period, dtype=np.int64)
    ends = begins + length
    rest = plan.duration_ns - int(begins[-1])
    ends[-1] = begins[-1] + rest * length // period
    edges = np.concatenate((np.column_stack((begins, ends)).ravel(), [plan.duration_ns]))
    return Windows(edges, np.arange(len(edges) - 1) % 2 == 0)
