"""Writes a sweep's report: one HTML page that needs nothing else, figures, points.csv and report.json."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from ringtap.analysis import figures, points, report_data
from ringtap.analysis.runs import SweepRun, open_run
from ringtap.analysis.series import Series, analyse
from ringtap.analysis.style import title_of
from ringtap.errors import UsageError
from ringtap.units import format_rate

CAPTIONS = {
    "iteration-times": (
        "Mean iteration time against the cross traffic measured at the bottleneck while the iterations ran. Bars "
        "reach up to the 99th percentile; lines are the chosen fits of t = A·exp(B/(C−BW)ⁿ)."
    ),
    "rescaled": (
        "The same against C/(C−BW), 1 without cross traffic: with n = 1 the fit is a straight line, with n = 1/2 it "
        "bends down and with n = 2 up."
    ),
    "congestion-points": (
        "How each congestion point was found: a line through the flat region, the tangent to the first points of the "
        "curved region, their meeting, and the measured point whose load is nearest to it."
    ),
    "distributions": "Distribution of the single iteration times at a light and at a heavy load.",
    "traffic-kinds": (
        "The kinds of cross traffic side by side for each model, with the chosen fits and their R²; in grey the "
        "thesis's own fit where it gives one, over TCP where it gives both."
    ),
}


@dataclass(frozen=True)
class Written:
    """What `write_report` left behind.

    Attributes:
        summary: the outcome in a few lines.
        paths: the files, the page first.
        json_path: report.json.
    """

    summary: str
    paths: list[Path]
    json_path: Path


def write_report(directory: Path) -> Written:
    """Analyse a sweep and write ``report/`` in its directory; an older report is replaced file by file.

    Raises:
        UsageError: not a sweep, or one that cannot be read or written to.
    """
    sweep = open_run(directory)
    if not isinstance(sweep, SweepRun):
        raise UsageError(f"{directory} is the run of a single job; a report needs a sweep")
    series = analyse(sweep)
    data = report_data.collect(sweep, series)
    target = directory / "report"
    try:
        target.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=target) as name:
            written = _write_all(Path(name), data, series)
            return _published(Path(name), target, written, data)
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error


def _write_all(folder: Path, data: dict[str, Any], series: list[Series]) -> list[Path]:
    (folder / "figures").mkdir()
    setting = figures.Setting(data["scale"]["full_size_gbps"], data["scale"]["factor"])
    drawn = figures.draw(series, setting, folder / "figures")
    (folder / "report.html").write_text(_page(data, drawn), encoding="utf-8")
    table = points.table([point for one in series for point in one.points])
    table.to_csv(folder / "points.csv", index=False)
    (folder / "report.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    images = [path for paths in drawn.values() for path in paths]
    return [folder / "report.html", folder / "report.json", folder / "points.csv", *images]


def _published(folder: Path, target: Path, written: list[Path], data: dict[str, Any]) -> Written:
    """Rename the new files into place; figures that this report no longer has go."""
    (target / "figures").mkdir(exist_ok=True)
    paths = []
    for path in written:
        final = target / path.relative_to(folder)
        path.replace(final)
        paths.append(final)
    for name in CAPTIONS:
        for stale in (target / "figures").glob(f"{name}.*"):
            if stale not in paths:
                stale.unlink()
    shutil.rmtree(folder / "figures")
    status = data["run"]["status"]
    lines = [f"{data['run']['name']}: {status}" + (f", {data['run']['why']}" if data["run"]["why"] else "")]
    lines += data["headline"]
    failed = [item for item in data["checks"] if item["ok"] is False]
    lines += [f"  not as expected: {item['subject']}: {item['expected']}; {item['found']}" for item in failed]
    return Written("\n".join(lines), paths, target / "report.json")


def _page(data: dict[str, Any], drawn: dict[str, list[Path]]) -> str:
    images = []
    for name, paths in drawn.items():
        vector = next(path for path in paths if path.suffix == ".svg")
        source = base64.b64encode(vector.read_bytes()).decode()
        images.append({"name": name, "caption": CAPTIONS[name], "uri": f"data:image/svg+xml;base64,{source}"})
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"num": _number, "pct": _percent, "rate": _rate, "kind": title_of}
    return environment.get_template("report.html.j2").render(data=data, images={item["name"]: item for item in images})


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value * 100:.{digits}f} %"


def _rate(bps: float | None) -> str:
    return "–" if bps is None else format_rate(bps)
