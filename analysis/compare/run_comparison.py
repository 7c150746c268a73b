"""Compares runs: finds the fastest, and the other measures that differ beyond chance.

docs/commands/compare.md has the rules. Iteration times are one family of tests, the other measures of whole runs are
another one, and those of single hosts and ports a third one.
"""

from __future__ import annotations

import html
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

import ringtap
from ringtap.analysis.compare.run_measures import (
    BYTES,
    LOADED,
    MEDIAN,
    RATE,
    SECONDS,
    SHARE,
    Measure,
    RunMeasures,
    measure_job,
    measure_series,
)
from ringtap.analysis.job.run import Job
from ringtap.analysis.notebook_formatting import described_table
from ringtap.analysis.report.findings import overview
from ringtap.analysis.statistics.short_correlated_series import MIN_STRETCHED
from ringtap.analysis.statistics.two_sample import (
    ALPHA,
    MIN_VALUES,
    Comparison,
    Estimate,
    compare,
    difference,
    few_reason,
    holm,
    location_p,
)
from ringtap.analysis.sweeps.compare_at_equal_loads import AtLoad, at_load, common_share, compare_moved, mean_ratio
from ringtap.analysis.sweeps.compare_with_message_graphs import ExpectedOrder, expected_orders
from ringtap.analysis.sweeps.sweep import Sweep, open_run
from ringtap.core.errors import UsageError
from ringtap.core.terminal_escaping import one_line
from ringtap.core.units import counted, format_duration, format_rate, format_size, listed

SCHEMA = 2
NOTABLE = 0.02  # a smaller difference does not matter, even beyond chance: two runs of one job differ by up to 1 %
_MAX_NAMES = 4
_NUMBER = {SECONDS: format_duration, BYTES: format_size, RATE: format_rate, SHARE: "{:.1%}".format}
_COLUMNS = frozenset(("measure", "title", "unit", "ratio", "p", "beyond_chance"))  # of the table, beside the runs
Pair = tuple[int, int]


@dataclass(frozen=True)
class Row:
    """One measure of all runs.

    Attributes:
        name: name of the measure.
        title: its name in texts.
        unit: as in `Measure`.
        values: the value of each run; None: not known.
        reasons: the reason for each value that is not known; else empty.
        ratio: largest over smallest value; None if fewer than two are known or the smallest is not above 0.
        p: smallest p value of a pair of runs, corrected for all tests of the family; None: not tested.
        is_beyond_chance: True if a pair of runs differs beyond chance; None: not tested.
        is_part: as in `Measure`.
    """

    name: str
    title: str
    unit: str
    values: tuple[float | None, ...]
    reasons: tuple[str, ...]
    ratio: float | None
    p: float | None
    is_beyond_chance: bool | None
    is_part: bool

    @property
    def texts(self) -> list[str]:
        """The values with their units, as text."""
        return ["–" if value is None else format_value(value, self.unit) for value in self.values]

    @property
    def is_notable(self) -> bool:
        """False if the values differ by so little that it does not matter."""
        return self.ratio is None or self.ratio >= 1 + NOTABLE

    @property
    def order(self) -> tuple[bool, int, float]:
        """Sort key: differences beyond chance first, then those not tested, the largest ones first; parts are last."""
        known = [value for value in self.values if value is not None]
        group = 3 if len(known) < 2 else {True: 0, None: 1, False: 2}[self.is_beyond_chance]
        differs = len(set(known)) > 1
        if group == 0 and not self.is_notable:
            group = 2
        return self.is_part, group, -float(f"{self.ratio or (math.inf if differs else 1.0):.2g}")


def format_value(value: float, unit: str) -> str:
    """Write a value of a measure with its unit."""
    write = _NUMBER.get(unit, "{:.3g}".format)
    return f"-{write(-value)}" if value < 0 and unit != SHARE else write(value)


