"""Converts a node's times to the run's reference clock, by clock/clock.json (docs/reference/clocks.md).

CLOCK_REALTIME may be set during a run. All times are therefore converted first to those that the clock would have shown
without being set: CLOCK_MONOTONIC plus its difference from CLOCK_REALTIME when the recording began, or, of an event
without a time by CLOCK_MONOTONIC, its time less the steps that the agent noticed. Such times never jump, and one linear
offset per segment converts the times of one node to those of another.

Columns of times need NumPy. A single moment does not: the plain live view runs on nodes that only record.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ringtap.core.json_validation import ShapeError, load_json
from ringtap.core.run_directory_schema import CLOCK, CLOCK_JSON

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Integers = npt.NDArray[np.int64]


class RecordedClockStep(NamedTuple):
    """Step of CLOCK_REALTIME by ``step_ns`` (forward if positive) between two times of CLOCK_MONOTONIC.

    The clock showed ``t_ns`` at ``mono_ns``, the later of the two.
    """

    mono_before_ns: int
    mono_ns: int
    t_ns: int
    step_ns: int


class ClockLine(NamedTuple):
    """Offset from the reference clock, from ``from_ns`` on: ``offset_ns`` + ``drift_ppm`` * 1e-6 * (t - ``t0_ns``)."""

    from_ns: int
    t0_ns: int
    offset_ns: float
    drift_ppm: float


@dataclass(frozen=True)
class NodeClock:
    """A node's CLOCK_REALTIME against the reference node's, both as if they had not been set during the run.

    Attributes:
        lines: the offset in each segment, in order of time.
        error_ns: bound of the offset's error; None: the offset was not measured.
        reference: name of the reference node; empty if it was not measured.
        steps: steps of this clock, in order of time.
        gap_ns: CLOCK_REALTIME minus CLOCK_MONOTONIC when the recording began; None: no record has both.
    """

    lines: tuple[ClockLine, ...] = (ClockLine(0, 0, 0.0, 0.0),)
    error_ns: float | None = None
    reference: str = ""
    steps: tuple[RecordedClockStep, ...] = ()
    gap_ns: int | None = None

    def since(self, begin: tuple[int, int] | None) -> NodeClock:
        """Return the clock of a recording that began at times (`ringtap.core.run_directory.recording_begin`)."""
        return self if begin is None else replace(self, gap_ns=self.less_steps(*begin) - begin[1])

    def unstepped(self, t_ns: Integers, mono_ns: Integers | None = None) -> Integers:
        """Convert times that this clock showed to times without its steps; 0 (not known) stays 0.

        Args:
            t_ns: CLOCK_REALTIME.
            mono_ns: CLOCK_MONOTONIC at the same moments. Without it ``t_ns`` must be in the order in which it was read,
                and times within the second in which the clock was set may be off by the step.
        """
        import numpy as np

        result = np.array(t_ns, np.int64)
        if mono_ns is not None and self.gap_ns is not None:
            result[:] = mono_ns + np.int64(self.gap_ns)
        else:
            after = np.ones(len(result), bool)
            for step in self.steps:
                after &= _after_by_order(np.asarray(t_ns, np.int64), after, step)
                result[after] -= step.step_ns
        return np.where(np.asarray(t_ns) == 0, 0, result)

    def on_reference(self, t_ns: Integers, mono_ns: Integers | None = None) -> Integers:
        """Convert times that this clock showed to the reference clock; arguments as for `unstepped`."""
        return self.to_reference(self.unstepped(t_ns, mono_ns))

    def moment_unstepped(self, t_ns: int, mono_ns: int | None = None) -> int:
        """Convert one time as `unstepped` converts columns."""
        if mono_ns is not None and self.gap_ns is not None:
            return mono_ns + self.gap_ns if t_ns else 0
        return self.less_steps(t_ns) if t_ns else 0

    def less_steps(self, t_ns: int, mono_ns: int | None = None) -> int:
        """Return a time less the steps before it, of which CLOCK_MONOTONIC tells most precisely."""
        result_ns, is_after = t_ns, True
        for step in self.steps:
            if mono_ns is None:
                is_after = is_after and (
                    t_ns >= step.t_ns - (step.step_ns + step.mono_ns - step.mono_before_ns) // 2
                    if step.step_ns > 0
                    else t_ns > step.t_ns - step.step_ns
                )
            else:
                gap_ns = t_ns - mono_ns
                is_stepped = abs(gap_ns - (step.t_ns - step.mono_ns)) < abs(step.step_ns) / 2
                is_after = mono_ns >= step.mono_ns or (mono_ns > step.mono_before_ns and is_stepped)
            result_ns -= step.step_ns * is_after
        return result_ns

    def moment_on_reference(self, t_ns: int, mono_ns: int) -> int:
        """Convert one time as `on_reference` converts columns."""
        own_ns = self.moment_unstepped(t_ns, mono_ns)
        line = self.lines[max(bisect_right(self.lines, own_ns, key=lambda line: line.from_ns) - 1, 0)]
        return own_ns - round(line.offset_ns + (own_ns - line.t0_ns) * (line.drift_ppm * 1e-6)) if own_ns else 0

    def _offset_ns(self, t_ns: Integers) -> Integers:
        import numpy as np

        columns = [np.array(column) for column in zip(*self.lines, strict=True)]
        line = np.maximum(np.searchsorted(columns[0], t_ns, side="right") - 1, 0)
        t0_ns, offset_ns, drift_ppm = (column[line] for column in columns[1:])
        found: Integers = np.rint(offset_ns + (t_ns - t0_ns) * (drift_ppm * 1e-6)).astype(np.int64)
        return found

    def to_reference(self, t_ns: Integers) -> Integers:
        """Convert unstepped times of this clock to the reference clock; 0 (not known) stays 0."""
        import numpy as np

        return np.where(t_ns == 0, 0, t_ns - self._offset_ns(t_ns))

    def from_reference(self, t_ns: Integers) -> Integers:
        """Convert times of the reference clock to unstepped times of this clock."""
        estimate = t_ns + self._offset_ns(t_ns)
        return t_ns + self._offset_ns(estimate)


def _after_by_order(
    t_ns: Integers, after_last: npt.NDArray[np.bool_], step: RecordedClockStep
) -> npt.NDArray[np.bool_]:
    """Mark the times, in the order in which a clock showed them, that are later than a step.

    A step forward leaves a gap; times after its middle are later. After a step back, the clock shows some times twice.
    Times are later if they follow the first jump back by more than half the step, or exceed all times before the step.
    """
    import numpy as np

    window_ns = step.mono_ns - step.mono_before_ns
    if step.step_ns > 0:
        return t_ns >= step.t_ns - (step.step_ns + window_ns) // 2
    latest = np.maximum.accumulate(np.where(after_last, t_ns, np.iinfo(np.int64).min)) if len(t_ns) else t_ns
    back = after_last & (t_ns != 0) & (t_ns < latest + step.step_ns // 2)
    return np.logical_or.accumulate(back) | (t_ns > step.t_ns - step.step_ns)


def read_clock(path: Path) -> NodeClock:
    """Read a node's clock/clock.json.

    Raises:
        OSError: the file is missing or cannot be read.
        ShapeError: the file is damaged.
    """
    item = load_json(path, CLOCK)
    reference = item.get("reference") or ""
    steps = steps_of(item.get("steps"))
    clock = NodeClock(reference=reference, steps=steps)
    if path.parents[1].name == reference:
        return NodeClock(error_ns=0.0, reference=reference, steps=steps)
    fit = item.get("fit")
    parts = [part for part in item.get("segments") or [fit] if part and part["offset_ns"] is not None]
    if fit and parts:
        errors = [float(part["error_ns"]) for part in parts if part.get("error_ns") is not None]
    else:
        parts = [part for part in item.get("measurements") or [] if part.get("error_ns") is not None]
        parts = [part for part in parts if part["offset_ns"] is not None]
        parts = sorted(parts, key=lambda part: float(part["error_ns"]))[:1]
        errors = [float(part["error_ns"]) for part in parts]
    if not parts:
        return clock
    lines = _lines(clock, sorted(parts, key=_middle), _reference_steps(path, reference))
    return NodeClock(tuple(lines), max(errors) if errors else None, reference, steps)


def steps_of(items: Any) -> tuple[RecordedClockStep, ...]:
    """Return the complete entries of the list of steps in clock.json (``steps``) or node.json (``clock_steps``)."""
    found = [item for item in items or [] if all(name in item for name in RecordedClockStep._fields)]
    return tuple(sorted(RecordedClockStep(*(item[name] for name in RecordedClockStep._fields)) for item in found))


def _reference_steps(path: Path, reference: str) -> tuple[RecordedClockStep, ...]:
    """Return the steps of the reference clock; none if its clock.json is missing or damaged."""
    try:
        item = load_json(path.parents[2] / reference / CLOCK_JSON, CLOCK)
        return steps_of(item.get("steps"))
    except (OSError, ShapeError):
        return ()


def _middle(part: dict[str, Any]) -> int:
    """Return CLOCK_MONOTONIC in the middle of a segment or of a measurement; 0 if not recorded."""
    first = int(part.get("from_mono_ns") or part.get("mono_ns") or 0)
    return (first + int(part.get("to_mono_ns") or first)) // 2


def _lines(
    clock: NodeClock, parts: list[dict[str, Any]], reference_steps: tuple[RecordedClockStep, ...]
) -> list[ClockLine]:
    """Convert segments to offset lines between clocks without steps.

    The offset between two such clocks has no jumps: after a step of the reference, the next segment's offset continues
    from the end of the last one's.
    """
    reference = NodeClock(steps=reference_steps)
    sums_ns = list(accumulate((step.step_ns for step in reference_steps), initial=0))
    lines: list[ClockLine] = []
    for part in parts:
        offset_ns, drift_ppm = float(part["offset_ns"]), float(part.get("drift_ppm") or 0.0)
        t0_ns, from_ns = (part.get(name) or 0 for name in ("t0_ns", "from_ns"))
        t0_ns = t0_ns or part.get("t_ns") or 0
        own_ns = 0  # steps of this clock before the segment
        if middle := _middle(part):
            t_ns = from_ns + middle - (part.get("from_mono_ns") or middle)
            own_ns = t_ns - clock.less_steps(t_ns, middle)
        line = ClockLine(from_ns - own_ns, t0_ns - own_ns, offset_ns - own_ns, drift_ppm)
        if lines:
            last = lines[-1]
            last_ns = last.offset_ns + last.drift_ppm * 1e-6 * (line.from_ns - last.t0_ns)
            this_ns = line.offset_ns + drift_ppm * 1e-6 * (line.from_ns - line.t0_ns)
            reference_ns = float(min(sums_ns, key=lambda sum_ns: abs(this_ns + sum_ns - last_ns)))
        else:
            shown_ns = from_ns - round(offset_ns + drift_ppm * 1e-6 * (from_ns - t0_ns))
            reference_ns = float(shown_ns - reference.moment_unstepped(shown_ns)) if from_ns else 0.0
        lines.append(line._replace(offset_ns=line.offset_ns + reference_ns))
    return lines
