"""Figures with bars, and tables, from samples of the readers of captures."""

from __future__ import annotations

import math
from typing import Any

from _figures import Bar, Samples, median, select
from _pcap_tools import DPKT, RINGTAP, SCAPY, TCPDUMP, TSHARK_FIELDS, TSHARK_TABLE
from _report import Table, bars_table, number

BARS = (
    Bar("vs_tcpdump", "packets per second over those of `tcpdump -r FILE -w /dev/null`", "≥ 1", lambda x: x >= 1),
    Bar("vs_tshark", "over those of `tshark -q -z conv,tcp`", "≥ 100", lambda x: x >= 100),
    Bar("vs_dpkt", "over those of a loop with dpkt", "≥ 50", lambda x: x >= 50),
    Bar("peak_rss_mb", "peak memory, MB, the largest capture of the run", "≤ 500", lambda x: x <= 500),
)
_NONE = "-"


def last_line(samples: Samples) -> dict[str, float | None]:
    """Return the figures of the last line; None: not measured."""
    ours = median(_one_core(samples, RINGTAP), "packets_per_s")
    memory = [one["peak_rss_mb"] for one in samples.get("read", []) if one["tool"] == RINGTAP]
    figures: dict[str, float | None] = {
        "packets_per_s": ours,
        "vs_tcpdump": _paired(samples),
        "vs_tshark": _over(samples, ours, TSHARK_TABLE),
        "vs_dpkt": _over(samples, ours, DPKT),
        "vs_scapy": _over(samples, ours, SCAPY),
        "peak_rss_mb": max(memory, default=None),
        "vs_tshark_fields": _over(samples, ours, TSHARK_FIELDS),
        "packets_per_s_all_cores": median(select(samples, "read", tool=RINGTAP, cores="all", files=1), "packets_per_s"),
        "packets_per_s_two_files": median(select(samples, "read", tool=RINGTAP, cores="all", files=2), "packets_per_s"),
    }
    return {key: _rounded(value) for key, value in figures.items()}


def _one_core(samples: Samples, tool: str) -> list[dict[str, Any]]:
    return select(samples, "read", tool=tool, cores="one", files=1)


def _paired(samples: Samples) -> float | None:
    """Return the median over rounds of ringtap's packets per second divided by tcpdump's in the same round."""
    theirs = {one["round"]: one["packets_per_s"] for one in _one_core(samples, TCPDUMP)}
    ours = [one for one in _one_core(samples, RINGTAP) if one["round"] in theirs]
    return median([{"ratio": one["packets_per_s"] / theirs[one["round"]]} for one in ours], "ratio")


def _over(samples: Samples, ours: float | None, tool: str) -> float | None:
    theirs = median(_one_core(samples, tool), "packets_per_s")
    return ours / theirs if ours and theirs else None


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


def tables(samples: Samples) -> list[Table]:
    """Return every table with samples."""
    return [table for table in (bars_table(BARS, last_line(samples)), _readers(samples)) if table.rows]


def _readers(samples: Samples) -> Table:
    taken = samples.get("read", [])
    cases = dict.fromkeys((one["tool"], one["cores"], one["files"], one["packets"]) for one in taken)
    ours = median(_one_core(samples, RINGTAP), "packets_per_s")
    rows = []
    for tool, cores, files, packets in cases:
        some = select(samples, "read", tool=tool, cores=cores, files=files, packets=packets)
        rates = sorted(one["packets_per_s"] / 1e6 for one in some)
        middle = median(some, "packets_per_s") or 0
        against = _NONE if tool == RINGTAP else number(_paired(samples) if tool == TCPDUMP else (ours or 0) / middle)
        read = f"{packets / 1e6:g} M" + (f" in {files} files" if files > 1 else "")
        spread = f"{rates[0]:.3g} to {rates[-1]:.3g}"
        figures = [number(median(some, key)) for key in ("seconds", "peak_rss_mb")]
        rows.append([tool, cores, read, f"{middle / 1e6:.3g}", spread, *figures, against, str(len(some))])
    head = ["tool", "cores", "packets", "M packets/s", "least to most", "s", "peak MB", "ringtap over it", "samples"]
    return Table("Readers of captures, cold processes", head, rows)
