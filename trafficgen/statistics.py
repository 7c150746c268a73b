"""Calculates flow statistics: log histograms, counts of launcher and sender workers, the congestion impact factor."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import FLOW_STATES, LOAD_BIN_NS, MISSED_NS, SIZE_CLASSES_BYTES
from ringtap.core.sent_flow_log import NO_SOURCE, open_sent_log, slowdown
from ringtap.trafficgen.flow_log import FlowLog
from ringtap.trafficgen.outgoing_sockets import TcpState
from ringtap.trafficgen.sender.ipc import FlowState

# Adjacent bins are 1 % apart; that is also the largest error of a quantile
_STEP = math.log(1.01)


class LogHistogram:
    """A log histogram of values of 0 or more, with their mean, maximum, and quantiles to within 1 %.

    Attributes:
        count: number of values.
        greatest: the largest value, 0 if there are none.
    """

    def __init__(self) -> None:
        self.count = 0
        self.greatest = 0
        self._sum = 0
        self._classes: Counter[int] = Counter()

    def add(self, value: int) -> None:
        """Add one value; a negative one counts as 0."""
        value = max(0, value)
        self.count += 1
        self._sum += value
        self.greatest = max(self.greatest, value)
        self._classes[int(math.log(value) / _STEP) + 1 if value else 0] += 1

    def merge(self, other: LogHistogram) -> None:
        """Add the values of another log histogram."""
        self.count += other.count
        self.greatest = max(self.greatest, other.greatest)
        self._sum += other._sum
        self._classes.update(other._classes)

    def mean(self) -> float | None:
        """Return the mean, or None without values."""
        return self._sum / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """Return the value that ``share`` of the values do not exceed, or None without values."""
        wanted, seen = share * self.count, 0
        for number in sorted(self._classes):
            seen += self._classes[number]
            if seen >= wanted:
                return min(float(self.greatest), math.exp((number - 0.5) * _STEP)) if number else 0.0
        return None


_THOUSANDTHS = 1000


@dataclass(frozen=True)
class Ending:
    """The end of one flow.

    Attributes:
        state: a key of ``FLOW_STATES``.
        first_byte_ns: CLOCK_MONOTONIC when the kernel accepted its first byte, 0: never.
        finish_ns: CLOCK_MONOTONIC when the receiver's notice was read, 0: never.
        received_ns: the receiver's CLOCK_REALTIME when it had received everything, 0: unknown.
        sent_bytes: payload that the kernel accepted.
        acked_bytes: payload that the receiver's kernel acknowledged.
    """

    state: str
    first_byte_ns: int = 0
    finish_ns: int = 0
    received_ns: int = 0
    sent_bytes: int = 0
    acked_bytes: int = 0


class FlowStatistics:
    """Flow statistics: counts flows as they are launched and as they end, and logs each flow at its end.

    Args:
        capacity_bps: capacity of the link, for slowdowns; 0: unknown.

    Attributes:
        first_failure: reason of the first failed flow, empty if none failed.
    """

    def __init__(self, capacity_bps: float = 0.0) -> None:
        self.first_failure = ""
        self.connections = 0
        self.launched_bytes = 0
        self.counts = dict.fromkeys(FLOW_STATES, 0)
        self.lateness, self.completion = LogHistogram(), LogHistogram()
        self.by_size = [(LogHistogram(), LogHistogram()) for _ in SIZE_CLASSES_BYTES]
        self.acked_bytes = self.retransmits = self.missed = self.last_finish_ns = 0
        self.offered: Counter[int] = Counter()
        self.sent: Counter[int] = Counter()
        self._capacity_bps = capacity_bps
        self._log = FlowLog(None, (), {})
        self._origin_ns = self._shift_ns = 0

    def begin(self, log: FlowLog, origin_ns: int, origin_real_ns: int) -> None:
        """Set the log of flows and the origin of times (CLOCK_MONOTONIC and CLOCK_REALTIME of the launch)."""
        self._log, self._origin_ns, self._shift_ns = log, origin_ns, origin_real_ns - origin_ns

    def due(self, size_bytes: int, due_ns: int) -> None:
        """Count a flow as due."""
        self.launched_bytes += size_bytes
        self.offered[(due_ns - self._origin_ns) // LOAD_BIN_NS] += size_bytes

    def launched(self, lateness_ns: int) -> None:
        """Count a flow as launched."""
        self.lateness.add(lateness_ns)
        self.missed += lateness_ns > MISSED_NS

    def moved(self, now_ns: int, size_bytes: int) -> None:
        """Count bytes of a flow that the kernel accepted."""
        self.sent[(now_ns - self._origin_ns) // LOAD_BIN_NS] += size_bytes

    def ended(self, flow: FlowState, end: Ending, tcp: TcpState, source: int, destination: int) -> None:
        """Count and log the end of a flow; a flow without a start time never had a connection."""
        self.counts[end.state] += 1
        self.acked_bytes += end.acked_bytes
        self.retransmits += tcp.retransmits
        if end.finish_ns:
            self.last_finish_ns = max(self.last_finish_ns, end.finish_ns)
            if flow.size_bytes:
                self._completed(flow.size_bytes, end.finish_ns - flow.start_ns, tcp.min_rtt_us)
        shift_ns = self._shift_ns
        self._log.add(
            flow.number,
            flow.due_ns + shift_ns,
            flow.start_ns and flow.start_ns + shift_ns,
            end.first_byte_ns and end.first_byte_ns + shift_ns,
            end.finish_ns and end.finish_ns + shift_ns,
            end.received_ns,
            flow.start_ns and flow.start_ns - flow.due_ns,
            flow.size_bytes,
            end.sent_bytes,
            end.acked_bytes,
            tcp.retransmits,
            tcp.rtt_us,
            tcp.min_rtt_us,
            FLOW_STATES[end.state],
            NO_SOURCE if source < 0 else source,
            destination,
        )

    def flush(self) -> None:
        """Write the logged records to the file.

        Raises:
            MeasurementError: the log cannot be written.
        """
        self._log.flush()

    def without_log(self) -> FlowStatistics:
        """Drop the log, so that the statistics can be sent to another process; return ``self``."""
        self._log = FlowLog(None, (), {})
        return self

    def merge(self, other: FlowStatistics) -> None:
        """Add the counts of other flow statistics."""
        self.first_failure = self.first_failure or other.first_failure
        for state, count in other.counts.items():
            self.counts[state] += count
        for name in ("connections", "launched_bytes", "acked_bytes", "retransmits", "missed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.last_finish_ns = max(self.last_finish_ns, other.last_finish_ns)
        self.lateness.merge(other.lateness)
        self.completion.merge(other.completion)
        for (fct, slower), (other_fct, other_slower) in zip(self.by_size, other.by_size, strict=True):
            fct.merge(other_fct)
            slower.merge(other_slower)
        self.offered.update(other.offered)
        self.sent.update(other.sent)

    def summary(self, origin_ns: int, launched_s: float) -> dict[str, Any]:
        """Return the summary; ``launched_s`` is the time during which flows were launched, in seconds."""
        elapsed_s = max(launched_s, (self.last_finish_ns - origin_ns) / 1e9)
        late = self.lateness
        summary: dict[str, Any] = {"flows": sum(self.counts.values()), **self.counts}
        summary |= {"bytes": self.launched_bytes, "acked_bytes": self.acked_bytes, "duration_s": launched_s}
        summary |= {"offered_bps": _rate(self.launched_bytes, launched_s)}
        summary |= {"achieved_bps": _rate(self.acked_bytes, elapsed_s)}
        summary |= _quantiles("fct", self.completion, 1e9)
        summary |= {"lateness_p50_us": _divided(late.quantile(0.5), 1e3)}
        summary |= {"lateness_p99_us": _divided(late.quantile(0.99), 1e3), "lateness_max_us": late.greatest / 1e3}
        summary |= {"missed_slots": self.missed, "retransmits": self.retransmits, "connections": self.connections}
        return summary | {"fct_by_size": self._size_classes(), "load_100ms": self._bins(launched_s)}

    def _completed(self, size_bytes: int, completion_ns: int, min_rtt_us: int) -> None:
        self.completion.add(completion_ns)
        size_class = next(at for at, most in enumerate(SIZE_CLASSES_BYTES) if most is None or size_bytes < most)
        self.by_size[size_class][0].add(completion_ns)
        if self._capacity_bps and min_rtt_us:
            times = slowdown(completion_ns, size_bytes, min_rtt_us, self._capacity_bps)
            self.by_size[size_class][1].add(round(_THOUSANDTHS * times))

    def _size_classes(self) -> list[dict[str, Any]]:
        rows, below = [], 0
        for most, (fct, slower) in zip(SIZE_CLASSES_BYTES, self.by_size, strict=True):
            row = {"from_bytes": below, "to_bytes": most, "flows": fct.count, **_quantiles("fct", fct, 1e9)}
            rows.append(row | _quantiles("slowdown", slower, _THOUSANDTHS))
            below = most or 0
        return rows

    def _bins(self, launched_s: float) -> dict[str, list[float]]:
        count = -int(-launched_s * 1e9 // LOAD_BIN_NS)
        return {
            f"{name}_bps": [bins[at] * 8e9 / LOAD_BIN_NS for at in range(count)]
            for name, bins in (("offered", self.offered), ("sent", self.sent))
        }


def _quantiles(name: str, histogram: LogHistogram, unit: float) -> dict[str, float | None]:
    ending = "_s" if unit == 1e9 else ""
    return {
        f"{name}_mean{ending}": _divided(histogram.mean(), unit),
        f"{name}_p50{ending}": _divided(histogram.quantile(0.5), unit),
        f"{name}_p99{ending}": _divided(histogram.quantile(0.99), unit),
    }


def _rate(size_bytes: int, seconds: float) -> float:
    return size_bytes * 8 / seconds if seconds > 0 else 0.0


def _divided(value: float | None, divisor: float) -> float | None:
    return None if value is None else value / divisor


@dataclass(frozen=True)
class Baseline:
    """Flow completion times without congestion, in seconds."""

    fct_mean_s: float
    fct_p99_s: float

    def of(self, summary: dict[str, Any]) -> dict[str, float] | None:
        """Return the congestion impact factors of a run from its summary; None if none of its flows finished."""
        if summary["fct_mean_s"] is None:
            return None
        return {"mean": summary["fct_mean_s"] / self.fct_mean_s, "p99": summary["fct_p99_s"] / self.fct_p99_s}


def congestion_impact(baseline: Path) -> Baseline:
    """Read the baseline of the congestion impact factor from a sender's log.

    Raises:
        UsageError: the file cannot be read or is not a sender's log, or none of its flows finished.
    """
    times = LogHistogram()
    for flow in open_sent_log(baseline).flows():
        if (completion_ns := flow.completion_ns) is not None:
            times.add(completion_ns)
    mean_ns, p99_ns = times.mean(), times.quantile(0.99)
    if not mean_ns or not p99_ns:
        raise UsageError(f"{baseline} has no finished flow: it cannot be the baseline")
    return Baseline(mean_ns / 1e9, p99_ns / 1e9)
