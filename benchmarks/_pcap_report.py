"""Figures with targets, and tables, from samples of the readers of captures."""

from __future__ import annotations

import math
from typing import Any

from _figures import Samples, Target, median, select
from _pcap_tools import DPKT, RINGTAP, SCAPY, TCPDUMP, TSHARK_FIELDS, TSHARK_TABLE
from _report import Table, number, targets_table

TARGETS = (
    Target("vs_tcpdump", "packets per second, ringtap / `tcpdump -r FILE -w /dev/null`", "≥ 1", lambda x: x >= 1),
    Target("vs_tshark", "packets per second, ringtap / `tshark -q -z conv,tcp`", "≥ 100", lambda x: x >= 100),
    Target("vs_dpkt", "packets per second, ringtap / a loop with dpkt", "≥ 50", lambda x: x >= 50),
    Target("speedup_all_cores", "seconds for one large capture, one core / two", "≥ 1.7", lambda x: x >= 1.7),
    Target("peak_rss_mb", "peak memory, largest value of the run, MB", "≤ 500", lambda x: x <= 500),
)
_NONE = "-"


def last_line(samples: Samples) -> dict[str, float | None]:
    """Return the figures of the last line; None: not measured."""
    ours = median(_one_core(samples, RINGTAP), "packets_per_s")
    memory = [sample["peak_rss_mb"] for name in ("read", "large") for sample in select(samples, name, tool=RINGTAP)]
    figures: dict[str, float | None] = {
        "packets_per_s": ours,
        "vs_tcpdump": _paired(samples),
        "vs_tshark": _over(samples, ours, TSHARK_TABLE),
        "vs_dpkt": _over(samples, ours, DPKT),
        "vs_scapy": _over(samples, ours, SCAPY),
        "peak_rss_mb": max(memory, default=None),
        "speedup_all_cores": _speedup(samples),
        "vs_tshark_fields": _over(samples, ours, TSHARK_FIELDS),
        "packets_per_s_all_cores": median(select(samples, "read", tool=RINGTAP, cores="all", files=1), "packets_per_s"),
        "packets_per_s_two_files": median(select(samples, "read", tool=RINGTAP, cores="all", files=2), "packets_per_s"),
    }
    return {key: _rounded(value) for key, value in figures.items()}


def _one_core(samples: Samples, tool: str) -> list[dict[str, Any]]:
    return select(samples, "read", tool=tool, cores="one", files=1)


def _paired(samples: Samples) -> float | None:
    """Return the median over rounds of ringtap's packets per second divided by tcpdump's in the same round."""
    theirs = {sample["round"]: sample["packets_per_s"] for sample in _one_core(samples, TCPDUMP)}
    ours = [sample for sample in _one_core(samples, RINGTAP) if sample["round"] in theirs]
    return median([{"ratio": sample["packets_per_s"] / theirs[sample["round"]]} for sample in ours], "ratio")


def _speedup(samples: Samples) -> float | None:
    """Return the median over rounds of the seconds on one core divided by those on all."""
    one = {sample["round"]: sample["seconds"] for sample in select(samples, "large", cores="one")}
    both = [sample for sample in select(samples, "large", cores="all") if sample["round"] in one]
    return median([{"ratio": one[sample["round"]] / sample["seconds"]} for sample in both], "ratio")


def _over(samples: Samples, ours: float | None, tool: str) -> float | None:
    theirs = median(_one_core(samples, tool), "packets_per_s")
    return ours / theirs if ours and theirs else None


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.4g}")


def tables(samples: Samples) -> list[Table]:
    """Return every table with samples."""
    return [
        table
        for table in (targets_table(TARGETS, last_line(samples)), _readers(samples), _large(samples))
        if table.rows
    ]


def _large(samples: Samples) -> Table:
    rows = []
    for cores in ("one", "all"):
        some = select(samples, "large", cores=cores)
        if some:
            figures = [number(median(some, key)) for key in ("seconds", "cpu_s", "peak_rss_mb")]
            rows.append([cores, f"{some[0]['packets'] / 1e6:g} M", *figures, str(len(some))])
    return Table("One large capture, `ringtap flows`", ["cores", "packets", "s", "CPU s", "peak MB", "samples"], rows)


def _readers(samples: Samples) -> Table:
    taken = samples.get("read", [])
    cases = dict.fromkeys(tuple(sample[key] for key in ("tool", "cores", "files", "packets")) for sample in taken)
    ours = median(_one_core(samples, RINGTAP), "packets_per_s")
    rows = []
    for tool, cores, files, packets in cases:
        some = select(samples, "read", tool=tool, cores=cores, files=files, packets=packets)
        rates = sorted(sample["packets_per_s"] / 1e6 for sample in some)
        middle = median(some, "packets_per_s") or 0
        relative = _NONE if tool == RINGTAP else number(_paired(samples) if tool == TCPDUMP else (ours or 0) / middle)
        read = f"{packets / 1e6:g} M" + (f" in {files} files" if files > 1 else "")
        spread = f"{rates[0]:.3g} to {rates[-1]:.3g}"
        figures = [number(median(some, key)) for key in ("seconds", "peak_rss_mb")]
        rows.append([tool, cores, read, f"{middle / 1e6:.3g}", spread, *figures, relative, str(len(some))])
    head = ["tool", "cores", "packets", "M packets/s", "min to max", "s", "peak MB", "ringtap / tool", "samples"]
    return Table("Readers of captures, cold processes", head, rows)