@dataclass(frozen=True, eq=False, repr=False)
class RunComparison:
    """Runs compared.

    Attributes:
        runs: the runs with their measures, in the order given.
        answer: the result in sentences: the run with the shortest iteration first.
        rows: one row per measure that is known for a run; the largest differences beyond chance first.
        unknown: measures that are known for no run, with the reason.
        orders: series of sweeps beside their message graphs, if these are known.
        pairs: comparison of the iteration times of each pair of runs, by their numbers; without runs of too few
            iterations.
    """

    runs: tuple[RunMeasures, ...]
    answer: tuple[str, ...]
    rows: tuple[Row, ...]
    unknown: tuple[tuple[str, str], ...]
    pairs: dict[Pair, Comparison]
    orders: tuple[ExpectedOrder, ...] = ()

    def __repr__(self) -> str:
        return f"<RunComparison: {' '.join(self.answer)}>"

    def _repr_html_(self) -> str:
        text = "".join(f"<p>{html.escape(line)}</p>" for line in self.answer)
        return text + self.table.to_html(na_rep="–", float_format="{:.4g}".format, border=0)

    @property
    def labels(self) -> list[str]:
        """Names of the runs."""
        return [run.label for run in self.runs]

    @property
    @described_table(
        {
            "measure": "name of the measure",
            "title": "its name in texts",
            "unit": "s, bytes, bit/s, share (of 1), or empty for other numbers",
            "ratio": "largest over smallest value",
            "p": "smallest p value of a pair of runs, corrected for the number of tests; NA if it was not tested",
            "beyond_chance": "True if a pair of runs differs beyond chance; NA if it was not tested",
        }
    )
    def table(self) -> pd.DataFrame:
        """Measures, one row each, the largest differences beyond chance first.

        Besides these columns, there is one with the values of each run, under the run's name.
        """
        columns: dict[str, Any] = {
            "measure": [row.name for row in self.rows],
            "title": [row.title for row in self.rows],
            "unit": [row.unit for row in self.rows],
        }
        for number, label in enumerate(self.labels):
            columns[label] = pd.array([row.values[number] for row in self.rows], "Float64")
        columns["ratio"] = pd.array([row.ratio for row in self.rows], "Float64")
        columns["p"] = pd.array([row.p for row in self.rows], "Float64")
        columns["beyond_chance"] = pd.array([row.is_beyond_chance for row in self.rows], "boolean")
        return pd.DataFrame(columns)

    @property
    def reasons(self) -> list[str]:
        """Sentences about values that are not known, and limits of the others."""
        missing: dict[tuple[str, str], list[str]] = {}  # (reason, title) -> runs
        for row in self.rows:
            for label, reason in zip(self.labels, row.reasons, strict=True):
                if reason:
                    missing.setdefault((reason, row.title), []).append(label)
        titles: dict[tuple[str, str], list[str]] = {}
        for (reason, title), labels in missing.items():
            verb = "has" if len(labels) == 1 else "have"
            titles.setdefault((f"{_listed(labels)} {verb} no".replace(";", ","), reason), []).append(title)
        for title, reason in self.unknown:
            titles.setdefault(("No run has", reason), []).append(title)
        lines = [f"{subject} {_listed(names)}: {reason}." for (subject, reason), names in titles.items()]
        return [*lines, *(f"{note}." for run in self.runs for note in run.notes)]

    def to_json(self) -> dict[str, Any]:
        """Return all numbers as plain values, as ``ringtap compare --json`` prints them; None: not known."""
        runs = [
            {"run": run.label, "directory": str(run.path), **run.facts}
            | {"matrix": _matrix_json(run), "matrix_text": run.matrix_text, "notes": list(run.notes)}
            for run in self.runs
        ]
        rows = [
            {
                **{"measure": row.name, "title": row.title, "unit": row.unit, "ratio": row.ratio},
                **{"p": row.p, "beyond_chance": row.is_beyond_chance},
                "values": dict(zip(self.labels, row.values, strict=True)),
                "reasons": {label: why for label, why in zip(self.labels, row.reasons, strict=True) if why},
            }
            for row in self.rows
        ]
        return {
            **{"schema": SCHEMA, "ringtap": ringtap.__version__, "answer": list(self.answer), "runs": runs},
            **{"measures": rows, "unknown": [{"title": title, "why": why} for title, why in self.unknown]},
            "iteration_times": [one.to_json() for one in self.pairs.values()],
            "orders": [order.to_json() for order in self.orders],
        }

    def write_page(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write one self-contained HTML page; return its path.

        Args:
            path: the page.
            force: replace an existing file.

        Raises:
            UsageError: the file exists, or cannot be written.
        """
        from ringtap.analysis.compare.comparison_page import write_page

        return write_page(self, path, force)


def _matrix_json(run: RunMeasures) -> dict[str, Any] | None:
    if not run.matrix.size:
        return None
    return {"names": [str(name) for name in run.matrix.index], "bytes": run.matrix.to_numpy(float).tolist()}


def _listed(titles: Sequence[str]) -> str:
    shown = list(titles[:3])
    return "; ".join(shown) + (f"; {len(titles) - 3} more" if len(titles) > 3 else "")


def compare_runs(runs: Sequence[Job | Sweep | str | os.PathLike[str]]) -> RunComparison:
    """Compare recorded jobs, or the series of sweeps.

    Args:
        runs: two jobs or more, or sweeps with two series or more in all; as objects, or as run directories.

    Raises:
        UsageError: fewer than two runs are given, one is given twice, or a directory is not a run; jobs and sweeps are
            mixed.
    """
    if isinstance(runs, str | os.PathLike | Job | Sweep):
        runs = [runs]
    opened = [run if isinstance(run, Job | Sweep) else open_run(run) for run in runs]
    seen: set[Path] = set()
    for run in opened:
        path = run.path.resolve()
        if path in seen:
            raise UsageError(f"{run.path} is named twice: a run is compared with other runs")
        seen.add(path)
    sweeps, jobs = [one for one in opened if isinstance(one, Sweep)], [one for one in opened if isinstance(one, Job)]
    if sweeps and jobs:
        directories = sorted({str(window["directory"]) for window in sweeps[0].run.windows})
        example = f", for example {sweeps[0].path / directories[0]}" if directories else ""
        raise UsageError(
            f"{sweeps[0].path} is a sweep and {jobs[0].path} a job: name sweeps alone, or the job of a series{example}"
        )
    if sweeps:
        orders = [order for sweep in sweeps for order in expected_orders(sweep.run, list(sweep))]
        found = compare_measures(_measured_series(sweeps))
        lines = [line for order in orders for line in order.sentences]
        return replace(found, answer=(*lines, *found.answer), orders=tuple(orders))
    if len(jobs) < 2:
        which = f"{jobs[0].path} is one run" if jobs else "no run is named"
        raise UsageError(f"{which}: name two or more to compare")
    names = _labels([job.path for job in jobs])
    per_second = any(not len(job.logs.work.iterations) for job in jobs)
    return compare_measures([measure_job(job, name, per_second) for job, name in zip(jobs, names, strict=True)])


def _measured_series(sweeps: Sequence[Sweep]) -> list[RunMeasures]:
    count = sum(len(sweep.names) for sweep in sweeps)
    if count < 2:
        raise UsageError(
            f"{', '.join(str(sweep.path) for sweep in sweeps)}: {counted(count, 'series', 'series')} with a point, "
            "and two or more are compared: name another sweep, too"
        )
    names = _labels([sweep.path for sweep in sweeps])
    every = [series for sweep in sweeps for series in sweep]
    rows, share = overview(every), common_share(every)
    loaded: list[AtLoad | str | None] = [at_load(one, share) for one in every]
    if sum(isinstance(one, AtLoad) and len(one.times_s) > 0 for one in loaded) < 2:
        loaded = [None] * len(every)  # there is no load at which two of them are known
    labelled = [
        (sweep, series, series if len(sweeps) == 1 else f"{name}/{series}")
        for sweep, name in zip(sweeps, names, strict=True)
        for series in sweep.names
    ]
    return [measure_series(*one, row, at) for one, row, at in zip(labelled, rows, loaded, strict=True)]


def _labels(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of some paths that differ."""
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels) and _COLUMNS.isdisjoint(labels):
            break
    return [one_line(label) for label in labels]


