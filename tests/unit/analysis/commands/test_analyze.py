import json
import os
import shutil
import subprocess
import sys

import pandas as pd
import pytest

from ringtap.analysis.job.run import open_job
from ringtap.analysis.job.summary import summarize
from ringtap.analysis.job.summary_text import describe
from ringtap.analysis.runs import derived_table_cache
from ringtap.cli import main
from ringtap.core.run_directory import RunDirectory, write_json
from tests.gold.job_run import MS, START_NS, Node, Truth, write_ddp_job

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]


@pytest.fixture
def run(tmp_path):
    write_ddp_job(tmp_path / "job", Truth(iterations=8))
    return tmp_path / "job"


def test_text_tables_and_json_say_the_same(run, capsys):
    assert main(["analyze", str(run)]) == 0
    text = capsys.readouterr().out
    assert "2 ranks on 2 nodes, 8 iterations in" in text
    assert f"Wrote {run / 'derived'}" in text
    assert main(["analyze", str(run), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["iterations_table"]) == 8
    assert {row["rank"] for row in data["ranks_table"]} == {0, 1}
    table = pd.read_parquet(run / "derived" / "iterations.parquet")
    job = open_job(run)
    pd.testing.assert_frame_equal(table, job.iterations)
    assert data["iterations_table"][3]["training_bytes"] == table["training_bytes"][3]
    for name in derived_table_cache.TABLES:
        assert len(pd.read_parquet(run / "derived" / f"{name}.parquet")) == len(getattr(job, name))


def text_of(path, capsys):
    assert main(["analyze", str(path)]) == 0
    return capsys.readouterr().out


def answer_of(path, capsys):
    text = text_of(path, capsys)
    return text[: text.index("\n\n")].splitlines()


def test_the_answer_comes_first(run, capsys):
    time, cannot = answer_of(run, capsys)
    assert cannot == (
        "Why an iteration takes this long cannot be told: 6 iterations after warm-up are too few to tell a cause from "
        "chance (20 are needed)."
    )
    shares = "57.5% compute, 17.5% exposed communication, 25.0% optimizer step, 0.0% not attributed"
    assert time == f"An iteration takes 200 ms (mean): {shares} (means over the ranks)."
    text = "\n".join(describe(summarize(open_job(run))))
    assert "Which rank is slowest is not known: 6 iterations of 2 ranks are too few" in text
    assert "Which link is slowest is not known: no socket log says how long training connections had data" in text
    data = summarize(open_job(run))
    parts = data["parts"]
    assert parts.pop("why") == ""
    assert parts.pop("iteration_s") == pytest.approx(data["iterations"]["mean_s"])
    assert sum(parts.values()) == pytest.approx(data["iterations"]["mean_s"])


@pytest.mark.parametrize("slow_ms", [40.0, 20.5])
def test_the_slowest_link_is_named_where_it_stands_out(tmp_path, capsys, slow_ms):
    truth = Truth(iterations=20, compute_ms=(100, 100, 130), offsets_ns=(0, 0, 0), busy_ms=(20.0, slow_ms, 20.0))
    write_ddp_job(tmp_path / "job", truth)
    text = text_of(tmp_path / "job", capsys)
    assert "  Rank 2 (node n2) is the slowest: " in text
    found = summarize(open_job(tmp_path / "job"))["links"]
    rates = {(row["source"], row["destination"]): row["rate_bps"] for row in found["rows"]}
    for start, end, busy_ms in (("n0", "n1", 20.0), ("n1", "n2", slow_ms), ("n2", "n0", 20.0)):
        assert rates[start, end] == pytest.approx(8 * truth.rank_bytes / (busy_ms / 1000), rel=0.01)
    assert found["rows"][found["slowest"]]["source"] == "n1"
    assert found["stands_out"] is (slow_ms == 40.0)
    link = "The slowest link is n1 → n2: " if slow_ms == 40.0 else "No link stands out: the slowest is n1 → n2"
    assert f"\n  {link}" in text


def test_a_link_is_not_faster_than_its_interface(tmp_path, capsys):
    """A queue that was idle lets some bytes pass at once: a rate above its limit is not that of the link."""
    truth = Truth(iterations=20, compute_ms=(100, 100, 100), offsets_ns=(0, 0, 0), busy_ms=(20.0, 80.0, 20.0))
    write_ddp_job(tmp_path / "job", truth)
    payload_bps = 600e6 * 1448 / 1514
    for rank in (0, 1):
        path = tmp_path / "job" / "nodes" / f"n{rank}" / "node.json"
        nic = {"mtu": 1500, "speed": 10_000, "driver": None, "addresses": [f"10.0.0.{rank + 1}"]}
        facts = {"nics": {"eth0": nic}, "links": {"eth0": {"qdisc": "tbf", "rate_bps": 600_000_000}}}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"before": facts}))
    text = text_of(tmp_path / "job", capsys)
    rows = {row["source"]: row for row in summarize(open_job(tmp_path / "job"))["links"]["rows"] if row["busy_s"]}
    assert rows["n0"]["rate_bps"] == rows["n0"]["capacity_bps"] == pytest.approx(payload_bps)
    slow_bps = 8 * truth.rank_bytes / 0.08
    assert rows["n1"]["rate_bps"] == pytest.approx(slow_bps, rel=0.01)
    assert rows["n2"]["capacity_bps"] is None
    assert rows["n2"]["rate_bps"] == pytest.approx(8 * truth.rank_bytes / 0.02, rel=0.01)
    (link,) = (line for line in text.splitlines() if line.startswith("  The slowest link is n1 → n2: "))
    assert f"({slow_bps / payload_bps:.0%} of what its interface can send)" in link


