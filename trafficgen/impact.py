"""GPCNeT's Congestion Impact Factor: how much longer flows take than in a run without congestion.

Chunduri et al., GPCNeT: Designing a Benchmark Suite for Inducing and Measuring Contention in HPC Networks, SC '19: the
ratio of a figure under congestion to the same figure in isolation, here of mean and 99th percentile completion time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtap.errors import UsageError
from ringtap.records import open_records
from ringtap.trafficgen.flowlog import STATES
from ringtap.trafficgen.tally import Tally


@dataclass(frozen=True)
class Baseline:
    """Completion times without congestion, in seconds."""

    fct_mean_s: float
    fct_p99_s: float

    def of(self, summary: dict[str, Any]) -> dict[str, float] | None:
        """The factors of a run by its summary; None when none of its flows finished."""
        if summary["fct_mean_s"] is None:
            return None
        return {"mean": summary["fct_mean_s"] / self.fct_mean_s, "p99": summary["fct_p99_s"] / self.fct_p99_s}


def congestion_impact(baseline: Path) -> Baseline:
    """Read the baseline from a sender's log.

    Raises:
        UsageError: it is no sender's log, or none of its flows finished.
    """
    try:
        records = open_records(baseline)
    except OSError as error:
        raise UsageError(f"{baseline} cannot be read: {error.strerror}") from error
    names = [field.name for field in records.fields]
    try:
        start, finish, state, size = (names.index(name) for name in ("start_ns", "finish_ns", "state", "size_bytes"))
        names.index("intended_start_ns")
    except ValueError as error:
        raise UsageError(f"{baseline} is no sender's log: name one that 'ringtap traffic send --log' wrote") from error
    times = Tally()
    for record in records.walk():
        if record[state] == STATES["finished"] and record[size]:  # an open-ended flow takes as long as the plan
            times.add(record[finish] - record[start])
    mean_ns, p99_ns = times.mean(), times.quantile(0.99)
    if not mean_ns or not p99_ns:
        raise UsageError(f"{baseline} has no finished flow: it is of no use as a baseline")
    return Baseline(mean_ns / 1e9, p99_ns / 1e9)
