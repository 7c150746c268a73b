"""Compares a flow plan with what was sent and what crossed the link (docs/commands/traffic-verify.md)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.plots.figure import Drawn
from ringtap.analysis.traffic.delivered import (
    InjectionRates,
    Passed,
    from_capture,
    from_log,
    from_nic,
    instantaneous,
    shown_span_ns,
    window_ns,
)
from ringtap.analysis.traffic.flow_logs import FAILED, FINISHED, UNFINISHED, SenderLogs, read_sent
from ringtap.analysis.traffic.plan_bursts import Flags, Windows, burst_windows
from ringtap.analysis.traffic.plots import plan_figure, rates_figure, trace_figure
from ringtap.core.append_only_logs import FORMAT as RECORDS
from ringtap.core.errors import UsageError, file_errors
from ringtap.core.flow_plan_table import FlowTable, Integers, Numbers, read_plan
from ringtap.core.run_directory_schema import LOAD_BIN_NS, MISSED_NS, SIZE_CLASSES_BYTES
from ringtap.core.sent_flow_log import slowdown
from ringtap.core.units import counted, format_duration

NEAR_SHARE = 0.05  # largest relative error of a window that counts as near its plan
_MAX_DURATION_NS = 7 * 24 * 3600 * 10**9  # its bins of 100 ms take about 1 GB


def tally(plan: FlowTable, sent: SenderLogs) -> tuple[dict[str, Any], list[str]]:
    """Count flows and bytes planned, sent and received; return the counts and a sentence per kind of deviation."""
    planned, lines = int(plan.is_flow.sum()), len(plan.start_ns)
    known = (sent.flow >= 0) & (sent.flow < lines)
    number = sent.flow[known]
    times = np.bincount(number, minlength=lines)[plan.is_flow]
    open_ended = plan.size_bytes[number] == 0
    state = sent.state[known]
    flows = {"planned": planned, "sent": int(sent.moved.sum()), "finished": int((sent.state == FINISHED).sum())}
    flows |= {"unfinished": int((sent.state == UNFINISHED).sum()), "failed": int((sent.state == FAILED).sum())}
    flows |= {"missing": int((times == 0).sum()), "repeated": int((times > 1).sum()), "unknown": int((~known).sum())}
    flows |= {"open_ended": int((plan.size_bytes[plan.is_flow] == 0).sum())}
    total = {"planned": plan.bytes, "sent": int(sent.sent_bytes.sum()), "received": int(sent.received_bytes.sum())}
    other_bytes = (sent.state == FINISHED) & (sent.sent_bytes != sent.size_bytes) & (sent.size_bytes > 0) & known
    wrong = {
        "missing from the log": flows["missing"],
        "failed": flows["failed"],
        "unfinished": int(((state == UNFINISHED) & ~open_ended).sum()),
        "logged more than once": flows["repeated"],
        "in the log but not in the plan": flows["unknown"],
        "of another size than planned": int(((sent.size_bytes[known] != plan.size_bytes[number]) & ~open_ended).sum()),
        "finished with other bytes than their size": int(other_bytes.sum()),
        "to another destination than planned": int(_other_destination(plan, sent, known).sum()),
        "due at another time than planned": int(_other_due_time(plan, sent, known).sum()),
    }
    deviations = [f"{count} of {counted(planned, 'flow')} {what}" for what, count in wrong.items() if count]
    return {"flows": flows, "bytes": total, "retransmits": int(sent.retransmits.sum())}, deviations


def _other_destination(plan: FlowTable, sent: SenderLogs, known: Flags) -> Flags:
    indexes = {name: index for index, name in enumerate(plan.destinations)}
    index_in_plan = np.array([indexes.get(name, -1) for name in sent.destinations] or [-1], np.int64)
    return np.asarray(index_in_plan[sent.destination[known]] != plan.destination[sent.flow[known]])


def _other_due_time(plan: FlowTable, sent: SenderLogs, known: Flags) -> Flags:
    """Return a mask of the flows due at another time than planned; dependent flows may be due later, not earlier."""
    number = sent.flow[known]
    late = sent.intended_start_ns[known] - plan.start_ns[number]
    return np.asarray((late < 0) | ((late > 0) & (plan.waits[number] == 0)))


def compared_ns(plan: FlowTable, sent: SenderLogs) -> int:
    """Return the time from the launch to the end of the plan or the last finish, whichever is later."""
    return max(plan.duration_ns, sent.last_ns)


def load(plan: FlowTable, sent: SenderLogs, log: Passed, wire: Passed | None) -> tuple[dict[str, Any], pd.DataFrame]:
    """Return the offered and achieved load, as a whole and in bins of 100 ms."""
    edges = np.append(np.arange(0, plan.duration_ns, LOAD_BIN_NS, dtype=np.int64), plan.duration_ns)
    widths_s = np.diff(edges) / 1e9
    due, launched = _due(plan, sent), sent.started
    sums = {
        "offered": np.histogram(due, edges, weights=plan.size_bytes)[0],
        "launched": np.histogram(sent.start_ns[launched], edges, weights=sent.size_bytes[launched])[0],
        "achieved": log.between(edges),
    }
    if wire is not None:
        sums[wire.source] = wire.between(edges)
    table = pd.DataFrame({"start_s": edges[:-1] / 1e9, "end_s": edges[1:] / 1e9})
    for name, values in sums.items():
        table[f"{name}_bps"] = values * 8 / widths_s
    end_ns = compared_ns(plan, sent)
    elapsed_s = end_ns / 1e9
    received = int(sent.received_bytes.sum())
    whole: dict[str, Any] = {
        "offered_bps": plan.load_bps,
        "achieved_bps": received * 8 / elapsed_s,
        "over_s": elapsed_s,
    }
    whole["error"] = _ratio(whole["achieved_bps"] - plan.load_bps, plan.load_bps)
    if wire is not None:
        passed = float(wire.until(np.array([end_ns + LOAD_BIN_NS]))[0])
        whole |= {f"{wire.source}_bytes": passed, f"{wire.source}_error": _ratio(passed - received, received)}
    bins = {name: _errors(table[f"{name}_bps"].to_numpy(), table["offered_bps"].to_numpy()) for name in list(sums)[1:]}
    return {"whole": whole, "bins_100ms": bins}, table


def _due(plan: FlowTable, sent: SenderLogs) -> Integers:
    """Return each flow's due time: the logged one if any, since some flows wait for others, else the planned one."""
    due = plan.start_ns.copy()
    known = (sent.flow >= 0) & (sent.flow < len(due)) & (sent.intended_start_ns >= 0)
    due[sent.flow[known]] = sent.intended_start_ns[known]
    return due


