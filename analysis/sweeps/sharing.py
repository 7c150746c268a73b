"""Analyzes jobs that share links: iteration times alone and together, their phases, and how the links were used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import special

from ringtap.analysis.job.iterations_of_ranks import logged_passes, merged_spans
from ringtap.analysis.notebook_formatting import Columns, described, with_section
from ringtap.analysis.runs.run import JobRun, SweepRun, window_on_reference, within_window
from ringtap.analysis.runs.samples_to_iterations import Integers
from ringtap.analysis.statistics.quantiles import LEVEL
from ringtap.analysis.statistics.short_correlated_series import mean_error
from ringtap.analysis.statistics.to_arrays import Array
from ringtap.analysis.sweeps.crux_objective import Computation, computation, flop_of, with_gain
from ringtap.analysis.sweeps.points import counted_bps
from ringtap.core.append_only_logs import read_json_lines
from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import ALONE, SHARED, SHARED_JSONL
from ringtap.core.sweep_plans.jobs_that_share import FREE

MEASURED, FLUID, MLTCP_EQUATION = "measured", "fluid model", "MLTCP's equation"
MIN_SLIDE = 9  # phases from which a slide has an end
# A phase is settled if most of the phases from it on are near the mean of the last third, and these have a mean.
NEAR, MOST, MIN_RESULTANT = 0.08, 0.95, 0.9


_JOB_COLUMNS = {
    "name": "name of the job.",
    "iterations": "whole iterations in the window of the point.",
    "mean_s": "mean time from the begin of an iteration to that of the next one.",
    "mean_low_s": "lower end of its 95 % interval; None if there are too few iterations.",
    "mean_high_s": "upper end, likewise.",
    "pause_s": "mean pause after an iteration, which is part of its time.",
    "slowdown": "mean time over that of the job alone; None if it was not measured alone.",
    "predicted_s": "iteration time predicted from the jobs alone; None if the job was not kept.",
    "shift_s": "shift of its grid; None likewise.",
    "period_s": "period of its grid; None likewise.",
    "phase": "mean begin of its iterations within those of the first job, as a share of these (circular mean); "
    "None for the first job.",
    "phase_kept": "resultant length of these phases: 1 if they are all the same, 0 if they are spread evenly.",
    "rate_bps": "mean rate at a shared link, from the bytes of an iteration alone; None if they are not known.",
    "overlap": "share of its communication in which another job communicates too; None if it is not known.",
    "begin_shift_s": "shift at which it was held until a rule began; None if it was not held.",
    "share": "its share of links by the rule of the point, as in shared.jsonl; None if there is no rule.",
    "path": "number of its path, of several shortest ones; None if there is one, or on real hosts.",
    "flop_per_s": "FLOPs of an iteration over its mean time; None if the plan does not give them.",
    "gpu_intensity_flop_per_s": "these FLOPs over the time in which the bytes of an iteration alone pass the "
    "busiest link (equation 2 of Crux); None if either is not known.",
}


@with_section("Attributes", _JOB_COLUMNS)
@dataclass(frozen=True)
class SharedJob:
    """A job at a point."""

    name: str
    iterations: int
    mean_s: float
    mean_low_s: float | None
    mean_high_s: float | None
    pause_s: float
    slowdown: float | None
    predicted_s: float | None
    shift_s: float | None
    period_s: float | None
    phase: float | None
    phase_kept: float | None
    rate_bps: float | None
    overlap: float | None
    begin_shift_s: float | None
    share: dict[str, Any] | None
    path: int | None
    flop_per_s: float | None
    gpu_intensity_flop_per_s: float | None


@dataclass(frozen=True)
class SharedLink:
    """A link at a point.

    Attributes:
        link: its source and the node to which it leads.
        jobs: names of the jobs whose paths have it.
        rate_bps: its mean rate, as frames on the wire; None if it is not known.
        utilisation: this rate over the link's own; None likewise.
    """

    link: str
    jobs: tuple[str, ...]
    rate_bps: float | None
    utilisation: float | None


@dataclass(frozen=True)
class Slide:
    """Phase of a job from the begin of a point's rule on, or from when all jobs ran, as measured or by a model.

    Attributes:
        job: name of the job.
        source: `MEASURED`, `FLUID` or `MLTCP_EQUATION`.
        phases: phase of each iteration, as in `SharingPoint.phases`.
        settled_after: iterations until the phase has its last value for good; None if it has none.
        last_phase: mean phase of the last third (circular mean).
    """

    job: str
    source: str
    phases: tuple[float, ...] = field(repr=False)
    settled_after: int | None
    last_phase: float


_POINT_COLUMNS = {
    "step": "position in the plan.",
    "offset": "``alone``, ``free``, ``cassini``, the rule of the jobs' shares, or the shifts of all jobs but the "
    "first.",
    "score": "compatibility score of the most contended link; None if the jobs were not kept.",
    "window_s": "length of the window.",
    "late_share": "share of the recorder's samples that were late.",
    "disturbances": "lost links and traffic of others in the window, one sentence each.",
    "utilisation": "rate of the busiest shared link and direction over the link's capacity; None if it is not known.",
    "busiest_bps": "this rate; None likewise.",
    "utilisation_why": "reason that it is not known; empty if it is.",
    "fairness": "Jain's index of the jobs' speeds, each relative to its speed alone; None for a job alone.",
    "jobs": "the jobs.",
    "links": "the links of a testbed that jobs share, or, if they share none, all of theirs.",
    "computation": "FLOPs per second of all jobs; None if the plan does not give the FLOPs of each.",
    "slides": "phases of all jobs but the first, measured and predicted, if the jobs were not kept.",
    "share_changes": "``ticks``, ``seconds`` and ``cpu_s`` of the thread that changed shares; None without it.",
    "predicted_why": "reason that a prediction is missing; empty if none is, or none is due.",
    "phases": "one row per iteration: ``job``, ``iteration`` from 0, ``begin_s`` since the window began, "
    "``iteration_s`` to the next begin, ``pause_s`` at its end, and ``phase``: the time since the last begin of "
    "an iteration of the first job, as a share of that iteration; missing for the first job and outside its "
    "iterations.",
}


@with_section("Attributes", _POINT_COLUMNS)
@dataclass(frozen=True)
class SharingPoint:
    """One point: a job alone, or all jobs together."""

    step: int
    offset: str
    score: float | None
    window_s: float
    late_share: float | None
    disturbances: tuple[str, ...]
    utilisation: float | None
    busiest_bps: float | None
    utilisation_why: str
    fairness: float | None
    jobs: tuple[SharedJob, ...]
    links: tuple[SharedLink, ...]
    computation: Computation | None
    slides: tuple[Slide, ...]
    share_changes: dict[str, float] | None
    predicted_why: str
    phases: pd.DataFrame = field(repr=False, compare=False)

    @property
    def label(self) -> str:
        """Name of the point for people."""
        return f"{self.jobs[0].name} alone" if self.offset == ALONE else self.offset

    @property
    def mean_s(self) -> float:
        """Mean of the jobs' mean iteration times."""
        return sum(job.mean_s for job in self.jobs) / len(self.jobs)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain values."""
        return asdict(self) | {"phases": None, "label": self.label}


class _Alone(NamedTuple):
    """A job alone: its mean iteration time, and the bits of an iteration at its busiest link and their time there."""

    mean_s: float
    bits: float | None
    passed_s: float | None


def is_sharing(run: SweepRun) -> bool:
    """Return True if a sweep is of jobs that share links."""
    return bool((run.info.get("plan") or {}).get("jobs"))


def sharing_points(run: SweepRun) -> list[SharingPoint]:
    """Return the points of a sweep of jobs that share links, in the order of the plan.

    Raises:
        UsageError: shared.jsonl or a log is damaged, or jobs of a point did not run at the same time.
    """
    lines = sorted(read_json_lines(run.path / SHARED_JSONL, SHARED)[0], key=lambda line: int(line["step"]))
    capacity_bps = float((run.info.get("plan") or {}).get("capacity_bps") or math.nan)
    alone: dict[str, _Alone] = {}
    found = []
    for line in lines:
        point = _point(run, line, capacity_bps, alone)
        found.append(point)
        if point.offset == ALONE:
            bits = None if point.busiest_bps is None else point.busiest_bps * point.mean_s
            passed_s = None if point.utilisation is None else point.utilisation * point.mean_s
            alone[point.jobs[0].name] = _Alone(point.mean_s, bits, passed_s)
    equal = [point.computation for point in found if point.offset == FREE and point.computation]
    return [
        replace(point, computation=with_gain(point.computation, equal))
        if equal and point.computation and point.offset not in (ALONE, FREE)
        else point
        for point in found
    ]


def sharing_tables(points: Sequence[SharingPoint]) -> dict[str, pd.DataFrame]:
    """Return points as the tables ``points``, ``jobs`` (rows per point and job) and ``iterations`` (per iteration)."""

    def table(kind: type, rows: list[dict[str, Any]], columns: Columns) -> pd.DataFrame:
        found = pd.DataFrame(rows)
        numbers = [item.name for item in fields(kind) if "float" in str(item.type) and item.name in found]
        return described(found.astype(dict.fromkeys(numbers, "Float64")), columns)

    if not points:
        return dict.fromkeys(("points", "jobs", "iterations"), pd.DataFrame())
    parts = ("jobs", "phases", "slides", "share_changes", "links", "computation")
    own = [item.name for item in fields(SharingPoint) if item.name not in parts]
    iterations = pd.concat(
        [point.phases.assign(step=point.step, offset=point.offset) for point in points], ignore_index=True
    )
    jobs: list[dict[str, Any]] = [
        {"step": point.step, "offset": point.offset} | asdict(job) for point in points for job in point.jobs
    ]
    for job in jobs:
        job |= {f"share_{name}": value for name, value in (job.pop("share") or {}).items()}
    rows = [
        {name: getattr(point, name) for name in own} | (asdict(point.computation) if point.computation else {})
        for point in points
    ]
    return {
        "points": table(SharingPoint, rows, _POINT_COLUMNS),
        "jobs": table(SharedJob, jobs, _JOB_COLUMNS),
        "iterations": described(iterations, {}),
    }


def _point(run: SweepRun, line: dict[str, Any], capacity_bps: float, alone: dict[str, _Alone]) -> SharingPoint:
    runs = [run.job(job["directory"]) for job in line["jobs"]]
    window_ns = window_on_reference((line["window_start_ns"], line["window_end_ns"]), *runs)
    tables = [_iterations(one, window_ns) for one in runs]
    for job, table in zip(line["jobs"], tables, strict=True):
        if len(table) < 2:
            raise UsageError(
                f"{run.path / SHARED_JSONL}: {job['name']} has {len(table)} iterations in the window of "
                f"{line['offset']}: the jobs did not run at the same time, measure anew"
            )
    spans = [_communication(one, window_ns) for one in runs]
    _add_phases(tables)
    flop = flop_of(run.info.get("plan") or {})
    jobs = tuple(
        _job(
            job, tables[number], alone.get(job["name"]) if line["offset"] != ALONE else None, _overlap(spans, number),
            flop.get(job["name"]),
        )
        for number, job in enumerate(line["jobs"])
    )  # fmt: skip
    stated = runs[0].info.get("bottleneck") or {}, (run.info.get("plan") or {}).get("topology") or {}
    found = [counted_bps(runs[0], port, stated, window_ns, {}) for port in line["ports"]]
    rates = [each if isinstance(each, str) else each[0] for each in found]
    links = tuple(_link(port, rate) for port, rate in zip(line["ports"], rates, strict=True) if "link" in port)
    known = [
        (rate / (port.get("rate_bps") or capacity_bps), rate)
        for port, rate in zip(line["ports"], rates, strict=True)
        if not isinstance(rate, str)
    ]
    why = "; ".join(rate for rate in rates if isinstance(rate, str)) or ("" if rates else "no link is shared")
    speeds = [1 / job.slowdown for job in jobs if job.slowdown]
    return SharingPoint(
        step=line["step"],
        offset=line["offset"],
        score=line.get("score"),
        window_s=(window_ns[1] - window_ns[0]) / 1e9,
        late_share=line.get("late_share"),
        disturbances=(*(line.get("cut") or ()), *(line.get("others") or ())),
        utilisation=max(known)[0] if known and not why else None,
        busiest_bps=max(known)[1] if known and not why else None,
        utilisation_why=why,
        fairness=jain(speeds) if len(speeds) == len(jobs) > 1 else None,
        jobs=jobs,
        links=links,
        computation=(
            computation(tables, [flop[job.name] for job in jobs], [job.predicted_s for job in jobs])
            if all(job.name in flop for job in jobs)
            else None
        ),
        slides=_slides(runs, line, window_ns[1]) if "rule_ns" in line else (),
        share_changes=line.get("share_changes"),
        predicted_why=line.get("predicted_why", ""),
        phases=_all_phases([job.name for job in jobs], tables, window_ns[0]),
    )


def _link(port: dict[str, Any], rate_bps: float | str) -> SharedLink:
    """Return a link by its counter and its mean rate, or the reason that it is not known."""
    jobs = tuple(map(str, port.get("jobs") or ()))
    if isinstance(rate_bps, str) or not (own_bps := port.get("rate_bps")):
        return SharedLink(port["link"], jobs, None, None)
    return SharedLink(port["link"], jobs, rate_bps, rate_bps / own_bps)


def jain(values: Sequence[float]) -> float:
    """Return Jain's fairness index: 1 if all values are equal, 1/n if one has all (Jain, Chiu and Hawe 1984)."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def _iterations(job: JobRun, window_ns: tuple[int, int]) -> pd.DataFrame:
    """Return ``begin_ns``, ``iteration_s`` to the next begin and ``pause_s`` at the end of iterations in a window.

    Times are those of the reference host's clock. An iteration begins when the slowest rank has ended the step before
    and its pause. Of several training phases, the longest one counts.
    """
    marks = job.marks
    ranks = marks["rank"].nunique()
    by = marks.assign(begin_ns=marks["end_ns"] + marks["pause_ns"]).groupby(["stretch", "index"])
    table = by.agg(ranks=("rank", "nunique"), begin_ns=("begin_ns", "max"), pause_ns=("pause_ns", "max")).reset_index()
    table = table[table["ranks"] == ranks]
    begin_ns = table["begin_ns"].to_numpy(np.int64)
    same = np.append(np.diff(table["stretch"]) == 0, False) & np.append(np.diff(table["index"]) == 1, False)
    seconds = np.append(np.diff(begin_ns), 0) / 1e9
    pause_s = np.append(table["pause_ns"].to_numpy(np.int64)[1:], 0) / 1e9
    table = table.assign(iteration_s=seconds, pause_s=pause_s)
    rows = np.flatnonzero(same[: len(begin_ns)])
    rows = rows[within_window(begin_ns[rows], begin_ns[rows + 1], window_ns)]
    found: pd.DataFrame = table.iloc[rows][["begin_ns", "iteration_s", "pause_s"]].reset_index(drop=True)
    return found


