"""Runs and plans of other versions: those of 0.1 (tests/gold/v0.1/record.sh) are read, newer ones refused."""

import csv
import json
import re
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

import ringtap
from ringtap.cli import main
from ringtap.core.append_only_logs import VERSION as RECORDS
from ringtap.core.append_only_logs import Field, RecordWriter, open_records
from ringtap.core.errors import UsageError
from ringtap.core.flow_plan_file import PlanFile
from ringtap.core.flow_plan_format import VERSION as PLAN
from ringtap.core.flow_plan_table import read_plan
from ringtap.core.run_directory import SCHEMA, RunDirectory, write_json
from ringtap.slurm.submission_file_names import SubmitPaths

pytestmark = [pytest.mark.computes, pytest.mark.long]

GOLD = Path(__file__).resolve().parents[2] / "gold" / "v0.1"
PLANS = {
    "web-search": "--kind consistent --load 200mbit --duration 2s --to 10.0.0.1:5001 --to 10.0.0.2:5001 --seed 7",
    "incast": "--kind incast --load 50mbit --load-counts wire --duration 100ms --period 10ms --from 10.0.0.2 "
    "--from 10.0.0.3 --to 10.0.0.1:5001 --seed 7 --dscp 8 --congestion-control cubic",
    "ring": "--kind ring --duration 1s --node 10.0.0.1:5001 --node 10.0.0.2:5001 --node 10.0.0.3:5001 --bytes 1MB "
    "--iterations 4 --compute 20ms",
}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Folder with ``job`` and ``sweep`` as 0.1.0 recorded them, and ``expected`` with what it found there."""
    with tarfile.open(GOLD / "runs.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def summary(path: Path) -> dict[str, Any]:
    """A summary without the version and folder of the analysis."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found | {"ringtap": "", "run": found["run"] | {"directory": ""}}


def differences(found: Any, expected: Any, place: str = "") -> list[str]:
    """List the entries of the expected summary that are absent or different in the one that was found.

    Numbers may differ by 1e-5 or 1 us: they are timed by CLOCK_MONOTONIC now, which was read some microseconds after
    CLOCK_REALTIME.
    """
    if isinstance(found, dict) and isinstance(expected, dict):
        absent = [f"{place}.{name} is absent" for name in expected.keys() - found.keys()]
        known = [(found[name], expected[name], f"{place}.{name}") for name in expected.keys() & found.keys()]
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        absent, known = (
            [],
            [(*pair, f"{place}[{number}]") for number, pair in enumerate(zip(found, expected, strict=True))],
        )
    elif isinstance(expected, float) and isinstance(found, float):
        return [] if found == pytest.approx(expected, rel=1e-5, abs=1e-6) else [f"{place}: {found} and {expected}"]
    else:
        return [] if found == expected else [f"{place}: {found} and {expected}"]
    return absent + [words for each in known for words in differences(*each)]


def test_a_job_of_0_1_is_analyzed_with_the_numbers_of_0_1(recorded: Path) -> None:
    assert main(["analyze", str(recorded / "job")]) == 0
    now = summary(recorded / "job" / "derived" / "summary.json")
    then = summary(recorded / "expected" / "summary.json")
    # 0.1 cut the rest of each iteration at 0, so that the parts came to more than the whole
    assert now["phases"].pop("unattributed_s") < then["phases"].pop("unattributed_s")
    assert now["demand"].pop("why") == now["run"].pop("missing_ranks") == ""  # new
    for words in (now, then):
        del words["demand"]["equation"]  # worded anew
    assert now["bytes"].pop("captured_iterations") is None  # new; there are no packets
    then["byte_accounts"] = then.pop("wires")
    assert then["run"].pop("processes") == []  # training_phases says more
    (ras,) = [item for item in now["not_collected"] if item["what"] == "nccl-ras"]
    assert (ras["state"], ras["why"]) == ("absent", "not asked for")  # new
    now["not_collected"].remove(ras)
    assert differences(now, then) == []


def test_a_live_view_shows_a_job_of_0_1(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["live", str(recorded / "job"), "--plain"]) == 0
    assert "status=complete iteration=23 iteration_s=0.0940" in capsys.readouterr().out