def _errors(values: Numbers, offered: Numbers) -> dict[str, float | None]:
    """Return the greatest and the root-mean-square difference of known values, relative to the mean offered load."""
    off, mean = (values - offered)[~np.isnan(values)], float(offered.mean()) if len(offered) else 0.0
    if not len(off):
        return {"error_max": None, "error_rms": None}
    greatest, square = float(np.abs(off).max()), float(np.sqrt((off**2).mean()))
    return {"error_max": _ratio(greatest, mean), "error_rms": _ratio(square, mean)}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def lateness(sent: SenderLogs) -> dict[str, Any]:
    """Summarize the lateness of the flows' launches, in microseconds, and count the missed slots."""
    late = sent.lateness_ns[sent.started] / 1e3
    if not len(late):
        return {"launched": 0, "missed_slots": 0}
    quantiles = np.quantile(late, [0.5, 0.9, 0.99, 0.999])
    named = dict(zip(("p50_us", "p90_us", "p99_us", "p99.9_us"), map(float, quantiles), strict=True))
    missed = int((late * 1e3 > MISSED_NS).sum())
    return {"launched": len(late), **named, "max_us": float(late.max()), "missed_slots": missed}


def completion(sent: SenderLogs, capacity_bps: float | None, baseline: SenderLogs | None) -> pd.DataFrame:
    """Return completion times, slowdowns and congestion impact factors, for all finished flows and per size class."""
    times_s, sizes = sent.completion_ns / 1e9, sent.size_bytes[sent.completed]
    alone = None if baseline is None else (baseline.completion_ns / 1e9, baseline.size_bytes[baseline.completed])
    slower, slower_sizes = _slowdowns(sent, capacity_bps)
    ends = [0, *(most for most in SIZE_CLASSES_BYTES if most is not None)]
    classes: list[tuple[int, int | None]] = [(0, None), *zip(ends, SIZE_CLASSES_BYTES, strict=True)]
    rows = []
    for least, most in classes:
        chosen = _in_class(sizes, least, most)
        row: dict[str, Any] = {"from_bytes": least, "to_bytes": most, "flows": int(chosen.sum())}
        row |= _summary("fct", times_s[chosen], "_s")
        row |= _summary("slowdown", slower[_in_class(slower_sizes, least, most)], "")
        before = np.empty(0) if alone is None else alone[0][_in_class(alone[1], least, most)]
        reference = _summary("fct", before, "_s")
        for name in ("mean", "p99"):
            value, base = row[f"fct_{name}_s"], reference[f"fct_{name}_s"]
            row[f"congestion_impact_{name}"] = value / base if value is not None and base else None
        rows.append(row)
    return pd.DataFrame(rows).astype({"to_bytes": "Int64"})


