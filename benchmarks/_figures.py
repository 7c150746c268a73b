"""Medians, paired ratios and the figures with targets, computed from samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from _throughput import RINGTAP

Samples = dict[str, list[dict[str, Any]]]
LOAD_ERROR_TARGET_PCT = 1.0


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


TARGETS = (
    Target("one_stream_vs_iperf3_z", "goodput, 1 stream, ringtap / `iperf3 -Z`, loopback", "≥ 0.9", lambda x: x >= 0.9),
    Target("n_streams_vs_iperf3", "goodput, n streams, ringtap / `iperf3 -P n`, loopback", "≥ 1.0", lambda x: x >= 1),
    Target(
        "load_error_pct_max",
        "deviation of achieved from planned load, worst case, %",
        "≤ 1",
        lambda x: x <= LOAD_ERROR_TARGET_PCT,
    ),
    Target("lateness_p50_us", "lateness on an idle core, median, µs", "< 10", lambda x: x < 10),
    Target("lateness_p99_us", "lateness on an idle core, 99th percentile, µs", "< 100", lambda x: x < 100),
    Target(
        "kept_flows_per_s", "1 kB flows per second, kept connections, one worker", "≥ 20,000", lambda x: x >= 20_000
    ),
    Target(
        "new_flows_per_s", "1 kB flows per second, one connection per flow, one worker", "≥ 5,000", lambda x: x >= 5_000
    ),
    Target("plan_million_rss_mb", "peak memory with a plan of a million flows, MB", "< 200", lambda x: x < 200),
)


def median(samples: Iterable[dict[str, Any]], key: str) -> float | None:
    """Return the median of one figure; None if no sample has it."""
    values = [float(sample[key]) for sample in samples if sample.get(key) is not None]
    return statistics.median(values) if values else None


def select(samples: Samples, measure: str, **values: Any) -> list[dict[str, Any]]:
    """Return the samples of a measure with the given values."""
    of_measure = samples.get(measure, [])
    return [sample for sample in of_measure if all(sample.get(key) == value for key, value in values.items())]


def ratio(samples: Samples, route: str, streams: int, peer: str) -> float | None:
    """Return the median over rounds of ringtap's goodput divided by the peer's in the same round."""
    pairs = {sample["round"]: [sample["goodput_bps"]] for sample in _bulk(samples, route, streams, RINGTAP)}
    for sample in _bulk(samples, route, streams, peer):
        pairs.setdefault(sample["round"], []).append(sample["goodput_bps"])
    ratios = [pair[0] / pair[1] for pair in pairs.values() if len(pair) == 2]
    return statistics.median(ratios) if ratios else None


def _bulk(samples: Samples, route: str, streams: int, tool: str) -> list[dict[str, Any]]:
    return select(samples, "throughput", route=route, streams=streams, tool=tool)


def load_error_pct(samples: Samples, tool: str, kind: str, share: float) -> float | None:
    """Return the median error at one load over the samples without doubt; None if there are none."""
    return median(select(samples, "load", tool=tool, kind=kind, share=share, doubt=None), "error_pct")


def unjudged_loads(samples: Samples) -> list[str]:
    """Return a sentence for each load whose error this run cannot judge."""
    sentences = []
    for kind, share in _loads(samples):
        at_load = select(samples, "load", tool=RINGTAP, kind=kind, share=share)
        if load_error_pct(samples, RINGTAP, kind, share) is None:
            worst = max(at_load, key=lambda sample: float(sample["error_pct"]))
            sentences.append(
                f"This run cannot judge {kind} traffic at {share:.0%} of the ceiling, which missed its planned load by "
                f"{worst['error_pct']:.1f} %: {worst['doubt']}. Measure again on a quiet machine."
            )
    return sentences


def _loads(samples: Samples) -> list[tuple[str, float]]:
    return sorted({(sample["kind"], sample["share"]) for sample in select(samples, "load", tool=RINGTAP)})


def _worst_load_error_pct(samples: Samples) -> float | None:
    """Return the largest error of all loads; None if it may be that of a load which this run cannot judge."""
    errors = [load_error_pct(samples, RINGTAP, kind, share) for kind, share in _loads(samples)]
    worst = _largest(errors)
    return None if None in errors and (worst or 0.0) <= LOAD_ERROR_TARGET_PCT else worst


def last_line(samples: Samples, streams: int) -> dict[str, float | None]:
    """Return the figures with targets; None: not measured, or this run cannot judge it."""
    idle = select(samples, "lateness", core="idle")
    rates = {name: select(samples, "flow rate", route="loopback", connections=name) for name in ("kept", "new")}
    million = samples.get("million flows", [])
    memory = [median(million, "write_rss_mb"), median(million, "read_rss_mb")]
    values = (
        ratio(samples, "loopback", 1, "iperf3 -Z"),
        ratio(samples, "loopback", streams, "iperf3"),
        _worst_load_error_pct(samples),
        median(idle, "p50_us"),
        median(idle, "p99_us"),
        median(rates["kept"], "flows_per_s"),
        median(rates["new"], "flows_per_s"),
        _largest(memory),
    )
    return {target.key: _rounded(value) for target, value in zip(TARGETS, values, strict=True)}


def _largest(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")