def _job(
    line: dict[str, Any], table: pd.DataFrame, alone: _Alone | None, overlap: float | None, flop: float | None
) -> SharedJob:
    times: Array = table["iteration_s"].to_numpy(np.float64)
    mean_s, reach = float(times.mean()), None
    if found := mean_error(times):
        reach = found[0] * float(special.stdtrit(found[1], (1 + LEVEL) / 2))
    period_s = line.get("period_s")
    bits = None if alone is None else alone.bits
    phases = table["phase"].dropna().to_numpy(np.float64)
    direction = complex(np.exp(2j * np.pi * phases).mean()) if len(phases) else complex(math.nan)
    angle = math.atan2(direction.imag, direction.real)
    return SharedJob(
        name=line["name"],
        iterations=len(times),
        mean_s=mean_s,
        mean_low_s=None if reach is None else mean_s * math.exp(-reach),
        mean_high_s=None if reach is None else mean_s * math.exp(reach),
        pause_s=float(table["pause_s"].mean()),
        slowdown=None if alone is None else mean_s / alone.mean_s,
        predicted_s=line.get("predicted_s"),
        shift_s=line.get("shift_s"),
        period_s=period_s,
        phase=None if math.isnan(angle) else angle / (2 * math.pi) % 1,
        phase_kept=None if math.isnan(angle) else abs(direction),
        rate_bps=None if bits is None else bits / mean_s,
        overlap=overlap,
        begin_shift_s=line.get("begin_shift_s"),
        share=line.get("share"),
        path=line.get("path"),
        flop_per_s=None if flop is None else flop / mean_s,
        gpu_intensity_flop_per_s=flop / alone.passed_s if flop and alone and alone.passed_s else None,
    )


