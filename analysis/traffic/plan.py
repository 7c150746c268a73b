"""Flow plans as arrays (docs/commands/traffic-plans.md specifies them), and their bursts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from ringtap.errors import UsageError
from ringtap.json_validation import NewerFormatError
from ringtap.units import counted

FORMAT, VERSION = "ringtap-flow-plan", 2
_LONGEST_HEADER = 2**24
_ROWS_AT_ONCE = 100_000
_COLUMNS = {
    1: ["start_ns", "destination", "size_bytes"],
    2: ["start_ns", "source", "destination", "size_bytes", "after"],
}
_LONGEST_NS, _MOST_WINDOWS = 24 * 3600 * 10**9, 10**7
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
    """A flow plan; the arrays have one entry per flow, in the plan's order.

    Attributes:
        path: path of its file.
        header: first line of its file.
        start_ns: start after the sender's launch; the earliest one of a flow that waits for another.
        size_bytes: payload; 0: open-ended, until the plan's end.
        destination: index into the header's destinations.
        dependent: mask of the flows that wait for another flow.
        sources: every source address that its flows are bound to; empty if some flow is bound to none.
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
    def kind(self) -> str:
        """Kind of the plan, by its header."""
        return str(self.header.get("kind", "plan"))

    @property
    def bytes(self) -> int:
        """Payload of all flows; open-ended ones count nothing."""
        return int(self.size_bytes.sum())

    @property
    def load_bps(self) -> float:
        """Mean payload rate over the plan."""
        return self.bytes * 8e9 / self.duration_ns

    def planned_bytes(self, edges_ns: Integers) -> Numbers:
        """Bytes of the flows that start between each edge and the next."""
        sums = np.concatenate(([0], np.cumsum(self.size_bytes, dtype=np.int64)))
        return np.diff(sums[np.searchsorted(self.start_ns, edges_ns)]).astype(np.float64)


@dataclass(frozen=True)
class Windows:
    """Bursts of a plan and the quiet parts between them.

    Attributes:
        edges_ns: begin of each part after the launch, and the end of the last one.
        burst: mask of the parts that are bursts.
    """

    edges_ns: Integers
    burst: Flags


def read_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        UsageError: it cannot be read, is not a plan, or does not match its header.
    """
    header = _read_header(path)
    columns = _COLUMNS[header["version"]]
    kinds: dict[str, Any] = dict.fromkeys(columns, "category") | {"start_ns": "int64", "size_bytes": "int64"}
    parts: list[pd.DataFrame] = []
    sources: set[str] = set() if "source" in columns else {"-"}
    try:
        with pd.read_csv(
            path, sep="\t", skiprows=1, names=columns, dtype=kinds, chunksize=_ROWS_AT_ONCE, na_filter=False, quoting=3,
        ) as pieces:  # fmt: skip
            for rows in pieces:
                sources.update(rows["source"].cat.categories if "source" in columns else ())
                parts.append(_numbers(rows, {name: at for at, name in enumerate(header["destinations"])}))
    except pd.errors.EmptyDataError:
        pass  # a header alone: the counts are checked against it below
    except (ValueError, OverflowError, OSError) as error:
        why = str(error).strip().splitlines()[-1]
        raise UsageError(f"{path} has a line that is no flow ({why}): write it again") from error
    table = pd.concat(parts) if parts else pd.DataFrame({name: np.empty(0, np.int64) for name in _NUMBERS})
    arrays = {name: table[name].to_numpy(kind) for name, kind in _NUMBERS.items()}
    return _checked(Plan(path, header, sources=frozenset(() if sources & {"-", ""} else sources), **arrays))


def _numbers(rows: pd.DataFrame, places: dict[str, int]) -> pd.DataFrame:
    """Return a piece of the file with numbers in place of names."""
    names = rows["destination"].cat
    unknown = [name for name in names.categories if name not in places]
    if unknown:
        raise ValueError(f"destination {unknown[0][:80]!r} is not among the header's")
    numbers = np.array([places[name] for name in names.categories], np.int64)[names.codes]
    waits = (rows["after"] != "-").to_numpy() if "after" in rows else np.zeros(len(rows), bool)
    return pd.DataFrame(
        {"start_ns": rows["start_ns"], "size_bytes": rows["size_bytes"], "destination": numbers, "dependent": waits}
    )


def _checked(plan: Plan) -> Plan:
    """Return the plan, if it matches its header."""
    found, asked = (len(plan.start_ns), plan.bytes), (plan.header["flows"], plan.header["bytes"])
    if found != asked:
        raise UsageError(
            f"{plan.path} holds {counted(found[0], 'flow')} of {counted(found[1], 'byte')} but its header says "
            f"{asked[0]:,} of {asked[1]:,}: it was cut short or edited; write it again"
        )
    if len(plan.start_ns) and (plan.start_ns[0] < 0 or plan.size_bytes.min() < 0 or (np.diff(plan.start_ns) < 0).any()):
        raise UsageError(f"{plan.path} has flows that are not sorted by start, or a number below 0: write it again")
    return plan


def _read_header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline(_LONGEST_HEADER))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no flow plan: line 1 is not JSON") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise UsageError(f"{path} is no flow plan: line 1 does not say format {FORMAT!r}")
    for key, least in (("version", 1), ("duration_ns", 1), ("flows", 0), ("bytes", 0)):
        if not isinstance(header.get(key), int) or header[key] < least:
            raise UsageError(f"{path} line 1: {key} must be a whole number from {least}")
        if key == "version" and header[key] > VERSION:
            raise NewerFormatError(path, header.get("ringtap"), header[key], VERSION)
    if header["duration_ns"] > _LONGEST_NS:
        raise UsageError(f"{path} lasts longer than a day: cut it into plans of a day at most")
    names = header.get("destinations")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{path} line 1: destinations must be a list of host:port")
    return header


def burst_windows(plan: Plan) -> Windows | None:
    """Return the windows of a burst plan's bursts and quiet parts (Algorithm 2); None for a plan without bursts.

    Each period begins with a burst. A last period that the plan's end cuts short is scaled down as a whole.
    """
    length, period = plan.header.get("burst_length_ns"), plan.header.get("burst_period_ns")
    if plan.kind != "burst" or not isinstance(length, int) or not isinstance(period, int):
        return None
    if not 0 < length < period or plan.duration_ns // period > _MOST_WINDOWS:
        return None
    begins = np.arange(0, plan.duration_ns, period, dtype=np.int64)
    ends = begins + length
    rest = plan.duration_ns - int(begins[-1])
    ends[-1] = begins[-1] + rest * length // period
    edges = np.concatenate((np.column_stack((begins, ends)).ravel(), [plan.duration_ns]))
    return Windows(edges, np.arange(len(edges) - 1) % 2 == 0)
