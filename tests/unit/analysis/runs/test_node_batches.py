"""A long run is analyzed in batches of nodes whose tables are files: the same numbers, and an analysis can go on."""

import hashlib
import json
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ringtap.analysis.job import counters_per_iteration
from ringtap.analysis.job.run import open_job
from ringtap.analysis.runs import derived_table_cache, node_batches
from ringtap.cli import main
from ringtap.core.errors import UsageError
from tests.gold.job_run import MS, Truth, write_ddp_job

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

TRUTH = Truth(iterations=12, compute_ms=(100, 130, 90), offsets_ns=(0, 5 * MS, -3 * MS))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_ddp_job(tmp_path / "job", TRUTH)
    return tmp_path / "job"


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat this run as a long one, with a batch per node, and compare its ranks in blocks of four iterations."""
    monkeypatch.setattr(node_batches, "_BATCH_NODES", 1)
    monkeypatch.setattr(node_batches, "_MEMORY_ROWS", 0)
    monkeypatch.setattr("ringtap.analysis.job.iterations_of_ranks._BLOCK_ROWS", 12)


def close(one: object, other: object) -> bool:
    """True if two JSON values are the same, but for the order in which batches are added up."""
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-12)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(close(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    return one == other


def analyze(run: Path, folder: Path) -> Path:
    assert main(["analyze", str(run), "-o", str(folder)]) == 0
    return folder


def test_batches_find_what_one_piece_finds(run: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    whole = analyze(run, tmp_path / "whole")
    request.getfixturevalue("long")
    parts = analyze(run, tmp_path / "parts")
    assert close(*(json.loads((folder / "summary.json").read_text()) for folder in (whole, parts)))
    for name in derived_table_cache.TABLES:
        one, other = (pd.read_parquet(folder / f"{name}.parquet") for folder in (whole, parts))
        if name in node_batches.TABLES:
            assert len(list((parts / f"{name}.parquet").glob("*.parquet"))) == 3
            order = ["iteration", "rank" if name == "rank_iterations" else "node"]
            one, other = (table.sort_values(order, kind="stable", ignore_index=True) for table in (one, other))
        pd.testing.assert_frame_equal(one, other, rtol=1e-12)
    job = open_job(run, derived=parts)
    pd.testing.assert_frame_equal(job.slow(0.5), open_job(run, derived=tmp_path / "other").slow(0.5))
    assert job.rank_iterations["rank"].tolist() == [0, 1, 2] * len(job.logs.work.iterations)
    assert derived_table_cache.is_fresh(parts, derived_table_cache.sources_of(run))


def test_an_interrupted_analysis_goes_on(
    run: Path, tmp_path: Path, long: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read, seen = tmp_path / "out", counters_per_iteration.node_table, []

    def interrupted(node, borders):
        if node.name == "n2" and len(seen) < 3:
            seen.append("n2")
            raise KeyboardInterrupt
        seen.append(node.name)
        return read(node, borders)

    monkeypatch.setattr(counters_per_iteration, "node_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_job(run, derived=folder).summary()
    assert seen == ["n0", "n1", "n2"]
    summary = open_job(run, derived=folder).summary()
    assert seen == ["n0", "n1", "n2", "n2"]  # the other nodes' tables were there
    # a log that grew is read again, and those of the other nodes are not
    log = run / "nodes/n1/host/host.rec"
    log.parent.mkdir(exist_ok=True)
    log.write_bytes(b"{}\n")
    changed = open_job(run, derived=folder).summary()
    assert seen == ["n0", "n1", "n2", "n2", "n1"]
    assert any("n1/host/host.rec cannot be used" in line for line in changed["warnings"])
    assert close(changed["iterations"], summary["iterations"])
    # and so is a table that was cut off
    table = folder / "node_iterations.parquet/00000.parquet"
    table.write_bytes(table.read_bytes()[:-9])
    again = open_job(run, derived=folder).summary()
    assert seen[-1] == "n0"
    assert again == changed  # with the problems of the batches that were not read again
    # and what was kept with the problems of another run's nodes
    record = folder / node_batches.PARTS / "tables-00002.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"problems": [["elsewhere", False, "text"]]}))
    assert open_job(run, derived=folder).summary() == changed
    assert seen == ["n0", "n1", "n2", "n2", "n1", "n0", "n2"]


def test_a_long_run_needs_a_folder_for_its_tables(run: Path, tmp_path: Path, long: None) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file cannot be written: .*ringtap analyze -o DIR"):
        open_job(run, derived=tmp_path / "file").summary()


def test_what_workers_are_sent_is_gone_afterwards(run: Path, tmp_path: Path, long: None) -> None:
    alone = open_job(run, derived=tmp_path / "alone").summary()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as workers:
        assert close(open_job(run, workers, derived=tmp_path / "together").summary(), alone)
    assert not [*(tmp_path / "together" / node_batches.PARTS).glob(".*")]


def test_workers_unpickle_only_what_they_were_sent(tmp_path: Path) -> None:
    path = tmp_path / "sent"
    with pytest.raises(UsageError, match=r"cannot read .*sent: No such file .* with ringtap analyze -o DIR"):
        node_batches.SharedArguments("", (), path, "").read()
    path.write_bytes(pickle.dumps((1, 2)))
    with pytest.raises(UsageError, match="sent was changed during the analysis"):
        node_batches.SharedArguments("", (), path, hashlib.sha256(b"other").hexdigest()).read()
    assert node_batches.SharedArguments("", (), path, hashlib.sha256(path.read_bytes()).hexdigest()).read() == (1, 2)


def test_a_run_that_is_short_again_leaves_no_folder(run: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_batches, "_MEMORY_ROWS", 0)
        assert (analyze(run, tmp_path / "out") / "rank_iterations.parquet").is_dir()
    (run / "nodes/n0/steps/note.txt").write_text("other sources")
    assert (analyze(run, tmp_path / "out") / "rank_iterations.parquet").is_file()


def test_nodes_are_grouped_by_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_batches, "_BATCH_ROWS", 10)
    monkeypatch.setattr(node_batches, "_BATCH_NODES", 3)
    rows = {"a": 5, "b": 5, "c": 1, "d": 99, "e": 1, "f": 1, "g": 1, "h": 1}
    nodes = dict.fromkeys(rows)
    assert node_batches.batches_of(nodes, rows) == [["a", "b"], ["c"], ["d"], ["e", "f", "g"], ["h"]]  # type: ignore[arg-type]


def test_a_digest_is_of_the_values() -> None:
    table = pd.DataFrame({"a": [1, 2], "b": ["x", None]})
    same = node_batches.digest(table.copy(), {"k": np.arange(3)}, frozenset({"b", "a"}), np.array(["x", None], object))
    assert node_batches.digest(table, {"k": np.arange(3)}, frozenset({"a", "b"}), np.array(["x", None], object)) == same
    assert node_batches.digest(table.assign(a=[1, 3])) != node_batches.digest(table)
    assert node_batches.digest(np.arange(3)) != node_batches.digest(np.arange(4))
