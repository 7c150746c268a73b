"""ringtap export: what pandas, DuckDB and TensorBoard read back is what the tables of the run hold."""

import csv
import json
import sys
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import ringtap
from ringtap.analysis.export import tables
from ringtap.cli import main
from ringtap.core.append_only_logs import Field, RecordWriter
from tests.gold.analysis_sweep import write_sweep
from tests.gold.job_run import START_NS, TIMES, Truth, write_ddp_job
from tests.gold.shared_jobs import sharing

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

ITERATIONS = 8
JOB_TABLES = [name for name in tables.JOB_TABLES if name != "epochs"]  # the job prints none


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of two nodes; only the second one has a GPU, an interface ib0, and a log of its own."""
    path = tmp_path_factory.mktemp("export") / "job"
    write_ddp_job(path, Truth(iterations=ITERATIONS))
    for node, names in (("n0", ["eth0"]), ("n1", ["eth0", "ib0"])):
        fields = [*TIMES, *(Field(f"{name}.tx_bytes", "<u8", "bytes", "counter", 64) for name in names)]
        writer = RecordWriter(path / "nodes" / node / "own" / "own.rec", fields, {})
        largest = 2**64 - 1
        writer.append_many([(START_NS + 200_000_000 * n, 0, *[largest - n] * len(names)) for n in range(5)])
        writer.close()
    return path


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "sweep"
    write_sweep(path, [("vgg16", "consistent")], loads_gbps=(0.0, 10.0, 20.0))
    return path


def export(capsys: pytest.CaptureFixture[str], run: Path, to: str, output: Path, *more: str) -> dict[str, object]:
    assert main(["export", str(run), "--to", to, "-o", str(output), "--json", *more]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    assert (found["format"], found["path"]) == (to, str(output))
    return found


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["export", *map(str, words)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return err


def test_parquet_gives_pandas_the_tables_back(job, tmp_path, capsys) -> None:
    said = export(capsys, job, "parquet", tmp_path / "new" / "tables")
    folder, run = tmp_path / "new" / "tables", ringtap.open_job(job)
    for name in JOB_TABLES:
        expected = getattr(run, name)
        found = pd.read_parquet(folder / f"{name}.parquet")
        texts = [column for column in expected if expected[column].dtype == object]
        for table in (found, expected):  # pandas 3 reads texts as str; pandas 2 tells None from NaN
            table[texts] = table[texts].astype("object").where(table[texts].notna(), None)
        pd.testing.assert_frame_equal(found, expected)
        assert found.attrs == expected.attrs
    nic = pd.read_parquet(folder / "samples_nic.parquet")
    pd.testing.assert_frame_equal(nic, run.table("nic"), check_dtype=False)
    assert nic["t_ns"].dtype == "int64"
    assert {file.stem: parquet.read_metadata(file).num_rows for file in folder.iterdir()} == {
        item["table"]: item["rows"] for item in said["tables"]
    }
    assert said["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert [item["bytes"] for item in said["tables"]] == [
        (folder / f"{item['table']}.parquet").stat().st_size for item in said["tables"]
    ]


def test_a_table_that_the_run_lacks_is_left_out_with_the_reason(job, tmp_path, capsys) -> None:
    assert main(["export", str(job), "--to", "csv", "-o", str(tmp_path / "tables")]) == 0
    out, err = capsys.readouterr()
    assert "ringtap: no epochs: it has no rows\n" in err
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [["phases", "1"], ["iterations", str(ITERATIONS)]]
    assert f"Wrote {tmp_path / 'tables'}: " in out
    assert not (tmp_path / "tables" / "epochs.csv").exists()


def test_unknown_is_empty_and_known_is_exact_in_csv(job, tmp_path, capsys) -> None:
    export(capsys, job, "csv", tmp_path / "tables")
    found, expected = pd.read_csv(tmp_path / "tables" / "iterations.csv"), ringtap.open_job(job).iterations
    assert found["start_ns"].tolist() == expected["start_ns"].tolist()
    assert found["iteration_s"].tolist() == expected["iteration_s"].tolist() == [0.2] * ITERATIONS
    assert found["infiniband_tx_bytes"].isna().all()
    assert found["exposed_s"].tolist() == expected["exposed_s"].tolist()
    sockets = pd.read_csv(tmp_path / "tables" / "samples_sockets.csv")
    run = ringtap.open_job(job)
    for ends, of_flows in (
        (("source", "destination"), ("source", "destination")),
        (("sport", "dport"), ("source_port", "destination_port")),
    ):
        assert set(sockets[list(ends)].stack()) == set(run.flows[list(of_flows)].stack())


def test_duckdb_answers_by_sql(job, tmp_path, capsys) -> None:
    said = export(capsys, job, "duckdb", tmp_path / "job.duckdb")
    run = ringtap.open_job(job)
    with duckdb.connect(str(tmp_path / "job.duckdb"), read_only=True) as database:

        def ask(query: str) -> list[tuple[object, ...]]:
            return database.execute(query).fetchall()

        assert ask("SELECT rank, median(compute_s), count(*) FROM rank_iterations GROUP BY rank ORDER BY rank") == [
            (0, 0.1, ITERATIONS),
            (1, 0.13, ITERATIONS),
        ]
        assert ask("SELECT typeof(any_value(start_ns)), min(start_ns), count(infiniband_tx_bytes) FROM iterations") == [
            ("BIGINT", run.iterations["start_ns"].min(), 0)
        ]
        counts = ask("SELECT table_name, estimated_size FROM duckdb_tables()")
        assert sorted(counts) == sorted((item["table"], item["rows"]) for item in said["tables"])
        comments = dict(ask("SELECT column_name, comment FROM duckdb_columns() WHERE table_name = 'iterations'"))
        assert comments["iteration_s"] == "time between them, by CLOCK_MONOTONIC [s]"
        # n0 has no ib0, which is unknown there; the largest 64-bit counters keep their digits
        assert ask(
            'SELECT node, max("eth0.tx_bytes"), max("ib0.tx_bytes") FROM samples_own GROUP BY node ORDER BY node'
        ) == [("n0", 2**64 - 1, None), ("n1", 2**64 - 1, 2**64 - 1)]
    assert {item["bytes"] for item in said["tables"]} == {None}
    assert said["bytes"] == (tmp_path / "job.duckdb").stat().st_size


def scalars(folder: Path) -> dict[str, list[tuple[float, int, float]]]:
    """Time, step and value of each scalar, as TensorBoard reads them."""
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = module.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [(event.wall_time, event.step, event.value) for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def test_tensorboard_reads_the_iterations_of_each_rank_and_node(job, tmp_path, capsys) -> None:
    pytest.importorskip("crc32c")
    said = export(capsys, job, "tensorboard", tmp_path / "logs")
    export(capsys, job, "tensorboard", tmp_path / "logs", "--force")  # replaces each log, and doubles no point
    assert sorted(folder.name for folder in (tmp_path / "logs").iterdir()) == [
        "job",
        "node-n0",
        "node-n1",
        "rank0",
        "rank1",
    ]
    assert [(item["table"], item["rows"]) for item in said["tables"]] == [
        ("iterations", ITERATIONS),
        ("rank_iterations", 2 * ITERATIONS),
        ("node_iterations", 2 * ITERATIONS),
    ]
    run = ringtap.open_job(job)
    for folder, table in (("job", run.iterations), ("rank1", run.rank_iterations.query("rank == 1"))):
        found = scalars(tmp_path / "logs" / folder)
        name = "iterations" if folder == "job" else "rank_iterations"
        columns = [column for column in table.select_dtypes("float") if table[column].notna().any()]
        assert sorted(found) == sorted(f"{name}/{column}" for column in columns)
        for column in columns:
            known = table[table[column].notna()]
            assert found[f"{name}/{column}"] == [
                (end_ns / 1e9, iteration, np.float32(value))
                for end_ns, iteration, value in zip(
                    known["end_ns"], known["iteration"], known[column].astype(float), strict=True
                )
            ]


def test_tensorboard_reads_the_points_of_a_series_by_load(sweep, tmp_path, capsys) -> None:
    pytest.importorskip("crc32c")
    export(capsys, sweep, "tensorboard", tmp_path / "logs")
    (folder,) = (tmp_path / "logs").iterdir()
    points = ringtap.open_sweep(sweep).points
    assert folder.name == points["series"][0]
    found = scalars(folder)["points/mean_s"]
    assert [step for _, step, _ in found] == [round(load * 1000) for load in points["cross_gbps"]]
    assert [value for _, _, value in found] == [np.float32(mean) for mean in points["mean_s"]]


def test_sweeps_have_points_and_iterations(sweep, tmp_path, capsys) -> None:
    export(capsys, sweep, "parquet", tmp_path / "tables")
    run = ringtap.open_sweep(sweep)
    for name in ("points", "iterations"):
        found, expected = pd.read_parquet(tmp_path / "tables" / f"{name}.parquet"), getattr(run, name)
        pd.testing.assert_frame_equal(found, expected, check_dtype=False)
        assert found.attrs == expected.attrs


def test_jobs_that_share_links_have_a_row_each(tmp_path, capsys) -> None:
    run = sharing(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "shared.jsonl").read_text().splitlines()]
    share = {"intercept": 0.25, "slope": 1.75, "priority": 0, "iteration_bytes": 1.0, "gap_s": 0.1}
    for job in lines[2]["jobs"]:
        job["share"] = share | {"congestion_control": ""}
    (run / "shared.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    export(capsys, run, "parquet", tmp_path / "tables")
    jobs = pd.read_parquet(tmp_path / "tables" / "jobs.parquet")
    assert jobs["offset"].tolist() == ["alone", "alone", "free", "free", "cassini", "cassini"]
    assert jobs["mean_s"].round(6).tolist() == [0.1, 0.1, 0.15, 0.155, 0.1, 0.1]
    assert jobs["slowdown"].isna().tolist() == [True, True, False, False, False, False]
    assert jobs.attrs["units"]["mean_s"] == "s"
    assert jobs["share_slope"].dropna().tolist() == [1.75, 1.75]
    points = pd.read_parquet(tmp_path / "tables" / "points.parquet")
    assert points["score"].isna().tolist() == [True, True, True, False]
    iterations = pd.read_parquet(tmp_path / "tables" / "iterations.parquet")
    assert iterations.groupby(["step", "job"]).size().to_dict()[(3, "b")] == jobs["iterations"].iloc[5]


@settings(max_examples=5, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.floats(width=64), st.binary(min_size=4, max_size=4)), min_size=1)
)
def test_any_samples_survive_in_batches(tmp_path_factory, samples) -> None:
    """Every value but NaN, which is unknown, comes back from files that were written in batches of two rows."""
    path = tmp_path_factory.mktemp("property")
    write = RecordWriter(
        path / "run" / "nodes" / "n0" / "own" / "own.rec",
        [*TIMES, Field("own", "<u8", "", "gauge"), Field("part", "<f8", "", "gauge"), Field("key", "V4", "", "index")],
        {},
    )
    write.append_many([(START_NS + number, 0, *sample) for number, sample in enumerate(samples)])
    write.close()
    (path / "run" / "run.json").write_text(json.dumps({"schema": 1, "kind": "job", "ringtap": "0.2.0"}))
    run = ringtap.open_job(path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_BATCH_ROWS", 2)
        tables.write_parquet(run, path / "parquet")
        tables.write_csv(run, path / "csv")
    parts = [None if np.isnan(part) else part for _, part, _ in samples]
    found = parquet.read_table(path / "parquet" / "samples_own.parquet").to_pydict()
    assert found["t_ns"] == [START_NS + number for number in range(len(samples))]
    assert found["own"] == [own for own, _, _ in samples]
    assert found["part"] == parts
    assert found["key"] == [key.hex() for _, _, key in samples]
    with (path / "csv" / "samples_own.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [int(row["own"]) for row in read] == found["own"]
    assert [float(row["part"]) if row["part"] else None for row in read] == parts


@pytest.mark.parametrize(
    ("others", "reason"), [(("<u4", "gauge"), ""), (("V2", "index"), ""), (("V4", "index"), "differ")]
)
def test_columns_of_nodes_may_differ_in_type(tmp_path, others, reason) -> None:
    for node, (kind, meaning) in (("n0", ("<u8", "gauge")), ("n1", others)):
        fields = [*TIMES, Field("own", kind, "", meaning)]
        writer = RecordWriter(tmp_path / "run" / "nodes" / node / "own" / "own.rec", fields, {})
        writer.append_many([(START_NS, 0, b"\0\x07\0\0"[: int(kind[1])] if kind[0] == "V" else 7)])
        writer.close()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"schema": 1, "kind": "job", "ringtap": "0.2.0"}))
    written = tables.write_parquet(ringtap.open_job(tmp_path / "run"), tmp_path / "tables")
    if reason:
        assert reason in written.left_out["samples_own"]
    else:
        found = parquet.read_table(tmp_path / "tables" / "samples_own.parquet")["own"]
        assert (found.to_pylist(), str(found.type)) == ([7, 7], "uint64")


def test_what_exists_is_replaced_with_force_alone(job, sweep, tmp_path, capsys) -> None:
    (tmp_path / "tables").mkdir()
    export(capsys, sweep, "csv", tmp_path / "tables")  # an empty folder is as good as none
    (tmp_path / "tables" / "mine.csv").write_text("mine")
    assert "is not empty: choose another folder" in refused(capsys, sweep, "--to", "csv", "-o", tmp_path / "tables")
    export(capsys, sweep, "csv", tmp_path / "tables", "--force")
    assert sorted(file.name for file in (tmp_path / "tables").iterdir()) == ["iterations.csv", "mine.csv", "points.csv"]
    database = tmp_path / "old.duckdb"
    database.write_bytes(b"old")
    assert "is there already" in refused(capsys, sweep, "--to", "duckdb", "-o", database)
    assert database.read_bytes() == b"old"
    export(capsys, sweep, "duckdb", database, "--force")
    assert "is a file" in refused(capsys, sweep, "--to", "parquet", "-o", database, "--force")


def test_wrong_runs_and_places_are_one_sentence(job, tmp_path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    assert "is not a run directory" in refused(capsys, tmp_path / "empty", "--to", "csv", "-o", tmp_path / "new")
    assert "is not a directory" in refused(capsys, job, "--to", "duckdb", "-o", tmp_path / "none" / "job.duckdb")
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(capsys, job, "--to", "csv", "-o", tmp_path / "file" / "tables")
    assert main(["export", str(job), "--to", "xlsx", "-o", "tables"]) == 2


@pytest.mark.parametrize(("to", "package"), [("duckdb", "duckdb"), ("tensorboard", "crc32c")])
def test_a_missing_extra_is_named_before_anything_is_written(job, tmp_path, capsys, monkeypatch, to, package) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    said = refused(capsys, job, "--to", to, "-o", tmp_path / "new")
    assert f"{package} is not installed here" in said
    assert f"[{to}]" in said
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_rows_is_refused_and_leaves_nothing(tmp_path, capsys) -> None:
    (tmp_path / "run" / "nodes").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps({"schema": 1, "kind": "job", "ringtap": "0.2.0"}))
    pytest.importorskip("crc32c")
    for to in ("parquet", "csv", "duckdb", "tensorboard"):
        assert "has nothing to export" in refused(capsys, tmp_path / "run", "--to", to, "-o", tmp_path / "new")
        assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("to", ["parquet", "duckdb"])
def test_a_table_that_fails_leaves_no_part_of_itself(job, tmp_path, capsys, monkeypatch, to) -> None:
    batches = tables.ExportTable.batches

    def torn(table: tables.ExportTable) -> object:
        yield from batches(table)
        if table.name == "flows":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(tables.ExportTable, "batches", torn)
    assert "No space left on device" in refused(capsys, job, "--to", to, "-o", tmp_path / "new")
    left = sorted(path.name for path in tmp_path.rglob("*") if path.is_file())
    whole = ("iterations", "phases", "rank_iterations", "ranks")
    assert left == ([] if to == "duckdb" else [f"{name}.{to}" for name in whole])
