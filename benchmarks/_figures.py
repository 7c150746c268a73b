"""Computation of medians, paired ratios and the figures with bars from samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from _throughput import RINGTAP

Samples = dict[str, list[dict[str, Any]]]
LOAD_ERROR_BAR_PCT = 1.0


@dataclass(frozen=True)
class Bar:
    """A figure with a bar, the limit that it must meet.

    Attributes:
        key: its key in the last line.
        words: description of the figure.
        bar: text of the bar.
        holds: returns True if a value meets the bar.
    """

    key: str
    words: str
    bar: str
    holds: Callable[[float], bool]


BARS = (
    Bar(
        "one_stream_vs_iperf3_z",
        "goodput of one stream over that of `iperf3 -Z`, loopback",
        "≥ 0.9",
        lambda x: x >= 0.9,
    ),
    Bar("n_streams_vs_iperf3", "goodput of n streams over that of `iperf3 -P n`, loopback", "≥ 1.0", lambda x: x >= 1),
    Bar(
        "load_error_pct_max",
        "achieved against planned load, the worst case, %",
        "≤ 1",
        lambda x: x <= LOAD_ERROR_BAR_PCT,
    ),
    Bar("lateness_p50_us", "lateness on an idle core, median, µs", "< 10", lambda x: x < 10),
    Bar("lateness_p99_us", "lateness on an idle core, 99th percentile, µs", "< 100", lambda x: x < 100),
    Bar("kept_flows_per_s", "1 kB flows per second on kept connections, one worker", "≥ 20,000", lambda x: x >= 20_000),
    Bar("new_flows_per_s", "1 kB flows per second with a connection each, one worker", "≥ 5,000", lambda x: x >= 5_000),
    Bar("plan_million_rss_mb", "peak memory with a plan of a million flows, MB", "< 200", lambda x: x < 200),
)


def median(samples: Iterable[dict[str, Any]], key: str) -> float | None:
    """Return the median of one figure; None if no sample has it."""
    values = [float(sample[key]) for sample in samples if sample.get(key) is not None]
    return statistics.median(values) if values else None


def select(samples: Samples, measure: str, **what: Any) -> list[dict[str, Any]]:
    """Return the samples of a measure with the given values."""
    taken = samples.get(measure, [])
    return [sample for sample in taken if all(sample.get(key) == value for key, value in what.items())]


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
    """Return the median error at one load, of the samples without doubt; None if there are none."""
    return median(select(samples, "load", tool=tool, kind=kind, share=share, doubt=None), "error_pct")


def unjudged_loads(samples: Samples) -> list[str]:
    """Return a sentence for each load whose error this run cannot judge."""
    sentences = []
    for kind, share in _loads(samples):
        taken = select(samples, "load", tool=RINGTAP, kind=kind, share=share)
        if load_error_pct(samples, RINGTAP, kind, share) is None:
            worst = max(taken, key=lambda sample: float(sample["error_pct"]))
            sentences.append(
                f"This run cannot judge {kind} traffic at {share:.0%} of the ceiling, which missed its planned load by "
                f"{worst['error_pct']:.1f} %: {worst['doubt']}. Measure again on a quiet machine."
            )
    return sentences


def _loads(samples: Samples) -> list[tuple[str, float]]:
    return sorted({(sample["kind"], sample["share"]) for sample in select(samples, "load", tool=RINGTAP)})


def _worst_load_error_pct(samples: Samples) -> float | None:
    """Return the largest error over the loads; None if a load that this run cannot judge may be worse."""
    errors = [load_error_pct(samples, RINGTAP, kind, share) for kind, share in _loads(samples)]
    worst = _most(errors)
    return None if None in errors and (worst or 0.0) <= LOAD_ERROR_BAR_PCT else worst


def last_line(samples: Samples, streams: int) -> dict[str, float | None]:
    """Return the figures that have bars; None: not measured, or it cannot be judged."""
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
        _most(memory),
    )
    return {bar.key: _rounded(value) for bar, value in zip(BARS, values, strict=True)}


def _most(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known else None


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")