def test_a_sweep_of_0_1_is_reported_with_the_numbers_of_0_1(recorded: Path) -> None:
    assert main(["report", str(recorded / "sweep")]) == 0
    paths = (recorded / "sweep" / "report" / "points.csv", recorded / "expected" / "points.csv")
    found, expected = (list(csv.DictReader(path.read_text().splitlines())) for path in paths)
    assert len(found) == len(expected) == 2
    for name in ("unscaled_cross_bps", "unscaled_total_bps", "iterations", "mean_s", "median_s", "p99_s", "std_s"):
        # all is by CLOCK_MONOTONIC now, which was read some microseconds after CLOCK_REALTIME
        now = [float(row[name]) for row in found]
        then = [float(row[name.removeprefix("unscaled_")]) for row in expected]
        assert now == pytest.approx(then, rel=1e-5, abs=1e-6), name
    assert (recorded / "sweep" / "report" / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_of_0_1_has_the_flows_that_its_options_give_now(name: str, tmp_path: Path) -> None:
    made = tmp_path / "made.plan"
    assert main(["traffic", "plan", *PLANS[name].split(), "-o", str(made)]) == 0
    old, new = PlanFile(GOLD / f"{name}.plan"), PlanFile(made)
    assert list(old.flows()) == list(new.flows())
    assert read_plan(old.path).start_ns.tolist() == [flow.start_ns for flow in new.flows()]


def refusal(what: object, found: int, newest: int) -> str:
    return (
        f"ringtap: {what} was written by ringtap 9.1.0 (format {found}); this is ringtap {ringtap.__version__}, which "
        f"reads formats up to {newest}: upgrade ringtap\n"
    )


@pytest.fixture
def newer_run(tmp_path: Path) -> Path:
    """A submitted sweep by ringtap 9.1.0, with a part."""
    run = RunDirectory.create(tmp_path / "run", "sweep", [], 1)
    newer = run.info | {"schema": SCHEMA + 1, "ringtap": "9.1.0", "kind": {"of": "another shape"}}
    paths = SubmitPaths(run.path)
    paths.folder.mkdir()
    write_json(paths.request, {"jobs": [], "tasks": []})
    write_json(run.path / "run.json", newer)
    return run.path


@pytest.mark.parametrize("verb", ["analyze", "report", "live --plain", "status", "merge", "record --join", "structure"])
def test_a_run_by_a_newer_version_is_refused_with_both_versions(
    verb: str, newer_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in newer_run.rglob("*") if path.is_file()}
    assert main([*verb.split(), str(newer_run)]) == 2
    assert capsys.readouterr().err == refusal(newer_run, SCHEMA + 1, SCHEMA)
    assert {path: path.read_bytes() for path in newer_run.rglob("*") if path.is_file()} == before


def test_nobody_waits_for_a_newer_run_to_become_readable(newer_run: Path) -> None:
    start_s = time.monotonic()
    with pytest.raises(UsageError, match=r"ringtap 9\.1\.0"):
        RunDirectory.wait_for(newer_run, 30)
    assert time.monotonic() - start_s < 10


@pytest.mark.parametrize("writer", [None, "", 7, ["9.1.0"]])
def test_a_newer_run_that_does_not_name_its_version_is_refused_too(writer: object, newer_run: Path) -> None:
    info = json.loads((newer_run / "run.json").read_text())
    write_json(newer_run / "run.json", info | {"ringtap": writer})
    with pytest.raises(UsageError, match=rf"was written by a newer ringtap \(format {SCHEMA + 1}\); this is ringtap "):
        RunDirectory.open(newer_run)


@pytest.mark.parametrize("verb", ["send", "verify"])
def test_a_plan_by_a_newer_version_is_refused_with_both_versions(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new.plan"
    assert main(["traffic", "plan", *PLANS["ring"].split(), "-o", str(path)]) == 0
    header, _, flows = path.read_text().partition("\n")
    about = json.loads(header)
    assert about["ringtap"] == ringtap.__version__
    path.write_text(json.dumps(about | {"version": PLAN + 1, "ringtap": "9.1.0"}) + "\n" + flows)
    capsys.readouterr()
    logs = ["--sent", str(tmp_path / "none.rec")] if verb == "verify" else []
    assert main(["traffic", verb, str(path), *logs]) == 2
    assert capsys.readouterr().err == refusal(path, PLAN + 1, PLAN)


def test_a_record_file_by_a_newer_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    RecordWriter(path, [Field("t_ns", "<i8", "ns", "time")], {}).close()
    line = path.read_text()
    path.write_text(
        line.replace(f'"version": {RECORDS}', f'"version": {RECORDS + 1}').replace(ringtap.__version__, "9.1.0")
    )
    with pytest.raises(UsageError, match=re.escape(refusal(path, RECORDS + 1, RECORDS)[9:-1])):
        open_records(path)