def compare_measures(runs: Sequence[RunMeasures]) -> RunComparison:
    """Compare runs by their measures.

    Raises:
        UsageError: no measure is known for two runs, or an iteration time is not positive.
    """
    from scipy import stats  # which takes 0.3 s to import

    every_pair = list(itertools.combinations(range(len(runs)), 2))
    pairs = {
        (a, b): _compared(runs[a], runs[b])
        for a, b in every_pair
        if min(len(runs[a].times_s), len(runs[b].times_s)) >= MIN_VALUES
    }
    located = {
        pair: test.p
        for pair, one in pairs.items()
        for test in one.tests
        if test.name == "location" and test.p is not None
    }
    p_times = dict(zip(located, holm(list(located.values())), strict=True))
    first = {one.name: one for run in runs for one in reversed(list(run.measures.values()))}
    names = list(dict.fromkeys(name for run in runs for name in run.measures))
    answered = LOADED if LOADED in names else MEDIAN
    tested = {
        (name, pair): p
        for name in names
        if name != answered
        for pair in every_pair
        if (p := _p_of(name, pair, runs)) is not None
    }
    corrected: dict[tuple[str, Pair], float] = {}
    for is_part in (False, True):
        family = [key for key in tested if first[key[0]].is_part is is_part]
        p_values = stats.false_discovery_control([tested[key] for key in family], method="bh").tolist()
        corrected |= dict(zip(family, p_values, strict=True))
    rows, unknown = [], []
    for name in names:
        found = [run.measures.get(name, replace(first[name], value=None, why=_absent(name))) for run in runs]
        if all(one.value is None for one in found):
            unknown.append((first[name].title, found[0].why))
            continue
        p_values = (
            p_times
            if name == answered
            else {pair: corrected[key] for pair in every_pair if (key := (name, pair)) in corrected}
        )
        rows.append(_row(found, p_values, every_pair))
    if not any(sum(value is not None for value in row.values) > 1 for row in rows):
        reasons = "; ".join(dict.fromkeys(why for row in rows for why in row.reasons if why))
        raise UsageError(
            f"{' and '.join(run.label for run in runs)} have no measure in common: "
            f"{reasons or '; '.join(dict.fromkeys(why for _, why in unknown))}"
        )
    rows.sort(key=lambda row: row.order)
    centers = _means_at_load(runs) if answered == LOADED else _medians(runs, pairs, p_times)
    return RunComparison(tuple(runs), tuple(_answer(runs, centers)), tuple(rows), tuple(unknown), pairs)


