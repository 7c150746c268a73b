"""Writes the clock log of a node: clock/clock.json at intervals, and every answered ping into clock/pings.rec."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringtap.agents.clock import clock_offset_fit as clock_fit
from ringtap.agents.clock.clock_offset_fit import Break, ClockFit, Measurement
from ringtap.agents.clock.local_clock import Clock, ClockStep, adjtimex, boot_id, file_system
from ringtap.core.append_only_logs import Field, RecordFile, RecordWriter, cut_torn_record
from ringtap.core.errors import RingtapError
from ringtap.core.run_directory import read_json, write_json
from ringtap.core.run_directory_schema import CLOCK, CLOCK_JSON

if TYPE_CHECKING:
    from ringtap.agents.clock.ping_protocol import Ping

_FIELDS = [
    Field("t_ns", "<i8", "ns", "time"),
    Field("mono_ns", "<i8", "ns", "time"),
    Field("reference_received_ns", "<i8", "ns", "time"),
    Field("reference_answered_ns", "<i8", "ns", "time"),
    Field("received_ns", "<i8", "ns", "time"),
    Field("sequence", "<u4", "pings", "index"),
    Field("burst", "<u4", "bursts", "index"),
    Field("kernel_stamps", "<u1", "1 reference, 2 this node", "index"),
]
_BURST = [field.name for field in _FIELDS].index("burst")
# the kernel lets a clock's error grow by 500 ppm of the time since the daemon last set it
_NTP_GROWTH = 500e-6

_MOST_MEASUREMENTS = 2000  # that lines are drawn through; all pings are in the log


class ClockLog:
    """The log of a node's clock in the run directory.

    Args:
        run: the run directory.
        node: this node.
        reference: the reference node, whose clock is the time base of the run.
        clock: this node's clocks.
    """

    def __init__(self, run: Path, node: str, reference: str, clock: Clock) -> None:
        self._run, self._node, self.reference, self._clock = run, node, reference, clock
        self.folder = run / "nodes" / node / "clock"
        self.measurements: list[Measurement] = []
        self.steps: list[ClockStep] = []
        self.breaks: list[Break] = []  # steps of the reference node's clock, according to its answers
        self.reason, self.remedy = "", ""
        self.facts: dict[str, Any] = {}
        self._before = adjtimex()
        self._begin_mono_ns = clock.mono_ns()
        self._writer: RecordWriter | None = None
        self._bursts = 0
        self._published_s = 0.0
        self._began_s = time.monotonic()

    def open_pings(self) -> None:
        """Open the log of pings; its existence also asks the clock server to answer."""
        path = self.folder / "pings.rec"
        try:
            self._writer = RecordWriter(path, _FIELDS, {"collector": "clock", "source": "UDP pings", "every_s": 10.0})
        except FileExistsError:  # an earlier agent of this node and run
            log = cut_torn_record(path)
            self._writer = RecordWriter(path, _FIELDS, None)
            self._resume(log)

    def _resume(self, log: RecordFile) -> None:
        """Take over an earlier agent's measurements if it ran since the same boot and with the same reference node."""
        last = log.tail(log.count - 1) if log.count else []
        self._bursts = last[0][_BURST] + 1 if last else 0
        with suppress(RingtapError, KeyError, TypeError):
            item = read_json(self.folder / "clock.json", CLOCK)
            if item["boot_id"] == boot_id() and item["reference"] == self.reference:
                steps = [ClockStep(**step) for step in item["steps"]]
                self.measurements = [Measurement(**row) for row in item["measurements"]]
                self.steps = steps
                begins = [part["from_mono_ns"] for part in item["segments"]]
                self._begin_mono_ns = min([self._begin_mono_ns, *begins])

    def note_burst(self, phase: str, answered: list[Ping], lost: int) -> Measurement | None:
        """Log a burst's pings; returns its measurement, from the ping with the least round trip."""
        if self._writer is not None and answered:
            rows = [
                (p.t1_ns, p.mono_ns, p.t2_ns, p.t3_ns, p.t4_ns, p.sequence, self._bursts, p.kernel_stamps)
                for p in answered
            ]
            self._writer.append_many(rows)
        self._bursts += 1
        # a round trip is 0 or negative if a clock was set meanwhile
        usable = [ping for ping in answered if ping.round_trip_ns > 0]
        if not usable:
            return None
        best = min(usable, key=lambda ping: ping.round_trip_ns)
        half_ns = (best.t4_ns - best.t1_ns) // 2
        error_ns = best.round_trip_ns // 2 + 1
        found = Measurement(
            best.t1_ns + half_ns,
            best.mono_ns + half_ns,
            phase,
            best.offset_ns,
            error_ns,
            best.round_trip_ns,
            len(answered),
            lost,
        )
        self.measurements = _thinned([*self.measurements, found])
        self.facts["kernel_stamps"] = all(ping.kernel_stamps == 3 for ping in usable)
        return found

    def due(self) -> bool:
        """True if clock.json should be written again; the intervals grow, because the whole file is written."""
        now_s = time.monotonic()
        return now_s - self._published_s >= min(600.0, max(5.0, (now_s - self._began_s) / 4))

    def publish(self) -> dict[str, Any]:
        """Write clock.json; returns its summary for node.json."""
        self._published_s = time.monotonic()
        item = self._item()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "clock.json", item)
        fit = item["fit"] or {}
        summary = {"source": item["source"], "reference": self.reference, "measurements": len(self.measurements)}
        summary |= {key: fit.get(key) for key in ("offset_ns", "drift_ppm", "error_ns")}
        return summary | {"steps": len(self.steps)} | self.facts

    def _item(self) -> dict[str, Any]:
        now = adjtimex()
        end_mono_ns = self._clock.mono_ns()
        own_breaks = [(step.mono_before_ns, step.mono_ns) for step in self.steps]
        parts = clock_fit.segments(self.measurements, [*own_breaks, *self.breaks], self._begin_mono_ns, end_mono_ns)
        source, shown, extra = self._choose(parts, now)
        return {
            "reference": self.reference,
            "clock": "CLOCK_REALTIME",
            "source": source,
            "reason": self.reason,
            "remedy": self.remedy,
            "measurements": [asdict(measurement) for measurement in self.measurements],
            "fit": asdict(clock_fit.overall(shown)) if shown else None,
            "segments": [asdict(part) for part in shown],
            "steps": [asdict(step) for step in self.steps],
            "adjtimex": now,
            "adjtimex_before": self._before,
            "boot_id": boot_id(),
            **extra,
            **self.facts,
        }

    def _choose(self, parts: list[ClockFit], now: dict[str, Any]) -> tuple[str, list[ClockFit], dict[str, Any]]:
        """Choose the best estimate of the offset; returns its source, segments and further entries for clock.json."""
        if self._node == self.reference:
            return "this node is the reference", [self._zero_line(0)], {}
        reference = self._reference_item()
        if self._same_kernel(reference):
            return "same kernel", [self._zero_line(0)], {"measured": [asdict(part) for part in parts]}
        if parts:
            return "pings", parts, {}
        bound_ns = _daemons_bound_ns(now, reference.get("adjtimex") or {})
        return ("time daemons", [self._zero_line(bound_ns)], {}) if bound_ns else ("none", [], {})

    def _zero_line(self, error_ns: int) -> ClockFit:
        """A line with offset and drift 0, for the time of the run."""
        mono_ns = self._clock.mono_ns()
        end_ns = mono_ns + self._clock.gap_ns()
        begin_ns = end_ns - (mono_ns - self._begin_mono_ns)
        return ClockFit(begin_ns, end_ns, self._begin_mono_ns, mono_ns, begin_ns, 0, 0.0, error_ns, 0)

    def _reference_item(self) -> dict[str, Any]:
        """The reference node's clock.json; empty if it cannot be read."""
        with suppress(RingtapError):
            item: dict[str, Any] = read_json(self._run / "nodes" / self.reference / CLOCK_JSON, CLOCK)
            return item
        return {}

    def _same_kernel(self, reference: dict[str, Any]) -> bool:
        """True if both nodes run on one kernel and so have one clock, as on the virtual testbed.

        Boot identities alone do not prove it (copies of a virtual machine share them), but two kernels cannot share
        files on a local file system.
        """
        mine = boot_id()
        try:
            return bool(mine) and reference.get("boot_id") == mine and file_system(self._run)[1]
        except OSError:
            return False

    def refine_breaks(self) -> None:
        """Narrow down the times at which the reference node's clock was set, from the steps that it recorded."""
        steps = [step for step in self._reference_item().get("steps", []) if isinstance(step, dict)]
        self.breaks = [self._refined(before, after, steps) for before, after in self.breaks]

    def _refined(self, before: int, after: int, steps: list[dict[str, Any]]) -> Break:
        later = next(m for m in self.measurements if m.mono_ns >= after)
        for step in steps:
            # the reference node's time after its step, on this node's monotonic clock
            seen = step["t_ns"] + later.offset_ns - later.t_ns + later.mono_ns
            if before <= seen <= after:
                return max(before, seen - (step["mono_ns"] - step["mono_before_ns"])), seen
        return before, after

    def close(self) -> None:
        """Close the log of pings."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _thinned(measurements: list[Measurement]) -> list[Measurement]:
    """Return the measurements, of too many only the tighter one of each pair in the older half, without the first."""
    if len(measurements) <= _MOST_MEASUREMENTS:
        return measurements
    older = measurements[1 : _MOST_MEASUREMENTS // 2 + 1]
    tighter = [min(pair, key=lambda one: one.error_ns) for pair in zip(older[::2], older[1::2], strict=True)]
    return [measurements[0], *tighter, *measurements[_MOST_MEASUREMENTS // 2 + 1 :]]


def _daemons_bound_ns(mine: dict[str, Any], theirs: dict[str, Any]) -> int:
    """Bound of the offset from the error bounds of both time daemons; 0 if a clock is not synchronised."""
    if not (mine.get("synchronised") and theirs.get("synchronised")):
        return 0
    age_ns = max(0, int(mine["t_ns"]) - int(theirs["t_ns"]))
    return int((mine["max_error_us"] + theirs["max_error_us"]) * 1000 + age_ns * _NTP_GROWTH) + 1
