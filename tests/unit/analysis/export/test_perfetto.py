import gzip
import importlib.util
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringtap
from ringtap.analysis.job.horovod_timeline import read_timeline
from ringtap.cli import main
from ringtap.core.append_only_logs import Field, JsonLinesWriter, RecordWriter
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import RunDirectory
from ringtap.core.run_directory_schema import FLOW_STATES
from ringtap.core.sent_flow_log import FIELDS as SENT_FIELDS
from ringtap.core.sent_flow_log import NO_SOURCE
from ringtap.trafficgen.flow_log import FlowLog
from tests.gold.job_run import MS, START_NS, TIMES, Node, Truth, pcap, write_ddp_job

pytest.importorskip("perfetto")
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from ringtap.analysis.export import perfetto
from ringtap.analysis.export.trace_writer import TraceWriter, TrackSlice
from ringtap.analysis.process_traces import kineto as kineto_export
from ringtap.analysis.process_traces.kineto import read_kineto
from tests.gold.perfetto_rules import check_trace

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[4]
JOB_NS = START_NS + 50 * MS  # begin of the first iteration of `write_ddp_job`, by the reference clock


def script():
    found = importlib.util.spec_from_file_location("draw_trace", ROOT / "scripts" / "draw_trace.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


draw_trace = script()


def export(run, path):
    written = perfetto.write_perfetto(ringtap.open_job(run), path)
    events = check_trace(gzip.decompress(path.read_bytes()))
    assert events >= 2 * written.slices + written.values
    return written, draw_trace.read_trace(path)


def slices_of(tracks, process, name):
    found = [track for track in tracks if track.path[0].startswith(process) and track.path[1:] == (name,)]
    return sorted(one for track in found for one in track.slices)


def values_of(tracks, process, *path):
    return next(track for track in tracks if track.path[0].startswith(process) and track.path[1:] == path)


def grown(track, until_ns):
    """Bytes that a rate in bit/s amounts to."""
    times_ns, rates = zip(*track.values, strict=True)
    return sum(np.diff([*times_ns, until_ns]) * np.array(rates)) / 8e9


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of two nodes whose clocks differ by 5 ms, with marks, cross traffic, profiles and captures."""
    path = tmp_path_factory.mktemp("job") / "run"
    truth = write_ddp_job(path, Truth())
    marks = JsonLinesWriter(path / "marks.jsonl")
    marks.append({"t_ns": JOB_NS + 7 * MS, "text": "link cut"})
    marks.close()
    for rank, offset_ns in enumerate(truth.offsets_ns):
        node = path / "nodes" / f"n{rank}"
        # two buckets in iteration 3: one hidden, one from the last 5 ms of the backward pass on
        begin_ns = JOB_NS + 3 * truth.iteration_ms * MS + truth.compute_ms[rank] * MS + offset_ns
        ranges = [["gloo:all_reduce", begin_ns - 20 * MS, 12 * MS, 1_000_000]]
        ranges += [["gloo:all_reduce", begin_ns - 5 * MS, 15 * MS, 3_000_000]]
        lines = [{"kind": "model"}, {"kind": "ranges", "until_ns": begin_ns, "ranges": ranges}]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (node / "steps" / f"rank{rank}-{100 + rank}.profile.jsonl").write_text(text)
    ends = ("10.0.0.1", 40_000), ("10.0.0.2", 50_001)
    first_ns = JOB_NS + (3 * 200 + 82) * MS  # 2 ms after the beginning of the first bucket of rank 0
    times_ns = [first_ns, first_ns + 500_000, first_ns + 6 * MS, JOB_NS + 3 * 200 * MS + 10 * MS]
    pcap(path / "nodes" / "n0" / "packets" / "eth0-0.pcap", [(t_ns, *ends, 1000) for t_ns in sorted(times_ns)])
    log = FlowLog(
        path / "nodes" / "n1" / "sent" / "0.rec",
        SENT_FIELDS,
        {"source": "sender", "origin_ns": JOB_NS + truth.offsets_ns[1], "destinations": ["10.0.0.1:5001"]},
    )
    own_ns = JOB_NS + truth.offsets_ns[1]
    for flow, begin, end, state in ((0, 10, 30, "finished"), (1, 20, 25, "finished"), (2, 28, 0, "unfinished")):
        times = [own_ns + begin * MS] * 3 + [own_ns + end * MS if end else 0] * 2
        log.add(flow, *times, 0, 5000, 5000, 4000, 0, 100, 90, FLOW_STATES[state], NO_SOURCE, 0)
    log.flush()
    log.close()
    return path, truth


@pytest.fixture(scope="module")
def tracks(job, tmp_path_factory):
    return export(job[0], tmp_path_factory.mktemp("trace") / "job.pftrace.gz")[1]


def test_iterations_are_slices_on_the_reference_clock(job, tracks):
    path, truth = job
    table = ringtap.open_job(path).iterations
    rows = table[["iteration", "start_ns", "end_ns"]].to_numpy().tolist()
    spans = [(begin, end, f"iteration {number}", 0, ()) for number, begin, end in rows]
    assert slices_of(tracks, "job", "iterations") == spans
    step_ns = truth.iteration_ms * MS
    for rank in range(2):
        mine = slices_of(tracks, f"rank {rank} on n{rank} (pid {100 + rank})", "iterations")
        # the node's clock is 5 ms ahead, and the trace's is not
        assert [one[:2] for one in mine] == [(JOB_NS + n * step_ns, JOB_NS + (n + 1) * step_ns) for n in range(20)]


def test_phases_and_hidden_and_exposed_communication(job, tracks):
    truth = job[1]
    for rank, compute_ms in enumerate(truth.compute_ms):
        begin_ns = JOB_NS + 4 * truth.iteration_ms * MS
        ready_ns, done_ns = begin_ns + compute_ms * MS, begin_ns + (130 + 20) * MS
        at = {name: slices_of(tracks, f"rank {rank} ", name) for name in ("forward", "backward", "optimizer")}
        assert at["forward"][4][:3] == (begin_ns, begin_ns + 30 * MS, "forward")
        assert at["backward"][4][:3] == (begin_ns + 30 * MS, ready_ns, "backward")
        assert at["optimizer"][4][:3] == (done_ns, begin_ns + 200 * MS, "optimizer step")
        found = slices_of(tracks, f"rank {rank} ", "communication")
        whole, *parts = sorted((one for one in found if begin_ns < one[0] < done_ns), key=lambda one: one[3])
        assert whole[:3] == (ready_ns - 20 * MS, done_ns, "communication")
        assert [one[:3] for one in parts] == [(ready_ns - 20 * MS, ready_ns, "hidden"), (ready_ns, done_ns, "exposed")]


def test_buckets_and_the_arrows_to_their_packets(job, tracks):
    truth = job[1]
    ready_ns = JOB_NS + 3 * truth.iteration_ms * MS + truth.compute_ms[0] * MS
    found = sorted(slices_of(tracks, "rank 0 ", "buckets"), key=lambda one: (one[0], one[3]))
    first, hidden, second, early, late = found
    assert first[:3] == (ready_ns - 20 * MS, ready_ns - 8 * MS, "gloo:all_reduce, 1 MB")
    assert second[:3] == (ready_ns - 5 * MS, ready_ns + 10 * MS, "gloo:all_reduce, 3 MB")
    assert [one[1:4] for one in (hidden, early, late)] == [
        (ready_ns - 8 * MS, "hidden", 1),
        (ready_ns, "hidden", 1),
        (ready_ns + 10 * MS, "exposed", 1),
    ]
    bursts = values_of(tracks, "node n0", "packets on eth0", "training 10.0.0.1:40000 → 10.0.0.2:50001").slices
    assert [(end - begin, name, arrows) for begin, end, name, _, arrows in bursts] == [
        (0, "1 packet, 1 kB", ()),  # while nothing communicates
        (500_000, "2 packets, 2 kB", first[4]),
        (0, "1 packet, 1 kB", first[4]),
    ]
    assert len(first[4]) == 1
    # in other iterations, all communication of the pass is one slice
    assert sum(bool(one[4]) for one in slices_of(tracks, "rank 0 ", "communication")) == truth.iterations - 1


def test_counters_add_up_to_what_was_counted(job, tracks):
    path, truth = job
    nodes = ringtap.open_job(path).logs.nodes
    for name, node in nodes.items():
        log = node.wide("nic/nic.rec")
        sent = values_of(tracks, f"node {name}", "nic", "eth0.tx_bytes")
        growth = int(log.values("eth0.tx_bytes")[-1]) - int(log.values("eth0.tx_bytes")[0])
        last_ns = int(node.clock.to_reference(log.t_ns[-1:])[0])
        assert 8 * grown(sent, last_ns) == pytest.approx(growth)  # bytes/s: these made-up logs have no units
    ring = "10.0.0.1:40000 → 10.0.0.2:50001"
    rate = values_of(tracks, "node n0", "sockets: training", ring)
    payload = truth.iterations * truth.rank_bytes
    assert rate.unit == "bit/s"
    assert grown(rate, rate.values[-1][0]) == pytest.approx(payload, rel=1e-6)  # rates are whole bit/s
    assert rate.values[-1][1] == 0
    again = values_of(tracks, "node n0", "sockets: training", f"{ring} retransmissions")
    assert again.values[-1][1] == payload // 1_000_000
    assert any(track.path[1:2] == ("sockets: cross",) for track in tracks)


def test_cross_traffic_marks_and_clocks(tracks):
    flows = slices_of(tracks, "node n1", "cross traffic 0")
    assert [one[:3] for one in flows] == [
        (JOB_NS + 10 * MS, JOB_NS + 30 * MS, "flow"),
        (JOB_NS + 20 * MS, JOB_NS + 25 * MS, "flow"),
        (JOB_NS + 28 * MS, JOB_NS + 30 * MS, "unfinished flow"),  # to the last time that the log knows
    ]
    assert values_of(tracks, "job", "marks").values == [(JOB_NS + 7 * MS, "link cut")]
    assert values_of(tracks, "node n1", "clock", "offset from n0").values[0][1] == 5 * MS
    assert values_of(tracks, "node n1", "clock", "error bound").values[0][1] == 10_000
    assert values_of(tracks, "node n0", "clock", "error bound").values[0][1] == 0


def test_an_unknown_clock_and_unknown_counts_are_absent(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "job", ["x"], 1)
    node = Node(run, "n0")
    times_ns = [START_NS + n * 100 * MS for n in range(4)]
    counts = (0, 1000, 0, 500)  # reset after the second
    for name, column, unit in (
        ("gpu/gpu0", "energy", "mJ"),
        ("nic/nic", "eth0.rx_bytes", "bytes"),
        ("infiniband/mlx5_0-1", "port_rcv_data", "4 octets"),
    ):
        path = node.path / f"{name}.rec"
        writer = RecordWriter(path, [*TIMES, Field(column, "<u8", unit, "counter", 64)], {})
        writer.append_many([(t_ns, t_ns, count) for t_ns, count in zip(times_ns, counts, strict=True)])
        writer.close()
    node.finish()
    run.finish("complete")
    written, tracks = export(run.path, tmp_path / "t")
    assert written.iterations == 0
    assert not any("clock" in track.path for track in tracks)
    for group, name, unit, factor in (
        ("gpu gpu0", "energy", "mJ/s", 1),
        ("nic", "eth0.rx", "bit/s", 8),
        ("infiniband mlx5_0-1", "port_rcv_data", "bit/s", 32),
    ):
        track = values_of(tracks, "node n0", group, name)
        assert track.unit == unit
        assert track.values == [(times_ns[0], 10_000 * factor), (times_ns[2], 5_000 * factor)]


def test_the_largest_flows_are_kept_and_the_rest_is_named(job, tmp_path, monkeypatch):
    monkeypatch.setattr(perfetto, "MAX_FLOWS", 1)
    monkeypatch.setattr(perfetto, "MAX_SENT", 2)
    written, tracks = export(job[0], tmp_path / "t")
    assert written.left_out == [
        "n0: the 1 largest of 2 flows of sockets are shown",
        "n1/sent/0.rec: the 2 largest of 3 flows are shown",
    ]
    assert len(slices_of(tracks, "node n1", "cross traffic 0")) == 2


def test_eight_ranks_of_a_thousand_iterations_are_small(tmp_path):
    truth = Truth(iterations=1000, compute_ms=(100,) * 8, offsets_ns=(0,) * 8, every_ms=200)
    write_ddp_job(tmp_path / "run", truth)
    written, tracks = export(tmp_path / "run", tmp_path / "t")
    assert written.iterations == 1000
    assert len(slices_of(tracks, "rank 7 ", "communication")) == 3000
    assert written.size_bytes == (tmp_path / "t").stat().st_size < 50e6


def test_times_at_which_a_gpus_work_was_queued_are_not_shown(tmp_path):
    write_ddp_job(tmp_path / "run", Truth(iterations=5, is_on_gpu=True))
    _, tracks = export(tmp_path / "run", tmp_path / "t")
    shown = {name for name in ("iterations", "optimizer", "forward", "backward", "communication")
             if slices_of(tracks, "rank 0 ", name)}  # fmt: skip
    assert shown == {"iterations", "optimizer"}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=40))
def test_lanes_hold_every_slice_and_no_two_at_once(spans):
    spans = sorted((begin, begin + length) for begin, length in spans)
    stream = io.BytesIO()
    writer = TraceWriter(stream, 1)
    writer.lanes(writer.process("p"), "lane", (TrackSlice(*span, "s", "c") for span in spans))
    writer.flush()
    assert check_trace(stream.getvalue()) == 2 * len(spans)
    tracks = draw_trace.read_trace(io.BytesIO(gzip.compress(stream.getvalue(), 1)))
    assert sorted(one[:2] for track in tracks for one in track.slices) == spans
    for track in tracks:
        assert all(one[1] <= two[0] for one, two in zip(track.slices, track.slices[1:], strict=False))
    most = max((sum(b <= t < e for b, e in spans) for t in range(71)), default=0)
    assert len(tracks) - 1 >= most


def test_traces_that_are_not_well_formed_are_noticed():
    stream = io.BytesIO()
    writer = TraceWriter(stream, 1)
    writer.lanes(writer.process("p"), "lane", [TrackSlice(2, 5, "s", "c"), TrackSlice(6, 7, "s", "c")])
    writer.flush()
    whole = Trace.FromString(stream.getvalue())
    assert check_trace(stream.getvalue()) == 4
    for order, said in (
        ([0, 1, 2, 3], "never closed"),
        ([0, 1, 2, 4], "without a begin"),
        ([0, 1, 2, 5, 6, 3, 4], "not in order"),
        ([0, 1, 3, 4], "not described"),
        ([0, 2, 1], "before its parent"),
    ):
        with pytest.raises(AssertionError, match=said):
            check_trace(Trace(packet=[whole.packet[number] for number in order]).SerializeToString())


def test_the_command_says_what_it_wrote_and_refuses_a_file_that_exists(job, tmp_path, capsys):
    path = tmp_path / "job.pftrace.gz"
    command = ["export", str(job[0]), "--to", "perfetto", "-o", str(path)]
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["iterations"] == 20
    assert data["bytes"] == path.stat().st_size
    assert data["slices"] == sum(len(track.slices) for track in draw_trace.read_trace(path))
    before = path.read_bytes()
    assert main(command) == 2
    assert capsys.readouterr().err == f"ringtap: {path} is there already: choose another name, or give --force\n"
    assert path.read_bytes() == before
    assert main([*command, "--force"]) == 0
    assert "20 iterations, " in capsys.readouterr().out


def test_runs_that_cannot_be_shown(tmp_path, capsys, monkeypatch):
    command = ["export", str(tmp_path), "--to", "perfetto", "-o", str(tmp_path / "t")]
    assert main(command) == 2
    assert "is not a run directory" in capsys.readouterr().err
    RunDirectory.create(tmp_path / "empty", "job", ["x"], 1).finish("failed")
    command[1] = str(tmp_path / "empty")
    assert main(command) == 2
    assert "holds no iteration and no sample" in capsys.readouterr().err
    monkeypatch.setattr("ringtap.core.installation.find_spec", lambda name: None)
    assert main(command) == 2
    assert "a Perfetto trace needs perfetto, not installed here: " in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


def test_damaged_times_of_collectives_are_named(job, tmp_path):
    shutil.copytree(job[0], tmp_path / "run")
    profile = tmp_path / "run" / "nodes" / "n1" / "steps" / "rank1-101.profile.jsonl"
    profile.write_text('{"kind": "ranges", "ranges": [["gloo:all_reduce", -5, 1]]}\n{"kind": "rang')
    with pytest.warns(ringtap.RingtapWarning, match="damaged times of collectives"):
        written, tracks = export(tmp_path / "run", tmp_path / "t")
    assert any("rank1-101.profile.jsonl has damaged times of collectives" in reason for reason in written.left_out)
    assert not slices_of(tracks, "rank 1 ", "buckets")


def test_the_figure_of_a_trace_shows_its_slices(tracks):
    figure = draw_trace.draw(tracks, 3, 1)
    titles = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert titles[:2] == ["rank 0 on n0: iterations", "rank 0 on n0: forward"]
    assert figure.axes[0].get_xlim() == (0, 200)


def test_tensors_that_horovod_sent_together_are_one_bucket(tmp_path):
    gold = ROOT / "tests" / "gold" / "horovod-fused.json"
    timeline = read_timeline(gold)
    moved = timeline.dropna(subset=["transport_start_ns"])
    run = RunDirectory.create(tmp_path / "run", "job", ["x"], 1)
    node = Node(run, "n0")
    begin_ns, end_ns = int(timeline["start_ns"].min()), int(timeline["end_ns"].max())
    # one step before the timeline, and one whose optimizer waits for its last collective only
    last_ns = int(moved["transport_start_ns"].max())
    node.steps(0, [(0, 0, begin_ns - 2 * MS, begin_ns - MS, 0, 0, 0, 1), (1, 0, last_ns, end_ns + MS, 0, 0, 0, 1)])
    (node.path / "horovod").mkdir()
    shutil.copy(gold, node.path / "horovod" / "timeline.json")
    node.finish()
    run.finish("complete")
    found = slices_of(export(run.path, tmp_path / "t")[1], "rank 0 ", "buckets")
    whole = [one for one in found if one[3] == 0]
    together = moved.groupby(["transport_start_ns", "transport_end_ns"])
    assert [one[:2] for one in whole] == sorted(together.groups)
    assert len(whole) < len(moved)
    sizes = {span: len(tensors) for span, tensors in together}
    assert all(f", {sizes[one[:2]]} tensor" in one[2] for one in whole)
    assert {one[2] for one in found if one[3] == 1 and one[0] < last_ns} == {"hidden"}
    assert [one[2] for one in found if one[3] == 1][-1] == "exposed"


def kineto(path, rank, base_ns, events):
    spans = [
        {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": length}
        for kind, name, pid, tid, begin, length in events
    ]
    item = {"baseTimeNanoseconds": base_ns, "traceEvents": [{"ph": "M", "name": "process_name"}, *spans]}
    if rank is not None:
        item["distributedInfo"] = {"rank": rank, "world_size": 2}
    path.write_text(json.dumps(item))
    return path


EVENTS = [
    ("user_annotation", "ProfilerStep#3", 7, 7, 1000.25, 500.0),
    ("cpu_op", "aten::mm", 7, 7, 1010.0, 20.5),
    ("cpu_op", "aten::add", 7, 7, 1490.0, 50.0),  # longer than the span that it begins in
    ("kernel", "gemm\ud800", 0, 20, 1100.0, 30.0),
    ("Trace", "Record Window End", 0, 0, 0.0, 9e9),
]


def test_traces_of_torch_profiler_are_merged_onto_the_same_clock(job, tmp_path):
    base_ns = JOB_NS + job[1].offsets_ns[1]  # by the clock of rank 1's node
    trace = kineto(tmp_path / "k.json", 1, base_ns, EVENTS)
    written = perfetto.write_perfetto(ringtap.open_job(job[0]), tmp_path / "t", [read_kineto(trace)])
    tracks = [one for one in draw_trace.read_trace(tmp_path / "t") if "torch.profiler k.json" in one.path]
    assert written.left_out == []
    assert {one.path[0] for one in tracks} == {"rank 1 on n1 (pid 101)"}
    spans = sorted(
        (one.path[-1], begin - JOB_NS, end - JOB_NS, name, depth)
        for one in tracks
        for begin, end, name, depth, _ in one.slices
    )
    assert spans == [
        ("GPU 0 stream 20", 1_100_000, 1_130_000, "gemm\ufffd", 0),
        ("thread 7", 1_000_250, 1_500_250, "ProfilerStep#3", 0),
        ("thread 7", 1_010_000, 1_030_500, "aten::mm", 1),
        ("thread 7", 1_490_000, 1_540_000, "aten::add", 0),
    ]


def test_tracks_of_older_traces_have_the_same_names(tmp_path):
    former = [
        ("Operator", "aten::mm", 7, 7, 1010.0, 20.5),
        ("Kernel", "gemm", 0, "stream 20", 1100.0, 30.0),
        ("Memcpy", "Memcpy HtoD", 0, "stream 21", 1100.0, 30.0),
        ("Runtime", "cudaLaunchKernel", 7, "8", 1050.0, 3.0),
    ]
    names = read_kineto(kineto(tmp_path / "k.json", 0, 0, former)).tracks
    assert names == ["thread 7", "GPU 0 stream 20", "GPU 0 stream 21", "thread 8"]


def test_a_trace_may_be_of_a_job_without_saying_its_rank(tmp_path):
    path = kineto(tmp_path / "k.json", None, 0, EVENTS)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"distributedInfo": {"backend": "nccl"}}))
    assert read_kineto(path).rank is None


@pytest.mark.parametrize(
    ("rank", "base_ns", "cut", "said"),
    [
        (1, JOB_NS - 10**12, None, "has no time in common with a rank of {job}: it is of rank 1"),
        (2, JOB_NS, None, "has no time in common with a rank of {job}: it is of rank 2"),
        (None, JOB_NS, None, "has no time in common with a rank of {job}: it does not say of which rank it is"),
        (1, JOB_NS, 200, "event 1 is damaged (it is cut short or not JSON): export the trace anew"),
        (1, JOB_NS, 0, "is damaged (it is cut short): export the trace anew"),
    ],
)
def test_traces_of_torch_profiler_that_do_not_belong_to_the_run(job, tmp_path, capsys, rank, base_ns, cut, said):
    trace = kineto(tmp_path / "k.json", rank, base_ns, EVENTS)
    trace.write_bytes(trace.read_bytes()[:cut])
    assert main(["export", str(job[0]), "--to", "perfetto", "-o", str(tmp_path / "t"), "--kineto", str(trace)]) == 2
    separator = ", " if said.startswith("event") else " "
    assert capsys.readouterr().err == f"ringtap: {trace}{separator}{said.format(job=job[0])}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["k.json"]


def test_traces_of_torch_profiler_are_for_perfetto_only(job, tmp_path, capsys):
    assert main(["export", str(job[0]), "--to", "csv", "-o", str(tmp_path / "t"), "--kineto", "k.json"]) == 2
    assert capsys.readouterr().err == "ringtap: --kineto goes with --to perfetto, not with --to csv\n"


def test_times_before_1970_are_left_out_and_counted():
    stream = io.BytesIO()
    writer = TraceWriter(stream, 1)
    process = writer.process("p")
    writer.lanes(process, "lane", [TrackSlice(-5, 3, "s", "c"), TrackSlice(4, 5, "s", "c")])
    writer.instants(process, "marks", [(-1, "a")])
    writer.counter(process, "n", "", np.array([-1, 6, 7]), np.array([1, 2, np.nan]))
    writer.flush()
    tracks = draw_trace.read_trace(io.BytesIO(gzip.compress(stream.getvalue())))
    assert [(one.path[-1], one.slices, one.values) for one in tracks[1:]] == [
        ("lane", [(4, 5, "s", 0, ())], []),
        ("n", [], [(6, 2)]),
    ]
    assert writer.untimed == 3


def test_a_kineto_trace_of_events_that_are_no_spans_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(kineto_export, "MAX_EVENTS", 10)
    path = tmp_path / "k.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "M"}] * 11}))
    with pytest.raises(UsageError, match="has more than 5,000,000 spans or 10 events: profile fewer iterations"):
        read_kineto(path)