def _compared(a: RunMeasures, b: RunMeasures) -> Comparison:
    names = a.label, b.label
    if a.loaded is not None and b.loaded is not None:
        return compare_moved(a.loaded, b.loaded, names)
    return compare(a.times_s, b.times_s, names)


def _absent(name: str) -> str:
    return "no counters of such a host or port" if name.startswith("nic:") else "the run has no such measure"


def _p_of(name: str, pair: Pair, runs: Sequence[RunMeasures]) -> float | None:
    """Return the p value of a measure for a pair of runs; None if it cannot be tested."""
    samples = [run.measures[name].samples if name in run.measures else np.empty(0) for run in (runs[at] for at in pair)]
    return location_p(*samples) if min(map(len, samples)) >= MIN_STRETCHED else None


def _row(found: Sequence[Measure], p_values: dict[Pair, float], every_pair: Sequence[Pair]) -> Row:
    values = tuple(one.value for one in found)
    known = [value for value in values if value is not None]
    ratio = max(known) / min(known) if len(known) > 1 and min(known) > 0 else None
    p = min(p_values.values(), default=None)
    is_beyond = None if p is None else p < ALPHA
    if p is None:
        by_interval = [
            _excludes_zero(a, b)
            for first, second in every_pair
            if (a := found[first].estimate) is not None and (b := found[second].estimate) is not None
        ]
        is_beyond = any(by_interval) if by_interval else None
    reasons = tuple(one.why if one.value is None else "" for one in found)
    one = found[0]
    return Row(one.name, one.title, one.unit, values, reasons, ratio, p, is_beyond, one.is_part)


def _excludes_zero(a: Estimate, b: Estimate) -> bool:
    found = difference(a, b)
    return found.low is not None and found.high is not None and not found.low <= 0 <= found.high


class _Centers(NamedTuple):
    """Iteration times by which runs are ordered, by the runs' numbers.

    Attributes:
        word: ``median``, or at a load ``mean``.
        values: the time of each run whose iterations are known.
        ratios: the second run's time over the first one's, of each pair with an interval or a reason against one.
        p: p value of each pair that was tested, corrected for all of them.
        why: reason why the others were not tested.
    """

    word: str
    values: dict[int, float]
    ratios: dict[Pair, Estimate]
    p: dict[Pair, float]
    why: Callable[[Pair], str]


def _medians(runs: Sequence[RunMeasures], pairs: dict[Pair, Comparison], p_times: dict[Pair, float]) -> _Centers:
    def why(pair: Pair) -> str:
        both = [runs[at] for at in pair]
        few = few_reason([len(run.times_s) for run in both], [run.label for run in both])
        return (pairs[pair].reason if pair in pairs else "") or few

    values = {at: float(np.median(run.times_s)) for at, run in enumerate(runs) if len(run.times_s)}
    return _Centers("median", values, {pair: one.median_ratio for pair, one in pairs.items()}, p_times, why)


