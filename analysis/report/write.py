"""Writer of a report: one self-contained HTML page, figures, points.csv and report.json."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ringtap.analysis.plots.congestion import congestion_points
from ringtap.analysis.plots.figure import Drawn, styled
from ringtap.analysis.plots.load import iteration_times, rescaled_times, traffic_kinds
from ringtap.analysis.plots.style import plain
from ringtap.analysis.plots.sweep_axes import Setting
from ringtap.analysis.plots.tails import distributions, spread_and_growth, transports
from ringtap.analysis.report import data as report_data
from ringtap.analysis.report.inputs import ReportInputs
from ringtap.analysis.report.page import Written, publish, render
from ringtap.analysis.report.tails import Tails, tails
from ringtap.analysis.sweeps import points
from ringtap.analysis.sweeps.series import Series
from ringtap.errors import UsageError

Maker = Callable[[Sequence[Series], Sequence[Tails], Setting], Drawn | None]
# file name -> maker of each figure, in the order of the report; figures that an earlier report alone had are removed
FIGURES: dict[str, Maker] = {
    "iteration-times": lambda series, _, setting: iteration_times(series, setting),
    "rescaled": lambda series, _, setting: rescaled_times(series, setting),
    "traffic-kinds": lambda series, _, setting: traffic_kinds(series, setting),
    "distributions": lambda series, _, setting: distributions(series, setting),
    "transports": lambda series, _, setting: transports(series, setting),
    "spread-and-growth": spread_and_growth,
    "congestion-points": lambda series, _, setting: congestion_points(series, setting),
}


def draw(series: Sequence[Series], found: Sequence[Tails], setting: Setting, folder: Path) -> list[Drawn]:
    """Draw every figure that the series allow, and write its files into a folder.

    Args:
        series: the series, all of one capacity.
        found: result of `ringtap.analysis.report.tails.tails` for each.
        setting: capacity and scale.
        folder: where PNG, SVG and CSV of each go.

    Returns:
        The figures drawn, in the order of `FIGURES`.
    """
    kept = [(one, tail) for one, tail in zip(series, found, strict=True) if one.used]
    usable, of_usable = [one for one, _ in kept], [tail for _, tail in kept]
    if not usable:
        return []
    with styled():
        drawn = [figure for maker in FIGURES.values() if (figure := maker(usable, of_usable, setting))]
        for figure in drawn:
            figure.write(folder)
    return drawn


_TABLE = "points.csv"


def write_report(measured: ReportInputs, folder: Path | None = None) -> Written:
    """Write the report of a sweep or of a table into a folder; an older report there is replaced file by file.

    Args:
        measured: result of `ringtap.analysis.report.inputs.of_sweep` or `of_table`.
        folder: made if missing; without it ``report/`` in the sweep, ``<table>-report`` here for a table.

    Raises:
        UsageError: the folder cannot be written to.
    """
    folder = folder or measured.folder
    found = [tails(one) for one in measured.series]
    data = report_data.collect(measured, found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
            new = Path(name)
            (new / "figures").mkdir()
            setting = Setting(measured.capacity_gbps, measured.scale)
            drawn = draw(measured.series, found, setting, new / "figures")
            table = points.table([point for one in measured.series for point in one.points])
            table.to_csv(new / _TABLE, index=False)
            text = json.dumps(data, indent=1, allow_nan=False) + "\n"
            (new / "report.json").write_text(text, encoding="utf-8")
            page = render("report.html.j2", data, drawn, new, _TABLE)
            (new / "report.html").write_text(page, encoding="utf-8", errors="replace")
            return Written(_summary(data), publish(new, folder, _TABLE, tuple(FIGURES)), folder / "report.json")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error


def _summary(data: dict[str, Any]) -> str:
    run = data["run"]
    lines = [data["answer"], f"{run['name']}: {run['status']}" + (f", {run['why']}" if run["why"] else "")]
    lines += [line for line in data["headline"] if line != data["answer"]]
    failed = [item for item in data["checks"] if item["ok"] is False]
    lines += [f"  not as expected: {item['subject']}: {item['expected']}; {item['found']}" for item in failed]
    return "\n".join(map(plain, lines))
