"""What a report is made from: a sweep's run directory, or a table of iteration times."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtap.analysis.report.environment import environment
from ringtap.analysis.report.sweep_csv import read_table
from ringtap.analysis.runs import SweepRun
from ringtap.analysis.series import Series, analyse
from ringtap.analysis.workers import ALONE, Workers
from ringtap.rundir import read_points


@dataclass(frozen=True)
class Measured:
    """Series of measurements and what is known of how they were made.

    Attributes:
        name: what to call them.
        source: the directory's or the file's name.
        folder: where a report goes when nothing else is said.
        series: the series.
        capacity_gbps: full-size capacity of the bottleneck.
        scale: full-size rate over the rate of the testbed.
        info: run.json; empty for a table.
        plan: the plan as resolved, or what of one a table tells.
        environment: as `ringtap.analysis.report.environment.environment`.
        not_collected: list of ``{what, why}``.
        torn: torn last records dropped, by file.
        rejected: windows that were measured again.
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


def of_sweep(sweep: SweepRun, workers: Workers = ALONE) -> Measured:
    """Measure the points of a sweep and analyse them; ``workers`` read its jobs.

    Raises:
        UsageError: one that cannot be read.
    """
    series, plan, name = analyse(sweep, workers), sweep.plan, sweep.path.resolve().name
    around = environment(sweep)
    return Measured(
        name=str(plan.get("name") or name),
        source=name,
        folder=sweep.path / "report",
        series=series,
        capacity_gbps=float(plan["capacity_bps"]) * float(plan["scale"]) / 1e9,
        scale=float(plan["scale"]),
        info=sweep.info,
        plan=plan,
        environment=around,
        not_collected=[*(sweep.info.get("not_collected") or []), *around["not_recorded"]],
        torn=sweep.torn,
        rejected=len(read_points(sweep.path / "rejected.jsonl")[0]),
    )


def of_table(path: Path, capacity_gbps: float, workers: int | None) -> Measured:
    """Read a table of iteration times and analyse it.

    Raises:
        UsageError: as `ringtap.analysis.report.sweep_csv.read_table`.
    """
    table = read_table(path, capacity_gbps, workers)
    models = {
        one.model: {"name": one.model, "title": one.title, "parameters": one.demand.parameters} for one in table.series
    }
    kinds = list(dict.fromkeys(one.traffic for one in table.series))
    absent = [
        {"what": "machines, links and counters", "why": f"{path.name} is a table of iteration times and loads alone"}
    ]
    if not table.by_iteration:
        absent.append(
            {"what": "single iteration times", "why": f"a row of {path.name} is a point: no distributions or intervals"}
        )
    if table.ignored:
        absent.append({"what": f"columns {', '.join(table.ignored)}", "why": "they say nothing to this report"})
    return Measured(
        name=path.stem,
        source=path.name,
        folder=Path(f"{path.stem}-report"),
        series=table.series,
        capacity_gbps=capacity_gbps,
        scale=1.0,
        info={"status": "complete", "rows": table.rows, "by_iteration": table.by_iteration},
        plan={"models": list(models.values()), "traffic": kinds, "topology": {}},
        environment={"machines": [], "conductor": None, "not_recorded": []},
        not_collected=absent,
    )
