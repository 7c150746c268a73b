"""Reads the inputs of a report: a sweep's run directory, or a table of iteration times."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ringtap.analysis.runs.run import SweepRun
from ringtap.analysis.sweeps.captured_flow_rates import CapturedPoint, captured_points
from ringtap.analysis.sweeps.compare_with_message_graphs import ExpectedOrder, expected_orders
from ringtap.analysis.sweeps.points import measure
from ringtap.analysis.sweeps.points_csv import read_table
from ringtap.analysis.sweeps.series_analysis import Series, analyze
from ringtap.core.errors import UsageError
from ringtap.core.json_validation import ShapeError, whole
from ringtap.core.run_directory import read_node, read_points
from ringtap.core.run_directory_schema import REJECTED_JSONL

_SETTINGS = ("net.ipv4.tcp_congestion_control", "net.ipv4.tcp_ecn", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem")
_LOOPBACK = "lo"
SAME_CAPACITY = 1e-3  # relative difference


def environment(sweep: SweepRun) -> dict[str, Any]:
    """Return facts about the machines as plain values; absent ones are left out or None.

    Returns:
        ``machines``: one item per node with ``node``, ``host``, ``kernel``, ``architecture``, ``python``,
        ``processors``, ``memory_bytes``, ``nics`` (``name``, ``speed_mbps``, ``mtu``, ``driver``, ``qdisc``,
        ``rate_bps``) and ``settings``; ``conductor``: the machine that ran the sweep; ``not_recorded``: collectors that
        failed, with the reason.
    """
    machines: dict[str, dict[str, Any]] = {}
    collectors: dict[tuple[str, str, str], set[str]] = {}
    for directory in dict.fromkeys(window["directory"] for window in sweep.windows):
        for path in sorted((sweep.path / directory / "nodes").glob("*/node.json")):
            item = _read(path)
            node, facts = whole(path.parent.name), item.get("before") or item.get("after") or {}
            if facts and node not in machines:
                machines[node] = {"node": node, **_machine(facts)}
            for name, status in (item.get("collectors") or {}).items():
                state, reason = status.get("state", "?"), str(status.get("reason", ""))
                if state != "ok":
                    collectors.setdefault((str(name), state, reason), set()).add(node)
    host = (sweep.info.get("calibration") or {}).get("host") or {}
    return {
        "machines": [machines[node] for node in sorted(machines)],
        "conductor": {key: host.get(key) for key in ("name", "kernel", "python", "processors")} if host else None,
        "not_recorded": [
            {"what": f"{name} on {', '.join(sorted(nodes))}", "why": reason or state}
            for (name, state, reason), nodes in collectors.items()
        ],
    }


def _machine(facts: dict[str, Any]) -> dict[str, Any]:
    links, sysctls = facts.get("links") or {}, facts.get("sysctls") or {}
    nics = [
        {
            "name": str(name),
            "speed_mbps": nic.get("speed") or None,
            "mtu": nic.get("mtu"),
            "driver": nic.get("driver"),
            "qdisc": links.get(name, {}).get("qdisc"),
            "rate_bps": links.get(name, {}).get("rate_bps"),
        }
        for name, nic in sorted((facts.get("nics") or {}).items())
        if name != _LOOPBACK
    ]
    return {
        "host": facts.get("host"),
        "kernel": facts.get("kernel"),
        "architecture": facts.get("machine"),
        "python": facts.get("python"),
        "processors": facts.get("cpus"),
        "memory_bytes": facts.get("memory_bytes"),
        "nics": nics,
        "settings": {name: " ".join(str(sysctls[name]).split()) for name in _SETTINGS if sysctls.get(name) is not None},
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_node(path)
    except (OSError, ShapeError):
        return {}  # docs/reference/run-directory.md: a node that was killed may leave a partial file


@dataclass(frozen=True)
class ReportInputs:
    """Series of measurements and the facts of their measurement.

    Attributes:
        name: name of the measurements.
        source: the directory's or the file's name.
        folder: default folder of the report.
        series: the series.
        capacity_gbps: full-size capacity of the bottleneck.
        scale: full-size rate over the rate of the testbed.
        info: run.json; empty for a table.
        plan: the resolved plan, or the part of one that a table gives.
        environment: result of `environment`.
        not_collected: list of ``{what, why}``.
        torn: torn last records dropped, by file.
        rejected: windows that were measured again.
        captured: points at which packets were recorded.
        beside: sources of further series, of which the other facts do not hold.
        orders: series of each model beside their message graphs.
    """

    name: str
    source: str
    folder: Path
    series: list[Series]
    capacity_gbps: float
    scale: float
    info: dict[str, Any]
    plan: dict[str, Any]
    environment: dict[str, Any]
    not_collected: list[dict[str, str]] = field(default_factory=list)
    torn: dict[str, int] = field(default_factory=dict)
    rejected: int = 0
    captured: list[CapturedPoint] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)
    orders: list[ExpectedOrder] = field(default_factory=list)


def of_sweep(sweep: SweepRun, workers: Executor | None = None, max_load: float | str | None = None) -> ReportInputs:
    """Measure the points of a sweep and analyze them; ``workers`` read its jobs, fits use points up to ``max_load``.

    Raises:
        UsageError: the sweep is not readable.
    """
    points, plan, name = measure(sweep, workers), sweep.plan, sweep.path.resolve().name
    facts, series = environment(sweep), analyze(sweep, points, max_load)
    return ReportInputs(
        name=str(plan.get("name") or name),
        source=name,
        folder=sweep.path / "report",
        series=series,
        capacity_gbps=float(plan["capacity_bps"]) * float(plan["scale"]) / 1e9,
        scale=float(plan["scale"]),
        info=sweep.info,
        plan=plan,
        environment=facts,
        not_collected=[*(sweep.info.get("not_collected") or []), *facts["not_recorded"]],
        torn=sweep.torn,
        rejected=len(read_points(sweep.path / REJECTED_JSONL)[0]),
        captured=captured_points(sweep, points),
        orders=expected_orders(sweep, series),
    )


def of_table(
    path: Path, capacity: float | str | None, workers: int | None, max_load: float | str | None = None
) -> ReportInputs:
    """Read a table of iteration times and analyze it; fits use points up to ``max_load``.

    Raises:
        UsageError: as in `ringtap.analysis.sweeps.points_csv.read_table`.
    """
    table = read_table(path, capacity, workers, max_load)
    models = {
        one.model: {"name": one.model, "title": one.title, "parameters": one.demand.parameters} for one in table.series
    }
    kinds = list(dict.fromkeys(one.traffic for one in table.series))
    absent = [
        {"what": "machines, links and counters", "why": f"{path.name} is a table of iteration times and loads only"}
    ]
    if any(point.samples_per_s is None for one in table.series for point in one.points):
        absent.append({"what": "samples/s", "why": f"{path.name} does not give every series a batch"})
    if not table.by_iteration:
        absent.append(
            {"what": "single iteration times", "why": f"a row of {path.name} is a point: no distributions or intervals"}
        )
    if table.ignored:
        absent.append({"what": f"columns {', '.join(table.ignored)}", "why": "the report does not use them"})
    return ReportInputs(
        name=path.stem,
        source=path.name,
        folder=Path(f"{path.stem}-report"),
        series=table.series,
        capacity_gbps=table.capacity_gbps,
        scale=1.0,
        info={"status": "complete", "rows": table.rows, "by_iteration": table.by_iteration},
        plan={"models": list(models.values()), "traffic": kinds, "topology": {}},
        environment={"machines": [], "conductor": None, "not_recorded": []},
        not_collected=absent,
    )


def together(inputs: Sequence[ReportInputs]) -> ReportInputs:
    """Put series of several sources side by side; all other facts are those of the first one.

    Raises:
        UsageError: capacities differ, or two sources have a series of the same name.
    """
    first, *others = inputs
    named: dict[str, str] = {}
    for each in inputs:
        if abs(each.capacity_gbps / first.capacity_gbps - 1) > SAME_CAPACITY:
            raise UsageError(
                f"{first.source} has a capacity of {first.capacity_gbps:.6g} Gbit/s and {each.source} one of "
                f"{each.capacity_gbps:.6g}: only runs of the same capacity go side by side"
            )
        for series in each.series:
            if series.name in named:
                raise UsageError(
                    f"{named[series.name]} and {each.source} both have the series {series.name}: leave one out"
                )
            named[series.name] = each.source
    models = {str(model["name"]): model for each in inputs for model in each.plan["models"]}
    kinds = list(dict.fromkeys(kind for each in inputs for kind in each.plan.get("traffic") or []))
    return replace(
        first,
        name=" and ".join(each.name for each in inputs),
        source=", ".join(each.source for each in inputs),
        folder=Path(f"{'-and-'.join(Path(each.source).stem for each in inputs)}-report"),
        series=[series for each in inputs for series in each.series],
        plan=first.plan | {"models": list(models.values()), "traffic": kinds},
        not_collected=[
            {"what": f"{item.get('what', '?')}, of {each.source}", "why": item.get("why", "")}
            for each in inputs
            for item in each.not_collected
        ],
        torn={f"{each.source}/{name}": count for each in inputs for name, count in each.torn.items()},
        rejected=sum(each.rejected for each in inputs),
        captured=[point for each in inputs for point in each.captured],
        beside=[each.source for each in others],
        orders=[order for each in inputs for order in each.orders],
    )
