"""Reads per-flow logs of one or several senders of the same plan as arrays (docs/commands/traffic.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ringtap.analysis.runs.read_binary_records import map_file
from ringtap.analysis.traffic.plan_bursts import Flags
from ringtap.core.flow_plan_format import MAX_INT64
from ringtap.core.flow_plan_table import Integers
from ringtap.core.run_directory_schema import FLOW_STATES
from ringtap.core.sent_flow_log import NO_SOURCE, open_sent_log
from ringtap.core.untrusted_files import open_regular

FINISHED, UNFINISHED, FAILED = (FLOW_STATES[name] for name in ("finished", "unfinished", "failed"))
_NEVER = -(2**62)
_TIMES = ("intended_start_ns", "start_ns", "first_byte_ns", "finish_ns")
_COLUMNS = (
    "flow",
    *_TIMES,
    "lateness_ns",
    "size_bytes",
    "sent_bytes",
    "acked_bytes",
    "retransmits",
    "min_rtt_us",
    "state",
)


@dataclass(frozen=True)
class SenderLogs:
    """Logs of senders; the arrays have one entry per record, in no particular order.

    Times count from the launch of the record's own sender; the time of an event that never happened is below -10^18.

    Attributes:
        paths: the logs.
        about: their headers.
        origin_ns: the earliest launch, CLOCK_REALTIME of its host.
        origin_monotonic_ns: the same, CLOCK_MONOTONIC of its host; None: not known.
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
        min_rtt_us: smallest round-trip time of the connection, 0: unknown.
        state: 0 finished, 1 unfinished, 2 failed.
        destination: ``host:port`` by number in ``destinations``.
        destinations: every ``host:port`` of the logs.
    """

    paths: list[Path]
    about: list[dict[str, Any]]
    origin_ns: int
    origin_monotonic_ns: int | None
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
    min_rtt_us: Integers
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

    @property
    def completed(self) -> Flags:
        """Mask of the flows that have a completion time: finished ones with a size."""
        is_done: Flags = (self.state == FINISHED) & _happened(self.finish_ns) & self.started & (self.size_bytes > 0)
        return is_done

    @property
    def completion_ns(self) -> Integers:
        """Completion times, finish minus start, of the completed flows."""
        return self.finish_ns[self.completed] - self.start_ns[self.completed]


def _happened(times_ns: Integers) -> Flags:
    return times_ns > -(10**18)


def read_sent(paths: Sequence[Path]) -> SenderLogs:
    """Read the logs of one or several senders.

    Raises:
        UsageError: a log cannot be read, is not a sender's, is damaged, or lacks a column.
    """
    logs = [open_sent_log(path) for path in paths]
    destinations = list(dict.fromkeys(name for log in logs for name in log.destinations))
    parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*_COLUMNS, "destination")}
    for log in logs:
        with open_regular(log.file.path) as stream:
            records = map_file(log.file, stream)
        for name in _COLUMNS:
            known = name in log.file.index
            values = records[name].astype(np.int64) if known else np.zeros(len(records), np.int64)
            parts[name].append(np.where(values == 0, _NEVER, values - log.origin_ns) if name in _TIMES else values)
        if len(records):
            sources = records["source"] if "source" in log.file.index else np.empty(0, np.uint32)
            bound = sources[sources != NO_SOURCE]
            log.check_ends(int(bound.max(initial=0)) if len(bound) else NO_SOURCE, int(records["destination"].max()))
        indexes = np.array([destinations.index(name) for name in log.destinations] or [0], np.int64)
        parts["destination"].append(indexes[records["destination"].astype(np.int64)])
    arrays = {name: values[0] if len(values) == 1 else np.concatenate(values) for name, values in parts.items()}
    origins = [log.origin_ns for log in logs]
    earliest = logs[origins.index(min(origins))]
    launch_ns = earliest.file.about.get("origin_monotonic_ns")
    return SenderLogs(
        paths=list(paths),
        about=[log.file.about for log in logs],
        origin_ns=earliest.origin_ns,
        origin_monotonic_ns=launch_ns if type(launch_ns) is int and 0 <= launch_ns <= MAX_INT64 else None,
        origin_spread_ns=max(origins) - min(origins),
        torn=sum(log.file.torn_bytes > 0 for log in logs),
        destinations=destinations,
        **arrays,
    )