def _communication(job: JobRun, window_ns: tuple[int, int]) -> tuple[Integers, Integers] | None:
    """Return begins and ends of rank 0's communication in a window, by DDP's log; None without one."""
    for passes in logged_passes(job, job.marks[job.marks["rank"] == 0]).values():
        begin, end = (passes.loc[passes["synced"], f"comm_{side}_ns"].to_numpy(np.int64) for side in ("start", "end"))
        inside = (begin >= window_ns[0]) & (end <= window_ns[1])
        if inside.any():
            return merged_spans(begin[inside], end[inside])
    return None


def _overlap(spans: Sequence[tuple[Integers, Integers] | None], number: int) -> float | None:
    """Return the share of a job's communication in which another job communicates too."""
    own, others = spans[number], [span for other, span in enumerate(spans) if other != number]
    if own is None or not others or None in others:
        return None
    begin, end = merged_spans(*(np.concatenate([span[side] for span in others if span]) for side in (0, 1)))
    edges = np.column_stack((begin, end)).ravel() - own[0][0]  # floats hold differences exactly
    total = np.concatenate(([0.0], np.cumsum(end - begin)))
    until = np.column_stack((total[:-1], total[1:])).ravel()
    shared_ns = np.diff([np.interp(side - own[0][0], edges, until) for side in own], axis=0)
    return float(shared_ns.sum() / (own[1] - own[0]).sum())


