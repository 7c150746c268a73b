"""The names of ``import ringtap``: what they are, what importing them costs, and what a type checker sees."""

import logging
import os
import pydoc
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import ringtap
from ringtap import cli
from ringtap.core.terminal_escaping import shown_log

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[3]
USER = """
import pandas as pd
import ringtap

job = ringtap.open_job("runs/job")
table: pd.DataFrame = ringtap.utc(job.rank_iterations)
slow: pd.DataFrame = job.slow(factor=1.5)
fit = ringtap.CongestionModel("25gbit").fit(table["iteration_s"], [1.0, 2.0])
band: pd.DataFrame = fit.band(table["iteration_s"], kind="point")
load: float = fit.load_for(1.5).load_gbps
differs: bool = fit.compare(ringtap.FitResult.from_json("fit.json")).differs
ringtap.plot.cdf(job, label="job")
ringtap.plot.fit(fit)
found = ringtap.find_curve_point([1, 2], [3, 4], 25)
if found.point is not None:
    low: float = found.point.low_gbps
for series in ringtap.open_sweep("runs/sweep"):
    name: str = series.name
run = ringtap.open_run("runs/sweep")
if isinstance(run, ringtap.Sweep):
    points: pd.DataFrame = run.points
packets = ringtap.read_captures("x.pcap", "tcp").packets(0, "2026-01-01")
frame: pd.DataFrame = packets.to_frame()
needed: float = ringtap.demand(10, 2).required_bps("370ms")
median: float = ringtap.compare([1.0], [2.0]).median_ratio.value
ringtap.step()
"""


def test_dir_lists_the_public_names_alone():
    assert dir(ringtap) == sorted(ringtap.__all__)
    for name in ringtap.__all__:
        assert getattr(ringtap, name) is getattr(ringtap, name)


def test_help_names_and_describes_everything_public():
    text = pydoc.plain(pydoc.render_doc(ringtap))
    assert all(name in text for name in ringtap.__all__ if name != "__version__")
    overview = ringtap.__doc__ or ""
    assert all(name in overview for name in ringtap.__all__ if not name.startswith("__") and name[0].islower())
    for name in ringtap.__all__:
        found = getattr(ringtap, name)
        assert isinstance(found, str) or found.__doc__


@pytest.mark.parametrize(("wrong", "right"), [("open_jobb", "open_job"), ("congestionmodel", "CongestionModel")])
def test_a_wrong_name_is_answered_with_the_nearest_one(wrong, right):
    with pytest.raises(AttributeError, match=f"did you mean '{right}'"):
        getattr(ringtap, wrong)


@pytest.mark.parametrize("code", [0, 2])
def test_a_command_called_from_a_program_leaves_its_log_and_warnings_as_they_were(code, tmp_path, capsys):
    log, filters = logging.getLogger("ringtap"), list(warnings.filters)
    before = list(log.handlers), log.level
    capture = ROOT / "examples" / "ring.pcap.gz" if code == 0 else tmp_path / "nope.pcap"
    assert cli.main(["flows", str(capture)]) == code
    assert (list(log.handlers), log.level) == before
    assert warnings.filters == filters
    log.warning("a message after the command")
    assert "a message after the command" not in capsys.readouterr().err


@pytest.mark.parametrize("has_own", [False, True])
def test_commands_print_the_log_unless_the_program_has_one(has_own, capsys):
    log, own = logging.getLogger("ringtap"), logging.NullHandler()
    if has_own:
        log.addHandler(own)
    try:
        with shown_log():
            log.info("one\nmessage")
    finally:
        log.removeHandler(own)
    assert capsys.readouterr().err.count("ringtap: one") == (0 if has_own else 1)


def test_an_import_takes_no_package_and_little_more_time_than_re():
    code = "import sys, ringtap; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "pandas", "psutil", "pyroute2", "asyncio", "logging"} & set(loaded)
    # re, which it imports, takes most of the time: 5 ms on most machines, 14 ms on a slow one
    assert min(_import_time() for _ in range(5)) < 1.6


def _import_time() -> float:
    """Return the time that Python says the import took with all that it imports, as a multiple of that of re."""
    command = [sys.executable, "-X", "importtime", "-c", "import ringtap"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
    times_us = {name.strip(): int(time_us) for _, time_us, name in (line.split("|") for line in lines[1:])}
    return times_us["ringtap"] / times_us["re"]


def test_code_of_a_user_is_clean_under_mypy_strict(tmp_path):
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "wrong.py").write_text(USER.replace("differs: bool", "differs: str"))
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "user.py", "wrong.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    (error, count) = done.stdout.splitlines()
    assert error.startswith("wrong.py:11"), "the names are typed, and not Any"
    assert count == "Found 1 error in 1 file (checked 2 source files)"


@pytest.mark.parametrize(
    ("command", "threads"),
    [("flows", "1"), ("workload show", "1"), ("traffic verify", "1"), ("run", None), ("traffic send", None)],
)
def test_blas_starts_threads_only_for_a_job_or_where_asked_for(monkeypatch, command, threads):
    name, found = "OPENBLAS_NUM_THREADS", []
    monkeypatch.setattr(cli, "build_parser", lambda *_: found.append(os.environ.get(name)) or cli.Parser())
    monkeypatch.delenv(name, raising=False)
    assert cli.main([*command.split(), "--nosuch"]) == 2
    assert name not in os.environ
    monkeypatch.setenv(name, "3")
    assert cli.main([*command.split(), "--nosuch"]) == 2
    assert found == [threads, "3"]
