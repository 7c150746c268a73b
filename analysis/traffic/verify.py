"""A flow plan against what was sent and against what crossed the link (docs/traffic-verify.md)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ringtap.analysis.canvas import Drawn
from ringtap.analysis.traffic import measures
from ringtap.analysis.traffic.figures import plan_figure, rates_figure, trace_figure
from ringtap.analysis.traffic.log import Sent, read_sent
from ringtap.analysis.traffic.plan import Plan, Windows, burst_windows, read_plan
from ringtap.analysis.traffic.rates import Rates, instantaneous, shown_span_ns, window_ns
from ringtap.analysis.traffic.wire import Passed, from_capture, from_log, from_nic
from ringtap.errors import UsageError
from ringtap.records import FORMAT as RECORDS

SUMMARY = "verify.json"
_OFFSET_US = 100


@dataclass(frozen=True)
class Asked:
    """What to compare.

    Attributes:
        plan: the flow plan.
        sent: the logs of its senders.
        capture: capture of the link, with the sender's host's clock.
        nic: interface counters of the sender's host, and the interface.
        baseline: the log of the same flows without congestion.
        compare: a second capture or log for the histogram.
        line_rate_bps: rate of the empty link, for slowdowns.
    """

    plan: Path
    sent: Sequence[Path]
    capture: Path | None = None
    nic: tuple[Path, str] | None = None
    baseline: Path | None = None
    compare: Path | None = None
    line_rate_bps: float | None = None


@dataclass
class Verified:
    """The comparison.

    Attributes:
        data: every number, as verify.json has them.
        tables: further tables by name.
        deviations: how what was sent deviates from the plan; empty where it does not.
        plan: the plan.
        windows: its bursts, if any.
        passed: what went by: of the capture, else of the interface, else by the log.
        compared: the same of the second transmission, and its label.
    """

    data: dict[str, Any]
    tables: dict[str, pd.DataFrame]
    deviations: list[str]
    plan: Plan
    windows: Windows | None
    passed: Passed
    compared: tuple[str, Passed, int] | None


def verify(asked: Asked) -> Verified:
    """Compare a plan with what was sent.

    Raises:
        UsageError: a file cannot be read or is not what it should be.
    """
    plan, sent = read_plan(asked.plan), read_sent(asked.sent)
    baseline = None if asked.baseline is None else read_sent([asked.baseline])
    log, windows = from_log(sent), burst_windows(plan)
    wire = _wire(asked, plan, sent)
    data, deviations = measures.tally(plan, sent)
    data["load"], bins = measures.load(plan, sent, log, wire)
    data["lateness"] = measures.lateness(sent)
    classes = measures.completion(sent, asked.line_rate_bps, baseline)
    data["completion"] = _rows(classes)
    tables = {"load": bins, "completion": classes}
    if windows is not None and wire is not None and wire.source == "capture":
        data["bursts"], tables["windows"] = measures.bursts(plan, windows, wire)
    offset_us = None if wire is None else measures.clock_offset_us(sent, wire)
    head: dict[str, Any] = {"plan": str(plan.path), "kind": plan.kind, "sent": [str(path) for path in sent.paths]}
    head |= {"origin_ns": sent.origin_ns, "origin_spread_ns": sent.origin_spread_ns}
    head |= {"clock_offset_us": offset_us}
    head |= {
        "as_planned": not deviations,
        "deviations": deviations,
        "notes": _notes(plan, sent, baseline, wire, offset_us),
    }
    compared = None if asked.compare is None else _compared(asked.compare, plan)
    return Verified(head | data, tables, deviations, plan, windows, wire or log, compared)


def _rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [
        {name: None if pd.isna(value) else value for name, value in row.items()}
        for row in json.loads(table.to_json(orient="records", double_precision=15))
    ]


def _wire(asked: Asked, plan: Plan, sent: Sent) -> Passed | None:
    if asked.capture is not None:
        headers = sent.first_byte_ns[sent.moved]
        return from_capture(asked.capture, plan.destinations, plan.sources, sent.origin_ns, headers)
    if asked.nic is not None:
        return from_nic(*asked.nic, sent.origin_ns, plan.duration_ns)
    return None


def _notes(plan: Plan, sent: Sent, baseline: Sent | None, wire: Passed | None, offset_us: float | None) -> list[str]:
    notes = list(wire.notes) if wire is not None else []
    if offset_us is not None and abs(offset_us) > _OFFSET_US:
        notes.append(
            f"the packets nearest to the flows' first bytes are {offset_us:+.0f} µs off: the clocks of log and capture "
            "differ, or the link was busy; bursts are compared as the clocks say"
        )
    if any(about.get("plan") != plan.header for about in sent.about):
        notes.append(f"the header of {plan.path} is not the one that the sender logged")
    if baseline is not None and any(about.get("plan") != plan.header for about in baseline.about):
        notes.append("the baseline is of another plan: its factor also holds the difference of the plans")
    if sent.torn:
        notes.append(f"{sent.torn} torn last records were dropped: the sender was killed")
    if (plan.size_bytes == 0).any():
        notes.append("open-ended flows count in what was achieved, not in what was offered")
    return notes


def _compared(path: Path, plan: Plan) -> tuple[str, Passed, int]:
    """The second transmission of the histogram: its label, what went by, and how long it lasted."""
    try:
        with path.open("rb") as file:
            is_log = RECORDS.encode() in file.read(64)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if is_log:
        sent = read_sent([path])
        header = sent.about[0].get("plan") or {}
        duration = int(header.get("duration_ns") or sent.last_ns)
        return f"{header.get('kind', 'flows')} ({path.name})", from_log(sent), duration
    passed = from_capture(path, plan.destinations, plan.sources, 0, np.empty(0, np.int64))
    shifted = replace(passed, at_ns=passed.at_ns - passed.at_ns[0])
    return path.name, shifted, int(shifted.at_ns[-1])


def figures(found: Verified) -> list[Drawn]:
    """Figures B-4, B-5 and 3-8 of a comparison."""
    plan, passed = found.plan, found.passed
    window = window_ns(plan, found.windows, passed)
    span = shown_span_ns(plan, found.windows, window)
    samples: list[Rates] = [instantaneous(f"{plan.kind} ({plan.path.name})", passed, plan.duration_ns, window)]
    if found.compared is not None:
        label, other, duration = found.compared
        samples.append(instantaneous(label, other, duration, window))
    drawn = [plan_figure(plan, found.windows, span), trace_figure(plan, found.windows, passed, span, window)]
    return [*drawn, rates_figure(samples)]


def write(found: Verified, folder: Path, force: bool) -> list[Path]:
    """Write verify.json, tables, figures and their captions into a folder; returns the paths, verify.json first.

    Raises:
        UsageError: the folder holds a comparison already and ``force`` is not set, or it cannot be written.
    """
    if (folder / SUMMARY).exists() and not force:
        raise UsageError(f"{folder / SUMMARY} exists: name another folder or add --force")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
            return [path.replace(folder / path.name) for path in _write_all(found, Path(name))]
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error


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
    """Nested values as rows of a dotted name and a value."""
    if not isinstance(item, dict | list):
        return [(name, item)]
    inner = item.items() if isinstance(item, dict) else enumerate(item)
    return [row for key, value in inner for row in _flat(f"{name}.{key}" if name else str(key), value)]
