"""The tables of a job and of a sweep as a user of the library sees them: keys, units, descriptions, copies, UTC."""

import datetime
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import ringtap
from ringtap.analysis.notebook_formatting import as_time_ns, unit_of
from tests.gold.analysis_sweep import write_sweep
from tests.gold.job_run import MS, START_NS, Truth, write_ddp_job

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

JOB_TABLES = (
    *("iterations", "rank_iterations", "flows", "socket_iterations", "byte_accounts", "node_iterations", "ranks"),
    "collectors",
)
SWEEP_TABLES = ("points", "iterations")


@pytest.fixture(scope="module")
def truth():
    return Truth()


@pytest.fixture(scope="module")
def job(truth, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "job"
    write_ddp_job(path, truth)
    return ringtap.open_job(path)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "sweep"
    write_sweep(path, [("vgg16", "consistent"), ("vgg16", "burst")], loads_gbps=(0.0, 8.0, 12.0, 16.0, 20.0))
    return ringtap.open_sweep(path)


@pytest.mark.parametrize(
    ("which", "name"), [*(("job", name) for name in JOB_TABLES), *(("sweep", name) for name in SWEEP_TABLES)]
)
def test_each_column_of_a_table_has_a_description_and_no_column_a_reserved_name(which, name, request):
    table = getattr(request.getfixturevalue(which), name)
    assert len(table)
    assert set(table.attrs["columns"]) == set(table.columns)
    assert not {"class", "from", "to"} & set(table.columns)
    for column in table:
        unit = table.attrs["units"].get(column)
        assert unit == (unit_of(column) or None)
        assert not column.endswith(("_s", "_ns", "_bytes", "_bps", "_gbps")) or unit


OF_FRAMES = """
import pandas as pd
from ringtap.analysis.notebook_formatting import described_table, documented

class Owner:
    @property
    @described_table({"source, destination": "endpoints", "sent_bytes": "payload"})
    def kept(self):
        "A table."
        return pd.DataFrame({"source": [], "sent_bytes": []})

    @documented({"first_ns": "time"})
    def made(self):
        "Another table."
        return pd.DataFrame({"first_ns": []})

for table in (Owner().kept, Owner().made()):
    print(sorted(table.attrs["columns"].items()), table.attrs["units"])
print(Owner.kept.__doc__)
"""


@pytest.mark.parametrize("options", [(), ("-OO",)])
def test_columns_have_descriptions_also_in_a_python_without_docstrings(options):
    command = [sys.executable, *options, "-c", OF_FRAMES]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert printed[0] == "[('sent_bytes', 'payload'), ('source', 'endpoints')] {'sent_bytes': 'bytes'}"
    assert printed[1] == "[('first_ns', 'time')] {'first_ns': 'ns since 1970-01-01 UTC'}"
    described = [
        "A table.",
        "",
        "Columns:",
        "    - ``source, destination``: endpoints",
        "    - ``sent_bytes``: payload",
    ]
    assert printed[2:] == (["None"] if options else [*described, ""])


def test_an_edit_of_a_table_changes_nothing_inside(job):
    table = job.iterations
    table["iteration_s"] = 0.0
    table.attrs["units"]["iteration_s"] = "h"
    assert (job.iterations["iteration_s"] > 0).all()
    assert job.iterations.attrs["units"]["iteration_s"] == "s"


def test_tables_join_by_their_keys(job, truth):
    joined = job.rank_iterations.merge(job.iterations, on="iteration", suffixes=("_of_rank", ""))
    assert len(joined) == 2 * truth.iterations
    flows = job.socket_iterations.merge(job.flows, on="flow", suffixes=("", "_of_flow"))
    training = flows[flows["traffic_class"] == "training"].groupby("iteration")["payload_bytes"].sum()
    assert training.to_numpy(float) == pytest.approx(job.iterations["training_bytes"].to_numpy(float))
    nodes = job.node_iterations.merge(job.iterations[["iteration", "iteration_s"]])
    assert len(nodes) == 2 * truth.iterations


def test_times_of_a_table_become_utc_on_demand(job):
    table = job.rank_iterations
    shown = ringtap.utc(table)
    assert shown["end_utc"].dtype == "datetime64[ns, UTC]"
    assert shown["end_utc"].iloc[0] == pd.Timestamp(int(table["end_ns"].iloc[0]), tz="UTC")
    assert list(shown) == [name.replace("_ns", "_utc") for name in table]
    assert shown.attrs["columns"]["end_utc"] == table.attrs["columns"]["end_ns"]
    assert "end_utc" not in shown.attrs["units"]
    assert "end_ns" in table, "the table itself stays"
    with pytest.raises(ringtap.UsageError, match="no column of times"):
        ringtap.utc(job.ranks)


def test_an_unknown_time_stays_unknown_as_utc():
    table = pd.DataFrame({"ready_ns": pd.array([START_NS, None], "Int64"), "rtt_mean_ns": [1, 2]})
    shown = ringtap.utc(table)
    assert shown["ready_utc"].isna().tolist() == [False, True]
    assert shown["rtt_mean_ns"].tolist() == [1, 2], "a duration is no time"


@pytest.mark.parametrize(
    "given",
    [
        START_NS,
        np.int64(START_NS),
        datetime.datetime.fromtimestamp(START_NS // 10**9, datetime.timezone.utc),
        pd.Timestamp(START_NS, tz="Europe/Zurich"),
        str(pd.Timestamp(START_NS)),
    ],
)
def test_a_time_may_be_given_in_any_usual_form(given):
    assert as_time_ns(given) == START_NS


def test_a_time_of_each_rank_is_in_its_iterations(job, truth):
    table = job.rank_iterations
    assert table["iteration_s"].to_numpy(float) == pytest.approx(
        (table["end_ns"] - table["begin_ns"]).to_numpy(float) / 1e9
    )
    assert table.groupby("iteration")["iteration_s"].max().to_numpy(float) == pytest.approx(truth.iteration_ms / 1000)


def test_bytes_of_a_flow_in_an_iteration_lie_within_their_bounds(job):
    table = job.socket_iterations
    assert (table["payload_low_bytes"] <= table["payload_bytes"] + 1e-6).all()
    assert (table["payload_bytes"] <= table["payload_high_bytes"] + 1e-6).all()
    totals = table.groupby("flow")["payload_bytes"].sum()
    flows = job.flows.set_index("flow")["payload_bytes"]
    assert (totals <= flows.reindex(totals.index) + 1e-6).all()


def test_bytes_of_a_sample_across_a_border_are_uncertain_by_that_sample(tmp_path, truth):
    # with borders 3 ms after the samples, each border cuts one of the samples, which are 10 ms apart
    write_ddp_job(tmp_path / "job", truth)
    job = ringtap.open_job(tmp_path / "job")
    edges = job.logs.borders.edges_ns + 3 * MS
    for name, borders in job.logs.borders_at.items():
        job.logs.borders_at[name] = borders.shifted(edges)
    table = job.socket_iterations
    cross = table[table["flow"] == job.flows.query("traffic_class == 'cross'")["flow"].iloc[0]].iloc[2:-2]
    sample_bytes = truth.cross_bytes / (truth.iteration_ms / truth.every_ms)
    width = (cross["payload_high_bytes"] - cross["payload_low_bytes"]).to_numpy(float)
    assert width == pytest.approx(2 * sample_bytes, rel=0.01)
    assert cross["payload_bytes"].to_numpy(float) == pytest.approx(truth.cross_bytes, rel=0.01)


def test_slow_iterations_come_with_the_network(tmp_path):
    write_ddp_job(tmp_path / "job", Truth())
    job = ringtap.open_job(tmp_path / "job")
    every = job.slow(factor=0.5)
    assert len(every) == len(job.logs.measured)
    assert (every["flow_retransmissions"] > 0).all()
    worst = job.flows.set_index("flow").loc[every["flow"].iloc[0]]
    assert worst["retransmissions"] == job.flows["retransmissions"].max()
    assert set(every.attrs["columns"]) == set(every.columns)
    assert not len(job.slow(factor=50))
    for factor in (0, -1, float("nan")):
        with pytest.raises(ringtap.UsageError, match="not a positive number"):
            job.slow(factor)


def test_a_sweep_has_one_job_for_each_series(sweep):
    assert sweep.names == ["vgg16-consistent", "vgg16-burst"]
    assert [series.name for series in sweep] == sweep.names
    assert len(sweep) == 2
    assert sweep.job("vgg16-burst").path.name == "vgg16-burst-1"
    assert sweep["vgg16-burst"].fit.capacity_gbps == sweep.capacity_gbps
    points, iterations = sweep.points, sweep.iterations
    counts = iterations.groupby("point").size()
    assert counts.tolist() == points["iterations"].tolist()
    means = iterations.merge(points[["point", "mean_s"]], on="point").groupby("point")[["iteration_s", "mean_s"]].mean()
    assert means["iteration_s"].to_numpy(float) == pytest.approx(means["mean_s"].to_numpy(float))


@pytest.mark.parametrize("ask", [lambda sweep: sweep.job("vgg16-brust"), lambda sweep: sweep["vgg16-brust"]])
def test_a_wrong_series_is_answered_with_the_nearest_one(sweep, ask):
    with pytest.raises(ringtap.UsageError, match="has no series 'vgg16-brust': did you mean 'vgg16-burst'"):
        ask(sweep)


def test_a_run_says_what_it_is(job, sweep):
    assert repr(job) == f"<Job {job.path}: complete, 2 nodes, 2 rank processes>"
    assert repr(sweep).startswith(f"<Sweep {sweep.path}: ")
    assert "2 series, 10 points>" in repr(sweep)
    assert "vgg16-burst" in sweep._repr_html_()
    assert "<pre" in job._repr_html_()
    assert job.report().splitlines()[0] == job.report().split("\n")[0] != ""
    assert job.summary()["iterations"]["count"] == len(job.iterations)


def test_open_run_tells_a_job_from_a_sweep(job, sweep):
    assert isinstance(ringtap.open_run(str(job.path)), ringtap.Job)
    assert isinstance(ringtap.open_run(sweep.path), ringtap.Sweep)
    with pytest.raises(ringtap.UsageError, match=r"\(open_job\) reads it"):
        ringtap.open_sweep(job.path)
    with pytest.raises(ringtap.UsageError, match=r"\(open_sweep\) reads it"):
        ringtap.open_job(sweep.path)
    with pytest.raises(ringtap.UsageError, match=r"did you mean '.*/job'"):
        ringtap.open_job(job.path.parent / "jobb")


def test_damaged_logs_give_a_warning_and_the_rest(tmp_path):
    write_ddp_job(tmp_path / "job", Truth())
    (tmp_path / "job" / "nodes" / "n1" / "sockets" / "sockets.rec").write_bytes(b"not a log\n")
    with pytest.warns(ringtap.RingtapWarning, match=r"n1/sockets/sockets\.rec cannot be used"):
        flows = ringtap.open_job(tmp_path / "job").flows
    assert len(flows)