def _slowdowns(sent: SenderLogs, capacity_bps: float | None) -> tuple[Numbers, Integers]:
    """Return slowdowns and sizes of the completed flows whose connections' smallest round-trip times are known."""
    min_rtt_us = sent.min_rtt_us[sent.completed]
    known = min_rtt_us > 0 if capacity_bps else np.zeros(len(min_rtt_us), bool)
    sizes = sent.size_bytes[sent.completed][known]
    return slowdown(sent.completion_ns[known], sizes, min_rtt_us[known], capacity_bps or 1.0), sizes


def _in_class(sizes: Integers, least: int, most: int | None) -> Flags:
    return np.asarray((sizes >= least) & (sizes < (np.inf if most is None else most)))


def _summary(name: str, values: Numbers, unit: str) -> dict[str, float | None]:
    keys = [f"{name}_{what}{unit}" for what in ("mean", "p50", "p99")]
    if not len(values):
        return dict.fromkeys(keys)
    return dict(zip(keys, (float(values.mean()), *map(float, np.quantile(values, [0.5, 0.99]))), strict=True))


def bursts(plan: FlowTable, windows: Windows, wire: Passed) -> tuple[dict[str, Any], pd.DataFrame]:
    """Compare the payload on the wire in each burst and each quiet part with the plan."""
    edges = windows.edges_ns
    planned, passed = plan.planned_bytes(edges), wire.between(edges)
    error = np.divide(passed - planned, planned, out=np.full(len(planned), np.nan), where=planned > 0)
    table = pd.DataFrame(
        {
            "part": np.where(windows.burst, "burst", "quiet"),
            "start_s": edges[:-1] / 1e9,
            "end_s": edges[1:] / 1e9,
            "planned_bytes": planned,
            "wire_bytes": passed,
            "relative_error": error,
        }
    )
    return {part: _window_errors(error[windows.burst == (part == "burst")]) for part in ("burst", "quiet")}, table


def clock_offset_us(sent: SenderLogs, wire: Passed) -> float | None:
    """Return the median time in µs from a flow's logged first byte to the captured packet nearest in time."""
    first = sent.first_byte_ns[sent.moved]
    if wire.source != "capture" or not len(first):
        return None
    index = np.searchsorted(wire.at_ns, first)
    before = wire.at_ns[np.maximum(index - 1, 0)] - first
    after = wire.at_ns[np.minimum(index, len(wire.at_ns) - 1)] - first
    return float(np.median(np.where(np.abs(before) < np.abs(after), before, after))) / 1e3


def _window_errors(error: Numbers) -> dict[str, Any]:
    error = error[~np.isnan(error)]
    if not len(error):
        return {"windows": 0}
    size = np.abs(error)
    median, p95 = map(float, np.quantile(size, [0.5, 0.95]))
    return {
        "windows": len(error),
        "error_median": median,
        "error_p95": p95,
        "error_worst": float(size.max()),
        "signed_median": float(np.median(error)),
        "share_within_5_percent": float((size <= NEAR_SHARE).mean()),
    }


SUMMARY = "verify.json"
_OFFSET_US = 100


