"""Per-flow logs of one or several senders of the same plan, as arrays (docs/commands/traffic.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringtap.analysis.runs.run import map_file
from ringtap.analysis.traffic.bursts import Flags
from ringtap.core.errors import UsageError, file_errors
from ringtap.core.flow_table import Integers, Numbers
from ringtap.core.records import INTEGER, RecordFile, open_records
from ringtap.core.run_files import open_regular
from ringtap.core.schema import FLOW_STATES

FINISHED, UNFINISHED, FAILED = (FLOW_STATES[name] for name in ("finished", "unfinished", "failed"))
_NEVER = -(2**62)
_TIMES = ("intended_start_ns", "start_ns", "first_byte_ns", "finish_ns")
_COLUMNS = ("flow", *_TIMES, "lateness_ns", "size_bytes", "sent_bytes", "acked_bytes", "retransmits", "rtt_us", "state")
_READ = {*_COLUMNS, "destination"}


@dataclass(frozen=True)
class SenderLogs:
    """Logs of senders; the arrays have one entry per record, in no particular order.

    Times count from the launch of the record's own sender; the time of an event that never happened is below -10^18.

    Attributes:
        paths: the logs.
        about: their headers.
        origin_ns: the earliest launch, CLOCK_REALTIME of its host.
        origin_spread_ns: time from the earliest to the latest launch.
        torn: number of logs whose torn last record was dropped.
        flow: number in the plan.
        intended_start_ns: time at which the flow was due.
        start_ns: time at which the launcher started it.
        first_byte_ns: time at which the kernel accepted its first byte.
        finish_ns: time at which the receiver's completion notice was read.
        lateness_ns: start minus intended start, by the monotonic clock.
        size_bytes: payload requested, 0: until the plan's end.
        sent_bytes: payload that the kernel accepted.
        acked_bytes: payload that the receiving kernel acknowledged.
        retransmits: segments retransmitted.
        rtt_us: smoothed round-trip time at the end, 0: unknown.
        state: 0 finished, 1 unfinished, 2 failed.
        destination: ``host:port`` by number in ``destinations``.
        destinations: every ``host:port`` of the logs.
    """

    paths: list[Path]
    about: list[dict[str, Any]]
    origin_ns: int
    origin_spread_ns: int
    torn: int
    flow: Integers
    intended_start_ns: Integers
    start_ns: Integers
    first_byte_ns: Integers
    finish_ns: Integers
    lateness_ns: Integers
    size_bytes: Integers
    sent_bytes: Integers
    acked_bytes: Integers
    retransmits: Integers
    rtt_us: Integers
    state: Integers
    destination: Integers
    destinations: list[str]

    @property
    def started(self) -> Flags:
        """Mask of the flows that the launcher started."""
        return _happened(self.start_ns)

    @property
    def moved(self) -> Flags:
        """Mask of the flows of which the kernel accepted a byte."""
        return _happened(self.first_byte_ns)

    @property
    def received_bytes(self) -> Integers:
        """Payload that arrived: all of a finished flow, the acknowledged bytes of others."""
        return np.where(self.state == FINISHED, self.sent_bytes, self.acked_bytes)

    @property
    def last_ns(self) -> int:
        """The latest finish, 0 if nothing finished."""
        return max(0, int(self.finish_ns.max(initial=0)))

    def completion_s(self) -> tuple[Numbers, Integers]:
        """Return completion times (finish minus start) in seconds and sizes in bytes of finished flows with a size."""
        done = (self.state == FINISHED) & _happened(self.finish_ns) & self.started & (self.size_bytes > 0)
        return (self.finish_ns[done] - self.start_ns[done]) / 1e9, self.size_bytes[done]


def _happened(times_ns: Integers) -> Flags:
    return times_ns > -(10**18)


def read_sent(paths: Sequence[Path]) -> SenderLogs:
    """Read the logs of one or several senders.

    Raises:
        UsageError: a log cannot be read, is not a sender's, is damaged, or lacks a column.
    """
    files = [_open(path) for path in paths]
    origins = [int(file.about["origin_ns"]) for file in files]
    destinations = list(dict.fromkeys(name for file in files for name in file.about["destinations"]))
    parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*_COLUMNS, "destination")}
    for file, origin_ns in zip(files, origins, strict=True):
        with open_regular(file.path) as stream:
            records = map_file(file, stream)
        for name in _COLUMNS:
            values = records[name].astype(np.int64)
            parts[name].append(np.where(values == 0, _NEVER, values - origin_ns) if name in _TIMES else values)
        indexes = np.array([destinations.index(name) for name in file.about["destinations"]] or [0], np.int64)
        if len(records) and int(records["destination"].max()) >= len(indexes):
            raise UsageError(f"{file.path} is damaged: it names destination {int(records['destination'].max())}")
        parts["destination"].append(indexes[records["destination"].astype(np.int64)])
    arrays = {name: values[0] if len(values) == 1 else np.concatenate(values) for name, values in parts.items()}
    return SenderLogs(
        paths=list(paths),
        about=[file.about for file in files],
        origin_ns=min(origins),
        origin_spread_ns=max(origins) - min(origins),
        torn=sum(file.torn_bytes > 0 for file in files),
        destinations=destinations,
        **arrays,
    )


def _open(path: Path) -> RecordFile:
    with file_errors(path):
        file = open_records(path)
    if file.about.get("source") != "sender" or "origin_ns" not in file.about or "destinations" not in file.about:
        raise UsageError(f"{path} is not a log of 'ringtap traffic send'")
    lacking = _READ - {field.name for field in file.fields}
    if lacking:
        raise UsageError(f"{path} has no {', '.join(sorted(lacking))}: an older ringtap wrote it; send the plan again")
    wrong = [field.name for field in file.fields if field.name in _READ and field.type not in INTEGER]
    if wrong:
        raise UsageError(f"{path} is not a log of 'ringtap traffic send': its {wrong[0]} is not a whole number")
    return file
