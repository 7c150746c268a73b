"""Tables of results from samples, as text for a terminal and as Markdown for the documentation."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NONE = "-"

Sample = dict[str, Any]
Samples = dict[str, list[Sample]]


@dataclass(frozen=True)
class Table:
    """A table with a title."""

    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Target:
    """A figure and the limit that it must meet.

    Attributes:
        key: key of the figure in the last line.
        figure: description of the figure.
        limit: text of the limit.
        is_met: returns True if a value is within the limit.
    """

    key: str
    figure: str
    limit: str
    is_met: Callable[[float], bool]


def median(samples: Iterable[Sample], key: str) -> float | None:
    """Return the median of one figure; None if no sample has it."""
    values = [float(sample[key]) for sample in samples if sample.get(key) is not None]
    return statistics.median(values) if values else None


def select(samples: Samples, measure: str, **values: Any) -> list[Sample]:
    """Return the samples of a measure with the given values."""
    of_measure = samples.get(measure, [])
    return [sample for sample in of_measure if all(sample.get(key) == value for key, value in values.items())]


def paired_ratio(some: Sequence[Sample], others: Sequence[Sample], key: str) -> float | None:
    """Return the median over rounds of a figure divided by that of other samples of the same round; None: no round."""
    divisors = {sample["round"]: sample[key] for sample in others}
    ratios = [sample[key] / divisors[sample["round"]] for sample in some if sample["round"] in divisors]
    return statistics.median(ratios) if ratios else None


def rounded(figures: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return figures of the last line with four digits; None: not measured."""
    return {
        key: float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
        for key, value in figures.items()
    }


def number(value: float | None) -> str:
    """Return the text of a number: three significant digits, or whole numbers from 1000 on; a dash for None."""
    if value is None:
        return _NONE
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def targets_table(targets: Sequence[Target], values: dict[str, Any], unsure: Collection[str] = ()) -> Table:
    """Return the table of figures with their targets; this run cannot judge the figures in ``unsure``."""
    rows = []
    for target in targets:
        value = values[target.key]
        met = _NONE if value is None else "yes" if target.is_met(value) else "**no**"
        met = "cannot judge" if target.key in unsure else met
        rows.append([target.figure, target.limit, number(value), met])
    return Table("Targets", ["figure", "target", "measured", "met"], rows)


def medians_table(title: str, samples: Sequence[Sample], cases: Mapping[str, str], figures: Mapping[str, str]) -> Table:
    """Return a row for each case that was measured, with the medians of its figures.

    Args:
        title: title of the table.
        samples: samples of one measure.
        cases: key of a sample that tells cases apart -> heading.
        figures: key of a figure -> heading.
    """
    rows = []
    for case in dict.fromkeys(tuple(sample[key] for key in cases) for sample in samples):
        some = [sample for sample in samples if tuple(sample[key] for key in cases) == case]
        cells = [value if isinstance(value, str) else f"{value:,}" for value in case]
        cells += [number(median(some, key)) for key in figures]
        rows.append([*cells, str(len(some)), f"{median(some, 'stolen_pct') or 0:.1f}"])
    return Table(title, [*cases.values(), *figures.values(), "samples", "stolen %"], rows)


def write(
    machine: dict[str, Any],
    options: argparse.Namespace,
    figures: dict[str, Any],
    made: Sequence[Table],
    samples: Samples,
    notes: list[str],
    failures: list[str],
) -> None:
    """Write the samples to the file of -o, the tables to the file of --markdown; print the tables and the figures."""
    made = [table for table in made if table.rows]
    sentences = ["\n".join(f"- {text}" for text in texts) for texts in (notes, failures) if texts]
    if options.output:
        raw = {"machine": machine, "samples": samples, "figures": figures, "notes": notes, "failures": failures}
        options.output.write_text(json.dumps(raw, indent=1) + "\n")
    if options.markdown:
        parts = [_machine(machine), *map(_as_markdown, made), *sentences]
        options.markdown.write_text("\n\n".join(parts) + "\n")
    print("\n\n".join([_machine(machine), *map(_as_text, made), *sentences]))
    print()
    print(json.dumps(figures), flush=True)


def _as_text(table: Table) -> str:
    lines = [[cell.strip("*").replace("`", "") for cell in line] for line in (table.head, *table.rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join([table.title, *("  " + "  ".join(line).rstrip() for line in padded)])


def _as_markdown(table: Table) -> str:
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join([f"{table.title}:", "", *(f"| {' | '.join(line)} |" for line in lines)])


def _machine(machine: dict[str, Any]) -> str:
    return (
        f"Measured {machine['date']}: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
        f"Linux {machine['kernel']}, {machine['python']}, TCP {machine['congestion_control']}. "
        f"The machine's own host took {machine['stolen_pct']:.1f} % of the cores' "
        f"time, and other programs took {machine['others_pct']:.1f} %."
    )
