"""Writes the report of jobs that share links: times alone and together, phases and predictions, in one page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

import ringtap
from ringtap.analysis.plots.sharing import FIGURES
from ringtap.analysis.plots.style import plain
from ringtap.analysis.report.page import Written, write_folder
from ringtap.analysis.runs.run import SweepRun
from ringtap.analysis.sweeps.crux_objective import Computation
from ringtap.analysis.sweeps.sharing import SharedJob, SharedLink, SharingPoint, Slide, sharing_points
from ringtap.core.errors import UsageError
from ringtap.core.json_validation import whole
from ringtap.core.run_directory_schema import ALONE, MAX_LATE_SHARE
from ringtap.core.terminal_escaping import one_line, text_table
from ringtap.core.units import format_rate, listed

_TABLE = "points.csv"
# use of a link from which on it is full, and share of the time from which on pauses are long
_FULL, _LONG_PAUSE = 0.9, 0.1


def write_sharing_report(run: SweepRun, folder: Path | None = None) -> Written:
    """Write the report of jobs that share links into a folder; an older report there is replaced file by file.

    Args:
        run: the sweep.
        folder: target folder, created if missing; None: ``report/`` in the run directory.

    Raises:
        UsageError: no point was measured, a log is damaged, or the folder cannot be written to.
    """
    folder = folder or run.path / "report"
    points = sharing_points(run)
    if not points:
        raise UsageError(f"{run.path} has no point yet: measure it with ringtap sweep --resume")
    data = collect(run, points)
    rows = [
        {
            "point": point.label,
            "utilisation": point.utilisation,
            "fairness": point.fairness,
            **vars(job),
            "share": _share_text(job),
        }
        for point in points
        for job in point.jobs
    ]
    figures = {name: partial(maker, points) for name, maker in FIGURES.items()}
    paths = write_folder(folder, "sharing.html.j2", data, figures, pd.DataFrame(rows), _TABLE)
    lines = [*data["headline"], *text_table([data["heads"], *data["rows"]], left=2)]
    for name, left in _LEFT.items():
        if found := data[name]:
            lines += text_table([data["heads_of"][name], *found], left=left)
    lines += [*data["notes"], *data["warnings"]]
    return Written("\n".join(lines), paths, folder / "report.json")


def collect(run: SweepRun, points: Sequence[SharingPoint]) -> dict[str, Any]:
    """Collect the numbers of the report as plain values; a missing one is None."""
    info = run.info
    return {
        "schema": 1,
        "ringtap": ringtap.__version__,
        "run": {
            "name": whole(run.path.resolve().name),
            "status": info.get("status", "running"),
            "why": one_line(str(info.get("why") or "")),
        },
        "capacity": format_rate((info.get("plan") or {}).get("capacity_bps") or 0),
        "headline": [plain(line) for line in headline(points)],
        "answer": plain(headline(points)[0]),
        "heads": _HEADS,
        "rows": [[plain(cell) for cell in _row(point, job)] for point in points for job in point.jobs],
        "heads_of": {"slides": _SLIDE_HEADS, "computations": _COMPUTATION_HEADS, "links": _LINK_HEADS},
        "slides": [[plain(cell) for cell in _slide_row(point, slide)] for point in points for slide in point.slides],
        "computations": [
            [plain(cell) for cell in _computation_row(point, point.computation)]
            for point in points
            if point.computation
        ],
        "links": [
            [plain(cell) for cell in _link_row(point, link)]
            for point in points
            for link in point.links
            if point.offset != ALONE and " to " in link.link  # a star's are those of hosts
        ],
        "notes": [plain(line) for line in notes(points)],
        "warnings": [plain(line) for line in warnings(points)],
        "points": [point.to_json() for point in points],
    }


def headline(points: Sequence[SharingPoint]) -> list[str]:
    """Return the results as sentences: the best point, each point against alone, and the predictions."""
    together = [point for point in points if point.offset != ALONE]
    if not together:
        return ["The jobs were not measured together yet."]
    judged = [point for point in together if all(job.slowdown for job in point.jobs)]
    if not judged:
        return ["The jobs were measured together, but not each alone, so that slowdowns are not known."]
    best, worst = (pick(judged, key=_slowdown) for pick in (min, max))
    names = listed(job.name for job in best.jobs)
    lines = [f"{names} share a link best at {best.label}: {_slowdown(best):.2f} times their iteration times alone."]
    if worst is not best:
        gain = 1 - best.mean_s / worst.mean_s
        lines[0] = f"{lines[0][:-1]}, {_slowdown(worst):.2f} times at {worst.label}; {gain:.0%} less time."
        if None not in (best.jobs[0].predicted_s, worst.jobs[0].predicted_s):
            predicted = 1 - _predicted(best) / _predicted(worst)
            lines.append(f"The prediction was {predicted:.0%} less time.")
    for point in together:
        if all(job.predicted_s for job in point.jobs):
            error = point.mean_s / _predicted(point) - 1
            score = "" if point.score is None else f", score {point.score:.3f}"
            lines.append(
                f"{point.label}{score}: {_predicted(point):.3f} s per iteration predicted, "
                f"{point.mean_s:.3f} s measured ({error:+.1%})."
            )
    for point in together:
        if (found := point.computation) and found.gain is not None:
            lines.append(
                f"{point.label}: all jobs compute {found.flop_per_s:.4g} FLOP/s, {_gain(found)} against equal shares"
                + ("." if found.predicted_gain is None else f"; the prediction was {found.predicted_gain:+.1%}.")
            )
    return lines


def _slowdown(point: SharingPoint) -> float:
    return sum(job.slowdown or 0.0 for job in point.jobs) / len(point.jobs)


def _predicted(point: SharingPoint) -> float:
    return sum(job.predicted_s or 0.0 for job in point.jobs) / len(point.jobs)


def _paused(point: SharingPoint) -> float:
    return sum(job.pause_s / job.mean_s for job in point.jobs) / len(point.jobs)


_HEADS = ["point", "job", "n", "iteration, s", "pause, s", "slowdown", "predicted, s", "phase", "kept", "overlap"]
_HEADS += ["rate", "fairness", "link used"]


def _row(point: SharingPoint, job: SharedJob) -> list[str]:
    """Return the row of a job at a point; a dash stands for a number that is not known."""
    half = "" if job.mean_high_s is None else f" ± {job.mean_high_s - job.mean_s:.3f}"
    cells = [point.label, job.name, str(job.iterations), f"{job.mean_s:.3f}{half}", f"{job.pause_s:.3f}"]
    cells += [_shown(job.slowdown, ".2f"), _shown(job.predicted_s, ".3f"), _shown(job.phase, ".2f")]
    cells += [_shown(job.phase_kept, ".2f"), _shown(job.overlap, ".0%"), _rate(job.rate_bps)]
    return [*cells, _shown(point.fairness, ".3f"), _shown(point.utilisation, ".0%")]


_SLIDE_HEADS = ["point", "shares", "job", "by", "first phase", "last phase", "settled after"]


def _slide_row(point: SharingPoint, slide: Slide) -> list[str]:
    """Return the row of a slide; a dash stands for a phase that does not settle."""
    phases = [f"{phase:.2f}" for phase in (slide.phases[0], slide.last_phase)]
    return [point.label, _shares(point), slide.job, slide.source, *phases, _shown(slide.settled_after, "d")]


_COMPUTATION_HEADS = ["point", "shares", "paths", "FLOP/s", "predicted", "against free", "predicted against free"]


def _computation_row(point: SharingPoint, found: Computation) -> list[str]:
    """Return the row of the computation of all jobs at a point."""
    paths = ", ".join(f"{job.name} {job.path}" for job in point.jobs if job.path is not None)
    half = "" if found.high_flop_per_s is None else f" ± {found.high_flop_per_s - found.flop_per_s:.1e}"
    cells = [point.label, _shares(point), paths or "–", f"{found.flop_per_s:.4g}{half}"]
    return [*cells, _shown(found.predicted_flop_per_s, ".4g"), _gain(found), _shown(found.predicted_gain, "+.1%")]


def _gain(found: Computation) -> str:
    """Return the gain over equal shares with its interval."""
    bounded = found.gain_low is not None and found.gain_high is not None
    return _shown(found.gain, "+.1%") + (f" [{found.gain_low:+.1%}, {found.gain_high:+.1%}]" if bounded else "")


_LINK_HEADS = ["point", "link", "jobs", "rate", "used"]


def _link_row(point: SharingPoint, link: SharedLink) -> list[str]:
    """Return the row of a link at a point."""
    return [point.label, link.link, ", ".join(link.jobs), _rate(link.rate_bps), _shown(link.utilisation, ".0%")]


_LEFT = {"computations": 3, "links": 3, "slides": 4}  # columns of text in further tables


def _share_text(job: SharedJob) -> str:
    """Return the share of a job in words; empty if it is the plain one."""
    share = job.share or {}
    parts = [f"{share['intercept']:g} + {share['slope']:g} r"] if share.get("slope") else []
    parts += [f"weight {share['intercept']:g}"] if share and share["intercept"] != 1 and not parts else []
    parts += [f"priority {share['priority']}"] if share.get("priority") else []
    parts += [share["congestion_control"]] if share.get("congestion_control") else []
    return f"{job.name} {', '.join(parts)}" if parts else ""


def _shares(point: SharingPoint) -> str:
    return ", ".join(filter(None, map(_share_text, point.jobs))) or "equal"


def notes(points: Sequence[SharingPoint]) -> list[str]:
    """Return the facts of the threads that changed shares, one sentence each."""
    return [
        f"{point.label}: shares were changed every {1e3 * changes['seconds'] / changes['ticks']:.1f} ms, which took "
        f"{changes['cpu_s'] / changes['seconds']:.1%} of a CPU."
        for point in points
        if (changes := point.share_changes) and changes["ticks"] and changes["seconds"]
    ]


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _rate(bps: float | None) -> str:
    return "–" if bps is None else format_rate(bps)


def warnings(points: Sequence[SharingPoint]) -> list[str]:
    """Return what makes numbers less certain or absent, one sentence each."""
    found = [
        f"{point.label}: {point.late_share:.1%} of the recorder's samples came late: the machine was busy, measure anew"
        for point in points
        if point.late_share is not None and point.late_share > MAX_LATE_SHARE
    ]
    found += [f"{point.label}: {text}: measure anew" for point in points for text in point.disturbances]
    found += [
        f"{point.label}: the jobs pause for {_paused(point):.0%} of the time, and the link is not full: their grid is "
        "longer than they need"
        for point in points
        if point.utilisation is not None and point.utilisation < _FULL and _paused(point) > _LONG_PAUSE
    ]
    found += [f"{point.label}: use of the link: {point.utilisation_why}" for point in points if point.utilisation_why]
    found += [f"{point.label}: prediction: {point.predicted_why}" for point in points if point.predicted_why]
    silent = dict.fromkeys(
        job.name for point in points if point.offset != ALONE for job in point.jobs if job.overlap is None
    )
    return [*found, *(f"{name}: overlap: DDP's times of its communication were not recorded" for name in silent)]
