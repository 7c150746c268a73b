"""Compares series of a sweep with their message graphs: bytes on each link, simulated times, reasons for the order."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.plots.style import title_of
from ringtap.analysis.runs.run import SweepRun
from ringtap.analysis.sweeps.series_analysis import Series, grouped
from ringtap.core.append_only_logs import read_json_lines
from ringtap.core.run_directory_schema import EXPECTED, EXPECTED_JSONL

_FEWEST = 3  # series of a model whose order is compared
_SAME_S = 1e-6  # times are told apart by more than this
_LEAST_PART = 0.005  # of an iteration: shorter parts of a critical path are not listed
_WAYS = {"up": "uplink", "down": "downlink"}


@dataclass(frozen=True)
class ExpectedSeries:
    """A series without cross traffic beside its message graphs.

    Attributes:
        series: its name.
        variant: its transport, collective and topology in words, and the kind of traffic if there are several.
        measured_s: measured mean iteration time; None without a point.
        simulated_s: simulated time; None: not known.
        measured_rank: rank by the measured time, 1 for the shortest, among the series with both times; series with
            the same time share the mean of their ranks.
        simulated_rank: rank by the simulated time, likewise.
        parts: computation and links on the simulated critical path, with the seconds of each, the longest first.
        messages: messages on that path; None: not known.
        link: the links whose bytes differ most from those expected; empty if that is not known.
        link_difference: difference over the bytes expected there, or over the largest of all links if none are.
        link_iterations: iterations in which bytes were counted.
        why: the reason that the simulated time is not known, else empty.
        link_why: the reason that the difference is not known, else empty.
    """

    series: str
    variant: str
    measured_s: float | None
    simulated_s: float | None
    measured_rank: float | None
    simulated_rank: float | None
    parts: tuple[tuple[str, float], ...]
    messages: int | None
    link: str
    link_difference: float | None
    link_iterations: int | None
    why: str
    link_why: str

    @property
    def path(self) -> str:
        """The critical path in words."""
        return ", ".join(f"{1e3 * seconds:.0f} ms {name}" for name, seconds in self.parts)


@dataclass(frozen=True)
class ExpectedOrder:
    """Series of one model in order of their measured times, those without one last.

    Attributes:
        title: name of the model.
        series: the series.
        spearman: rank correlation of measured and simulated times (Spearman); None with fewer than three series that
            have both, or if all of them take equally long.
    """

    title: str
    series: tuple[ExpectedSeries, ...]
    spearman: float | None

    @property
    def sentences(self) -> list[str]:
        """Sentences on how well order and bytes agree with the simulations and the message graphs."""
        lines, compared = [], [one for one in self.series if one.measured_rank is not None]
        if self.spearman is not None:
            ends = [f"{one.variant} ({one.measured_s:.3f} s)" for one in (compared[0], compared[-1])]
            lines.append(
                f"{self.title} is fastest {ends[0]} and slowest {ends[1]}; the simulated order of {len(compared)} "
                f"series has a rank correlation of {self.spearman:.2f} (Spearman) with the measured one."
            )
        counted = [one for one in self.series if one.link_difference is not None]
        if counted:
            most = max(counted, key=lambda one: abs(one.link_difference or 0.0))
            lines.append(
                f"With {self.title}, links carried the bytes of the message graphs to within "
                f"{100 * abs(most.link_difference or 0.0):.1f} % ({most.link} {most.variant})."
            )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        rows = [asdict(one) | {"path": one.path} for one in self.series]
        return {"title": self.title, "spearman": self.spearman, "sentences": self.sentences, "series": rows}


def expected_orders(run: SweepRun, series: Sequence[Series]) -> list[ExpectedOrder]:
    """Return the series of each model of which message graphs are known.

    Args:
        run: the sweep.
        series: its series.

    Raises:
        UsageError: expected.jsonl is damaged.
    """
    known = {item["series"]: item for item in read_json_lines(run.path / EXPECTED_JSONL, EXPECTED)[0]}
    counted = {window["series"]: window for window in run.windows if not window["requested_bps"]}
    hosts = set((run.plan["topology"].get("hosts")) or ())
    orders = []
    for group in grouped(series, "model"):
        if any("links" in known.get(one.name, ()) for one in group):
            orders.append(_order(group, known, counted, hosts))
    return orders


def _order(
    group: Sequence[Series], known: Mapping[str, Any], counted: Mapping[str, Any], hosts: set[str]
) -> ExpectedOrder:
    kinds = {one.traffic for one in group}
    times = {}
    for one in group:
        simulated_s = known.get(one.name, {}).get("iteration_s")
        if simulated_s is not None and one.no_load_s is not None:
            times[one.name] = one.no_load_s, simulated_s
    ranks = (pd.DataFrame(times) / _SAME_S).round().rank(axis=1)  # a row of measured times, one of simulated
    rank_of = {name: tuple(ranks[name]) for name in times}
    rows = []
    for one in group:
        item, window = known.get(one.name, {}), counted.get(one.name, {})
        why = "" if "links" in item else item.get("why") or f"{EXPECTED_JSONL} has no such series"
        link, difference, link_why = _most_off(item.get("links") or [], window)
        variant = (one.over + (f" under {title_of(one.traffic)}" if len(kinds) > 1 else "")).strip()
        rank, simulated_rank = rank_of.get(one.name, (None, None))
        rows.append(
            ExpectedSeries(
                one.name, variant, one.no_load_s, item.get("iteration_s"), rank, simulated_rank, _parts(item, hosts),
                item.get("critical_messages"), link, difference, window.get("link_iterations"), why, why or link_why,
            )
        )  # fmt: skip
    rows.sort(key=lambda row: (row.measured_s is None, row.measured_s or 0.0))
    is_ordered = len(times) >= _FEWEST and (np.ptp(ranks, axis=1) > 0).all()
    spearman = float(np.corrcoef(ranks)[0, 1]) if is_ordered else None
    return ExpectedOrder(group[0].title, tuple(rows), spearman)


def _most_off(links: Sequence[Mapping[str, Any]], window: Mapping[str, Any]) -> tuple[str, float | None, str]:
    """Return the link with the largest difference, the difference, and the reason if it is not known."""
    counted = window.get("link_payload_bytes")
    if not window:
        return "", None, "no point without cross traffic was measured"
    if counted is None:
        return "", None, window.get("link_why") or "the links were not counted"
    expected = {link["link"]: link["payload_bytes"] + link["header_bytes"] for link in links}
    most = max(expected.values(), default=0)
    if not most or counted.keys() != expected.keys():
        return "", None, f"{EXPECTED_JSONL} and the point have different links"
    off = {name: (counted[name] - size) / (size or most) for name, size in expected.items()}
    link = max(off, key=lambda name: abs(off[name]))
    return link, off[link], ""


def _parts(item: Mapping[str, Any], hosts: set[str]) -> tuple[tuple[str, float], ...]:
    """Return the parts of a critical path; links of one kind in one direction are one part."""
    found: dict[str, float] = {
        "of computation": item.get("compute_s") or 0.0,
        "of latency": item.get("latency_s") or 0.0,
    }
    by_kind: dict[tuple[str, str], list[tuple[str, float]]] = defaultdict(list)
    for link in item.get("links") or ():
        if link["critical_s"]:
            node, _, way = link["link"].rpartition(" ")
            kind = "hosts" if node in hosts else f"{re.sub(r'[0-9]+$', '', node)} switches"
            by_kind[kind, way].append((node, link["critical_s"]))
    for (kind, way), every in by_kind.items():
        name = _WAYS.get(way, "link")
        text = f"on the {name} of {every[0][0]}" if len(every) == 1 else f"on {name}s of {kind}"
        found[text] = sum(seconds for _, seconds in every)
    least_s = _LEAST_PART * (item.get("iteration_s") or 0.0)
    parts = [(name, seconds) for name, seconds in found.items() if seconds > least_s]
    return tuple(sorted(parts, key=lambda part: -part[1]))