def _means_at_load(runs: Sequence[RunMeasures]) -> _Centers:
    loaded = {at: run.loaded for at, run in enumerate(runs) if run.loaded is not None}
    found = {(a, b): mean_ratio(loaded[a], loaded[b]) for a, b in itertools.combinations(loaded, 2)}
    tested = {pair: p for pair, (_, p) in found.items() if p is not None}
    p_means = dict(zip(tested, holm(list(tested.values())), strict=True))

    def why(pair: Pair) -> str:
        few = [runs[at].label for at in pair if loaded[at].error is None]
        return f"Whether beyond chance is not known: the scatter of the points of {listed(few)} is not"

    values, ratios = {at: one.mean_s for at, one in loaded.items()}, {pair: ratio for pair, (ratio, _) in found.items()}
    return _Centers("mean", values, ratios, p_means, why)


def _answer(runs: Sequence[RunMeasures], centers: _Centers) -> Iterator[str]:
    """Yield the run with the shortest iteration, and by how much the others take longer, one sentence each."""
    unknown = [run for run in runs if not len(run.times_s)]
    for run in unknown[:_MAX_NAMES]:
        instead = "" if "series" in run.facts else ": amounts per second are compared"
        yield f"No iteration of {run.label}{f' {run.under}' if run.under else ''} is known{instead or _because(run)}."
    if len(unknown) > _MAX_NAMES:
        yield f"Of {len(unknown) - _MAX_NAMES} more, none is known either."
    values = centers.values
    if len(values) < 2:
        return
    best, *others = sorted(values, key=values.__getitem__)
    label, shown = runs[best].label, format_duration(values[best])
    which = f"iteration {runs[best].under}".strip()
    chance = {at: centers.p.get((min(best, at), max(best, at))) for at in others}
    near = [
        at for at, p in chance.items() if p is not None and (p >= ALPHA or values[at] < (1 + NOTABLE) * values[best])
    ]
    if near:
        names = _named([label, *(runs[at].label for at in near)])
        some = any((chance[at] or 0.0) < ALPHA for at in near)  # beyond chance, but too small to matter
        least = f" of {NOTABLE:.0%} or more" if some else ""
        yield (
            f"No difference{least} beyond chance between {names} was found: an {which} of {label} takes {shown} "
            f"({centers.word})."
        )
    else:
        yield f"{label} has the shortest {which}: {shown} in the {centers.word}."
    for at in others[: _MAX_NAMES - 1] + others[max(_MAX_NAMES - 1, len(others) - 2) :]:
        yield _longer(runs, centers, best, at)
    if len(others) > _MAX_NAMES + 1:
        yield f"{len(others) - _MAX_NAMES - 1} more lie between these: the table and --json have them."


def _because(run: RunMeasures) -> str:
    return f": {run.why}" if run.why else ""


def _named(labels: Sequence[str]) -> str:
    """List names in a sentence, the first ones of many."""
    more = len(labels) - _MAX_NAMES
    return listed([*labels[:_MAX_NAMES], f"{more} more"] if more > 0 else labels)


def _longer(runs: Sequence[RunMeasures], centers: _Centers, best: int, at: int) -> str:
    """Say by how much the iterations of a run take longer than the shortest ones."""
    pair = min(best, at), max(best, at)
    p = centers.p.get(pair)
    if p is None:
        why = centers.why(pair).rstrip(".")
        longer = f"{runs[at].label} takes {centers.values[at] / centers.values[best]:.4g} times as long as"
        return f"{longer} {runs[best].label}; {why[0].lower()}{why[1:]}."
    ratio = _over(centers.ratios[pair], best < at)
    verdict = "within chance" if p >= ALPHA else "beyond chance"
    # the interval is that of this pair alone, so it may leave out 1 where p does not
    of_pairs = f" among {len(centers.p)} pairs" if p >= ALPHA and len(centers.p) > 1 else ""
    if p < ALPHA and ratio.value < 1 + NOTABLE:
        verdict += f", but less than {NOTABLE:.0%}"
    return (
        f"{runs[at].label} takes {ratio.value:.4g} times as long as {runs[best].label} ({_interval(ratio)}), {verdict} "
        f"(p {'< 0.001' if p < 0.001 else f'= {p:.2g}'}{of_pairs})."
    )


def _over(ratio: Estimate, is_of_best: bool) -> Estimate:
    """Return the ratio of the other run to the best one, with its interval, from that of a pair."""
    if is_of_best:
        return ratio
    low, high = (None if end is None else 1 / end for end in (ratio.high, ratio.low))
    return Estimate(1 / ratio.value, low, high)


def _interval(ratio: Estimate) -> str:
    if ratio.low is None or ratio.high is None:
        return "too few iterations for an interval"
    return f"95 % interval {ratio.low:.4g} to {ratio.high:.4g}"