@dataclass
class Verified:
    """Results of a comparison.

    Attributes:
        data: every number, as in verify.json.
        tables: further tables by name.
        deviations: deviations from the plan, as sentences; empty if there are none.
        plan: the plan.
        windows: its bursts, if any.
        passed: payload delivered, according to the capture, else the interface, else the log.
        compared: label, payload delivered and duration in ns of the second transmission, if any.
    """

    data: dict[str, Any]
    tables: dict[str, pd.DataFrame]
    deviations: list[str]
    plan: FlowTable
    windows: Windows | None
    passed: Passed
    compared: tuple[str, Passed, int] | None


def verify(
    plan_file: Path,
    logs: Sequence[Path],
    capture: Path | None = None,
    nic: tuple[Path, str] | None = None,
    baseline_log: Path | None = None,
    compare: Path | None = None,
    capacity_bps: float | None = None,
) -> Verified:
    """Compare a flow plan with what was sent.

    Args:
        plan_file: the flow plan.
        logs: logs of its senders.
        capture: capture of the link, with the clock of the sender's host.
        nic: interface counters of the sender's host, and the interface.
        baseline_log: log of the same flows without congestion.
        compare: second capture or log for the histogram.
        capacity_bps: capacity of the link, for slowdowns.

    Raises:
        UsageError: a file cannot be read or has the wrong content.
    """
    written, sent = read_plan(plan_file), read_sent(logs)
    plan = written
    if plan.kind == "workload":  # the duration is only a limit: a replay ends with its last message
        plan = replace(written, header=written.header | {"duration_ns": max(1, min(sent.last_ns, written.duration_ns))})
    if plan.duration_ns > _MAX_DURATION_NS:
        raise UsageError(
            f"{plan_file} lasts {format_duration(plan.duration_ns / 1e9)}: plans of a week at most are compared, in "
            "bins of 100 ms; cut it into shorter plans"
        )
    baseline = None if baseline_log is None else read_sent([baseline_log])
    log, windows = from_log(sent), burst_windows(plan)
    wire = None
    if nic is not None:
        if sent.origin_monotonic_ns is None:
            raise UsageError(f"{logs[0]} lacks origin_monotonic_ns, the launch by the clock of counters: send anew")
        wire = from_nic(*nic, plan.destinations, sent.origin_monotonic_ns, compared_ns(plan, sent))
    if capture is not None:
        headers = sent.first_byte_ns[sent.moved]
        wire = from_capture(capture, plan.destinations, plan.sources, sent.origin_ns, headers)
    data, deviations = tally(plan, sent)
    data["load"], bins = load(plan, sent, log, wire)
    data["lateness"] = lateness(sent)
    classes = completion(sent, capacity_bps, baseline)
    data["completion"] = _rows(classes)
    tables = {"load": bins, "completion": classes}
    if windows is not None and wire is not None and wire.source == "capture":
        data["bursts"], tables["windows"] = bursts(plan, windows, wire)
    offset_us = None if wire is None else clock_offset_us(sent, wire)
    head: dict[str, Any] = {"plan": str(plan.path), "kind": plan.kind, "sent": [str(path) for path in sent.paths]}
    head |= {"origin_ns": sent.origin_ns, "origin_spread_ns": sent.origin_spread_ns}
    head |= {"clock_offset_us": offset_us}
    head |= {
        "as_planned": not deviations,
        "deviations": deviations,
        "notes": _notes(written, sent, baseline, wire, offset_us) + _slowdown_notes(sent, capacity_bps),
    }
    compared = None if compare is None else _compared(compare, plan)
    return Verified(head | data, tables, deviations, plan, windows, wire or log, compared)


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {name: None if pd.isna(value) else value for name, value in row.items()}
        for row in json.loads(table.to_json(orient="records", double_precision=15))
    ]