def _add_phases(tables: Sequence[pd.DataFrame]) -> None:
    """Add ``phase`` of `SharingPoint.phases` to the iterations of each job."""
    first_ns = tables[0]["begin_ns"].to_numpy(np.int64)
    tables[0]["phase"] = math.nan
    for table in tables[1:]:
        begin_ns = table["begin_ns"].to_numpy(np.int64)
        place = np.searchsorted(first_ns, begin_ns, side="right") - 1
        known = (place >= 0) & (place < len(first_ns) - 1)
        place = np.clip(place, 0, len(first_ns) - 2)
        phase = (begin_ns - first_ns[place]) / (first_ns[place + 1] - first_ns[place])
        table["phase"] = np.where(known, phase, math.nan)


def _slides(runs: Sequence[JobRun], line: dict[str, Any], end_ns: int) -> tuple[Slide, ...]:
    """Return the phases of all jobs but the first from the begin of a point's rule on, measured and predicted."""
    names = [job["name"] for job in line["jobs"]]
    whole = [_iterations(one, (0, end_ns)) for one in runs]
    # from the iteration on in which the rule began, and of the first job one before it
    first = [
        int((table["begin_ns"] <= line["rule_ns"]).sum()) - (1 if number else 2) for number, table in enumerate(whole)
    ]
    sources = {MEASURED: [table[max(at, 0) :].reset_index(drop=True) for at, table in zip(first, whole, strict=True)]}
    predicted = [job.get("predicted_begin_ns", ()) for job in line["jobs"]]
    if all(len(begins) > 1 for begins in predicted):
        sources[FLUID] = [pd.DataFrame({"begin_ns": np.array(begins, np.int64)}) for begins in predicted]
    found = []
    for source, tables in sources.items():
        _add_phases(tables)
        for name, table in list(zip(names, tables, strict=True))[1:]:
            found.append(slide_of(name, source, table["phase"].dropna().to_numpy(np.float64)))
    for name, job in zip(names, line["jobs"], strict=True):
        if phases := job.get("mltcp_phases"):
            found.append(slide_of(name, MLTCP_EQUATION, np.array(phases, np.float64)))
    return tuple(slide for slide in found if slide is not None)


