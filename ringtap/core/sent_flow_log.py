"""Defines the log of flows that ``ringtap traffic send`` writes, and reads it (docs/commands/traffic.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ringtap.core.append_only_logs import INTEGER, Field, RecordFile, open_records
from ringtap.core.errors import UsageError, file_errors
from ringtap.core.run_directory_schema import FLOW_STATES

FIELDS = (
    Field("flow", "<u8", "", "index"),
    Field("intended_start_ns", "<i8", "ns", "time"),
    Field("start_ns", "<i8", "ns", "time"),
    Field("first_byte_ns", "<i8", "ns", "time"),
    Field("finish_ns", "<i8", "ns", "time"),
    Field("received_ns", "<i8", "ns", "time"),
    Field("lateness_ns", "<i8", "ns", "gauge"),
    Field("size_bytes", "<i8", "bytes", "gauge"),
    Field("sent_bytes", "<i8", "bytes", "gauge"),
    Field("acked_bytes", "<i8", "bytes", "gauge"),
    Field("retransmits", "<u4", "packets", "gauge"),
    Field("rtt_us", "<u4", "us", "gauge"),
    Field("min_rtt_us", "<u4", "us", "gauge"),
    Field("state", "<u4", "", "index"),
    Field("source", "<u4", "", "index"),
    Field("destination", "<u4", "", "index"),
)
NO_SOURCE = 2**32 - 1
# logs of older versions lack these
_OPTIONAL = {"received_ns": 0, "min_rtt_us": 0, "source": NO_SOURCE}


class SentFlow(NamedTuple):
    """A record of a log: a flow, as it ended.

    Times are CLOCK_REALTIME of the sender's host, but `received_ns` that of the receiver's; 0: it never happened.

    Attributes:
        flow: number in the plan.
        intended_start_ns: time at which the flow was due.
        start_ns: time at which the launcher started it.
        first_byte_ns: time at which the kernel accepted its first byte.
        finish_ns: time at which the receiver's completion notice was read.
        received_ns: time at which the receiver had received everything.
        lateness_ns: start minus intended start, by the monotonic clock.
        size_bytes: payload requested; 0: until the plan's end.
        sent_bytes: payload that the kernel accepted.
        acked_bytes: payload that the receiving kernel acknowledged; all of a finished flow.
        retransmits: segments retransmitted.
        rtt_us: smoothed round-trip time at the end; 0: unknown.
        min_rtt_us: smallest round-trip time that the kernel has of the connection at the end; 0: unknown.
        state: a value of ``FLOW_STATES``.
        source: number of the address that it was sent from; `NO_SOURCE`: the routing table's choice.
        destination: number of its receiver.
    """

    flow: int
    intended_start_ns: int
    start_ns: int
    first_byte_ns: int
    finish_ns: int
    received_ns: int
    lateness_ns: int
    size_bytes: int
    sent_bytes: int
    acked_bytes: int
    retransmits: int
    rtt_us: int
    min_rtt_us: int
    state: int
    source: int
    destination: int

    @property
    def completion_ns(self) -> int | None:
        """Time from start to finish; None if it has not finished, or lasts until the plan's end."""
        is_known = self.state == FLOW_STATES["finished"] and self.start_ns and self.finish_ns and self.size_bytes
        return self.finish_ns - self.start_ns if is_known else None


@dataclass(frozen=True)
class SentLog:
    """A log of ``ringtap traffic send``.

    Attributes:
        file: its header, and where its records lie.
        origin_ns: the launch, CLOCK_REALTIME of the sender's host.
        sources: addresses that flows are sent from, by number.
        destinations: ``host:port`` of the receivers, by number.
    """

    file: RecordFile
    origin_ns: int
    sources: list[str]
    destinations: list[str]

    def flows(self) -> Iterator[SentFlow]:
        """Yield the records, in no particular order.

        Raises:
            UsageError: a record does not fit the header.
        """
        for record in self.file.walk():
            flow = self._flow(record)
            self.check_ends(flow.source, flow.destination)
            yield flow

    @cached_property
    def _flow(self) -> Callable[[tuple[int, ...]], SentFlow]:
        """Function from a record to a flow."""
        index = self.file.index
        if tuple(index) == SentFlow._fields:
            return SentFlow._make
        return lambda record: SentFlow._make(
            record[index[name]] if name in index else _OPTIONAL[name] for name in SentFlow._fields
        )

    def check_ends(self, source: int, destination: int) -> None:
        """Refuse numbers of addresses that the header lacks.

        Raises:
            UsageError: it lacks one.
        """
        for what, number, names in (("source", source, self.sources), ("destination", destination, self.destinations)):
            if number >= len(names) and (what, number) != ("source", NO_SOURCE):
                raise UsageError(f"{self.file.path} is damaged: it names {what} {number}")


def open_sent_log(path: Path) -> SentLog:
    """Open a log, and check its header.

    Raises:
        UsageError: it cannot be read, is not the log of a sender, or lacks a column.
    """
    with file_errors(path):
        file = open_records(path)
    about, types = file.about, {field.name: field.type for field in file.fields}
    origin_ns, destinations = about.get("origin_ns"), about.get("destinations")
    if about.get("source") != "sender" or not isinstance(origin_ns, int) or destinations is None:
        raise UsageError(f"{path} is not a log of 'ringtap traffic send'")
    names = [field.name for field in FIELDS]
    if lacking := [name for name in names if name not in types and name not in _OPTIONAL]:
        raise UsageError(f"{path} has no {', '.join(lacking)}: an older ringtap wrote it; send the plan again")
    if wrong := [name for name in names if types.get(name, "<i8") not in INTEGER]:
        raise UsageError(f"{path} is not a log of 'ringtap traffic send': its {wrong[0]} is not a whole number")
    return SentLog(file, origin_ns, about.get("sources") or [], destinations)


def slowdown(completion_ns: Any, size_bytes: Any, min_rtt_us: Any, capacity_bps: float) -> Any:
    """Return a flow's completion time over its ideal one, on an empty link; all but the rate may be arrays.

    Args:
        completion_ns: time from its start to the receiver's notice.
        size_bytes: its payload.
        min_rtt_us: the smallest round-trip time of its connection.
        capacity_bps: capacity of the link.
    """
    return completion_ns / (min_rtt_us * 1e3 + size_bytes * 8e9 / capacity_bps)