def _notes(
    plan: FlowTable, sent: SenderLogs, baseline: SenderLogs | None, wire: Passed | None, offset_us: float | None
) -> list[str]:
    notes = list(wire.notes) if wire is not None else []
    if offset_us is not None and abs(offset_us) > _OFFSET_US:
        notes.append(
            f"the packets nearest to the flows' first bytes are {offset_us:+.0f} µs off: the clocks of log and capture "
            "differ, or the link was busy; bursts are compared by these clocks"
        )
    if any(about.get("plan") != plan.header for about in sent.about):
        notes.append(f"the header of {plan.path} is not the one that the sender logged")
    if baseline is not None and any(about.get("plan") != plan.header for about in baseline.about):
        notes.append("the baseline is of another plan, so the impact factors contain the difference of the plans")
    if sent.torn:
        notes.append(f"{sent.torn} torn last records were dropped: the sender was killed")
    if (plan.size_bytes == 0).any():
        notes.append("open-ended flows count in the achieved load, but not in the offered load")
    return notes


def _slowdown_notes(sent: SenderLogs, capacity_bps: float | None) -> list[str]:
    unknown, done = int((sent.min_rtt_us[sent.completed] == 0).sum()), int(sent.completed.sum())
    if not capacity_bps or not unknown:
        return []
    which = f"{unknown} of {counted(done, 'finished flow')}"
    return [f"the smallest round-trip time of {which} is not in the log, so that slowdowns are without them"]


def _compared(path: Path, plan: FlowTable) -> tuple[str, Passed, int]:
    """Return label, payload delivered and duration of the second transmission in the histogram."""
    with file_errors(path), path.open("rb") as file:
        is_log = RECORDS.encode() in file.read(64)
    if is_log:
        sent = read_sent([path])
        header = sent.about[0].get("plan") or {}
        duration = int(header.get("duration_ns") or sent.last_ns)
        return f"{header.get('kind', 'flows')} ({path.name})", from_log(sent), duration
    passed = from_capture(path, plan.destinations, plan.sources, 0, np.empty(0, np.int64))
    shifted = replace(passed, at_ns=passed.at_ns - passed.at_ns[0])
    return path.name, shifted, int(shifted.at_ns[-1])


def figures(found: Verified) -> list[Drawn]:
    """Draw figures B-4, B-5 and 3-8 of a comparison."""
    plan, passed = found.plan, found.passed
    window = window_ns(plan, found.windows, passed)
    span = shown_span_ns(plan, found.windows, window)
    samples: list[InjectionRates] = [instantaneous(f"{plan.kind} ({plan.path.name})", passed, plan.duration_ns, window)]
    if found.compared is not None:
        label, other, duration = found.compared
        samples.append(instantaneous(label, other, duration, window))
    drawn = [plan_figure(plan, found.windows, span), trace_figure(plan, found.windows, passed, span, window)]
    return [*drawn, rates_figure(samples)]


def write(found: Verified, folder: Path, force: bool) -> list[Path]:
    """Write verify.json, tables, figures and their captions into a folder; return the paths, verify.json first.

    Raises:
        UsageError: the folder holds a comparison already and ``force`` is not set, or it cannot be written.
    """
    if (folder / SUMMARY).exists() and not force:
        raise UsageError(f"{folder / SUMMARY} exists: name another folder or add --force")
    with file_errors(folder, "cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
            return [path.replace(folder / path.name) for path in _write_all(found, Path(name))]


def _write_all(found: Verified, folder: Path) -> list[Path]:
    paths, captions = [folder / SUMMARY, folder / "summary.csv", folder / "figures.md"], {}
    for drawn in figures(found):
        captions[drawn.name] = drawn.caption
        paths += drawn.write(folder)
    for name, table in found.tables.items():
        paths.append(folder / f"{name}.csv")
        table.to_csv(paths[-1], index=False)
    data = found.data | {"figures": captions}
    paths[0].write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    pd.DataFrame(_flat("", found.data), columns=["number", "value"]).to_csv(paths[1], index=False)
    text = "\n".join(f"![{name}]({name}.svg)\n\n{caption}\n" for name, caption in captions.items())
    paths[2].write_text(text, encoding="utf-8")
    return paths


def _flat(name: str, item: object) -> list[tuple[str, object]]:
    """Return nested values as rows of a dotted name and a value."""
    if not isinstance(item, dict | list):
        return [(name, item)]
    inner = item.items() if isinstance(item, dict) else enumerate(item)
    return [row for key, value in inner for row in _flat(f"{name}.{key}" if name else str(key), value)]