def slide_of(job: str, source: str, phases: Array) -> Slide | None:
    """Return the slide of a job's phases by a source; None if they are too few."""
    if len(phases) < MIN_SLIDE:
        return None
    last = complex(np.exp(2j * np.pi * phases[-(len(phases) // 3) :]).mean())
    last_phase = math.atan2(last.imag, last.real) / (2 * math.pi) % 1
    is_near = np.abs((phases - last_phase + 0.5) % 1 - 0.5) <= NEAR
    from_here = is_near[::-1].cumsum()[::-1] / np.arange(len(phases), 0, -1)
    settled = np.flatnonzero(is_near & (from_here >= MOST))
    settled_after = int(settled[0]) if abs(last) >= MIN_RESULTANT and len(settled) else None
    return Slide(job, source, tuple(phases.tolist()), settled_after, last_phase)


def _all_phases(names: Sequence[str], tables: Sequence[pd.DataFrame], start_ns: int) -> pd.DataFrame:
    """Return the table `SharingPoint.phases`."""
    parts = []
    for name, table in zip(names, tables, strict=True):
        begin_s = (table["begin_ns"] - start_ns) / 1e9
        parts.append(table.assign(job=name, iteration=np.arange(len(table)), begin_s=begin_s))
    return pd.concat(parts, ignore_index=True)[["job", "iteration", "begin_s", "iteration_s", "pause_s", "phase"]]
