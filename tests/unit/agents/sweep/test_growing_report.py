"""The report of a sweep that runs: a process of its own, one at a time, whose failure is a warning."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import ringtap
from ringtap.agents.sweep.growing_report import GrowingReport
from ringtap.core.errors import UsageError
from tests.gold.analysis_sweep import edit_info, write_sweep

pytestmark = pytest.mark.shares

Reporters = Callable[[], list[psutil.Process]]


def write_running(path: Path) -> list[str]:
    """Write a sweep of three points that says it is running, and return the lines of its points."""
    write_sweep(path, [("resnet50", "consistent")], loads_gbps=(0.0, 7.5, 12.5))
    edit_info(path, status="running", report=True)
    return (path / "points.jsonl").read_text().splitlines(keepends=True)


@pytest.fixture
def reporters() -> Reporters:
    """The processes that were started since the test began, and run."""
    others = set(psutil.Process().children())
    return lambda: [one for one in psutil.Process().children() if one not in others and one.status() != "zombie"]


def wait_for(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 120  # the report is written with the time that nothing else wants
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.mark.alone(2)
def test_the_page_grows_whole_and_the_latest_points_win(tmp_path: Path, reporters: Reporters) -> None:
    run, said = tmp_path / "a run", list[str]()
    lines = write_running(run)
    (run / "points.jsonl").write_text("")
    page, seen = run / "report" / "report.html", list[str]()
    with GrowingReport(run, said.append) as report:
        (first,) = reporters()
        assert os.sched_getscheduler(first.pid) == os.SCHED_IDLE
        first.suspend()
        for count in range(1, 4):  # while the page without points is written
            (run / "points.jsonl").write_text("".join(lines[:count]))
            report.poll(True)
        assert reporters() == [first]
        first.resume()

        def has_all() -> bool:
            report.poll(False)
            assert len(reporters()) <= 1
            text = page.read_text() if page.exists() else ""
            if text and text not in seen:
                seen.append(text)
            return "3 points so far" in text

        wait_for(has_all)
        assert not [text for text in seen if not text.rstrip().endswith("</html>")], "no reader sees half a page"
        assert len(seen) <= 2, "those of 1 and 2 points were never asked for"
        assert "location.reload()" in seen[-1]
        edit_info(run, status="complete")
    assert said == [f"report: {page}, grows with each point"]
    assert "location.reload()" not in page.read_text()
    assert json.loads((run / "report" / "report.json").read_text())["run"]["status"] == "complete"
    assert not list((run / "report").glob(".new-*"))


def test_a_report_that_is_killed_is_one_warning_and_the_next_is_written(tmp_path: Path, reporters: Reporters) -> None:
    run, said = tmp_path / "run", list[str]()
    write_running(run)
    with GrowingReport(run, said.append) as report:
        for _ in range(2):
            reporters()[0].send_signal(signal.SIGKILL)
            wait_for(lambda: not reporters())
            report.poll(True)
        assert reporters()
        assert len(said) == 2
        assert said[1] == (
            f"warning: the report could not be written: exit code -9; to write it at the end: ringtap report {run}"
        )
    assert (run / "report" / "report.html").exists()
    assert len(said) == 2


def test_a_report_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    run, said = tmp_path / "run", list[str]()
    write_running(run)
    (run / "report").write_text("in the way")
    with GrowingReport(run, said.append):
        pass
    assert len(said) == 2
    assert f"{run / 'report'} cannot be written: " in said[1]


def test_without_its_packages_nothing_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=r"needs matplotlib, not installed here: .*pip install .*report"):
        ringtap.run_sweep(output=tmp_path / "out", report=True, loads=[0], models=["resnet50"], traffic=["consistent"])
    with pytest.raises(UsageError, match="report is 'yes', not of type bool"):
        ringtap.run_sweep(output=tmp_path / "out", report="yes", loads=[0], models=["resnet50"], traffic=["burst"])  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
