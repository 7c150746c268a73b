"""Report of one job: the output of `ringtap analyze` with figures, as one self-contained HTML page."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from ringtap.analysis.job.run import Job
from ringtap.analysis.job.text import describe
from ringtap.analysis.plots.job import NAMES, draw_job
from ringtap.analysis.plots.style import plain
from ringtap.analysis.report.page import Written, publish, render
from ringtap.analysis.runs.intervals import plain as plain_value
from ringtap.errors import UsageError
from ringtap.json_validation import whole

_TABLE = "iterations.csv"
_MOST_FLOWS = 25
_FLOW_COLUMNS = (
    *("class", "from_node", "from_rank", "to_node", "to_rank"),
    *("payload_bytes", "bytes_per_iteration", "retransmissions", "rtt_us", "busy_s"),
)


def write_job_report(job: Job, summary: dict[str, Any], folder: Path | None = None) -> Written:
    """Write the report of a job into a folder; an older report there is replaced file by file.

    Args:
        job: the run.
        summary: result of `ringtap.analysis.job.summary.summarize`.
        folder: made if missing; without it ``report/`` in the run directory.

    Raises:
        UsageError: the folder cannot be written to.
    """
    folder = folder or job.path / "report"
    lines = describe(summary)
    sections = _sections(lines)
    headline = [one["text"] for one in sections if one["title"] in ("", "Time", "Slowest rank")]
    data = summary | {
        "headline": headline,
        "sections": sections,
        "flows": _flows(job),
        "job_name": whole(job.path.name),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as name:
            new = Path(name)
            (new / "figures").mkdir()
            drawn = draw_job(job, new / "figures")
            job.iterations.to_csv(new / _TABLE, index=False)
            (new / "report.json").write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            page = render("job.html.j2", data, drawn, new, _TABLE)
            (new / "report.html").write_text(page, encoding="utf-8", errors="replace")
            paths = publish(new, folder, _TABLE, NAMES)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error
    said = "\n".join(plain(line) for text in headline for line in text.splitlines())
    return Written(said, paths, folder / "report.json")


def _sections(lines: list[str]) -> list[dict[str, str]]:
    """Split the text of `describe` at its headings; lines before the first get an empty title."""
    sections: list[dict[str, Any]] = [{"title": "", "lines": []}]
    for before, line in zip(["", *lines], lines, strict=False):
        if line and not line.startswith(" ") and before == "" and sections[-1]["lines"]:
            sections.append({"title": line, "lines": []})
        elif line or sections[-1]["lines"]:
            sections[-1]["lines"].append(line.removeprefix("  "))
    return [{"title": one["title"], "text": "\n".join(one["lines"]).rstrip()} for one in sections]


def _flows(job: Job) -> dict[str, Any]:
    table = job.flows
    rows = [
        {name: plain_value(value) for name, value in zip(_FLOW_COLUMNS, row, strict=True)}
        for row in table.loc[: _MOST_FLOWS - 1, list(_FLOW_COLUMNS)].itertuples(index=False, name=None)
    ]
    return {"count": len(table), "rows": rows}