def test_a_rank_that_is_always_last_by_little_is_not_named_as_the_slowest(tmp_path, capsys):
    write_ddp_job(tmp_path / "job", Truth(iterations=30, compute_ms=(100, 103, 100), offsets_ns=(0, 0, 0)))
    answer = answer_of(tmp_path / "job", capsys)
    assert answer[0].startswith("No fault found: ")
    assert (
        "  No rank costs much: rank 1 (node n1) came last most often, in 28 of 28 iterations, by 3 ms (median); that "
        "is 1.5% of an iteration.\n"
    ) in text_of(tmp_path / "job", capsys)


def test_without_iterations_or_other_ranks_the_answer_says_so(tmp_path, capsys):
    write_ddp_job(tmp_path / "one", Truth(iterations=12, compute_ms=(100,), offsets_ns=(0,)), sockets=False)
    text = text_of(tmp_path / "one", capsys)
    assert "lowest rank" not in text
    assert "lowest link" not in text
    write_ddp_job(tmp_path / "none", Truth(iterations=3))
    for folder in (tmp_path / "none").glob("nodes/*/steps"):
        shutil.rmtree(folder)
    assert answer_of(tmp_path / "none", capsys) == [
        "Where the time goes is not known: no whole iteration was recorded."
    ]


def test_fresh_tables_are_read_and_stale_ones_made_again(run, capsys):
    main(["analyze", str(run)])
    first = (run / "derived" / "iterations.parquet").stat().st_mtime_ns
    capsys.readouterr()
    main(["analyze", str(run)])
    assert "Tables are in" in capsys.readouterr().out
    assert (run / "derived" / "iterations.parquet").stat().st_mtime_ns == first
    (run / "marks.jsonl").write_text(json.dumps({"t_ns": START_NS + 1050 * MS, "text": "here"}) + "\n")
    main(["analyze", str(run)])
    text = capsys.readouterr().out
    assert "Wrote" in text
    assert "1.0 s  here" in text
    assert (run / "derived" / "iterations.parquet").stat().st_mtime_ns > first


def test_another_folder_may_be_named(run, tmp_path, capsys):
    assert main(["analyze", str(run), "-o", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "flows.parquet").is_file()
    assert not (run / "derived").exists()
    (tmp_path / "file").write_text("")
    assert main(["analyze", str(run), "-o", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_no_obstacle(run, capsys):
    (run / "derived").write_text("in the way")
    assert main(["analyze", str(run)]) == 0
    found = capsys.readouterr()
    assert "no tables are kept" in found.err
    assert "No tables were written" in found.out


def test_without_pyarrow_the_text_is_there_all_the_same(run):
    code = "import sys; sys.modules['pyarrow'] = None; from ringtap.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "analyze", str(run), "--json"]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert "pyarrow" in found.stderr
    assert len(json.loads(found.stdout)["iterations_table"]) == 8


def test_a_summary_that_was_cut_off_is_made_again(run):
    main(["analyze", str(run)])
    sources = derived_table_cache.sources_of(run)
    assert derived_table_cache.is_fresh(run / "derived", sources)
    (run / "derived" / "flows.parquet").unlink()
    assert not derived_table_cache.is_fresh(run / "derived", sources)
    (run / "derived" / "sources.json").write_text("{")
    assert not derived_table_cache.is_fresh(run / "derived", sources)


def test_wrong_directories_are_answered_in_a_sentence(tmp_path, capsys):
    assert main(["analyze", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
    RunDirectory.create(tmp_path / "new", "job", [], 1)
    info = json.loads((tmp_path / "new" / "run.json").read_text())
    write_json(tmp_path / "new" / "run.json", info | {"schema": 99})
    assert main(["analyze", str(tmp_path / "new")]) == 2
    assert "upgrade" in capsys.readouterr().err


@pytest.mark.parametrize("cuts", [{"n0": None, "n1": 0}, {"n0": 0.7, "n1": 37}])
def test_every_file_may_be_missing_or_cut_anywhere(tmp_path, cuts):
    """Whatever a killed agent leaves behind is analyzed, or refused in a sentence; never a traceback.

    Both nodes have the same files, and the files of each are damaged in ways of their own.
    """
    write_ddp_job(tmp_path / "job", Truth(iterations=3, every_ms=50))
    files = [path for path in (tmp_path / "job").rglob("*") if path.is_file() and path.name not in ("run.json", "DONE")]
    assert len(files) == 16
    for path in files:
        kept, cut = path.read_bytes(), cuts[path.relative_to(tmp_path / "job" / "nodes").parts[0]]
        if cut is None:
            path.unlink()
        else:
            os.truncate(path, min(cut, len(kept)) if cut != 0.7 else int(len(kept) * 0.7))
        data = summarize(open_job(tmp_path / "job"))
        json.dumps(data, allow_nan=False)
        assert describe(data)
        path.write_bytes(kept)


def test_nodes_without_any_log_are_said(run, capsys):
    node = Node(RunDirectory.open(run), "n9")
    (node.path / "log").mkdir()
    assert main(["analyze", str(run)]) == 0
    text = capsys.readouterr().out
    assert "partial: n9: its agent was ended before it had written everything" in text
