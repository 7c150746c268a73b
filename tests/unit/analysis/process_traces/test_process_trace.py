"""Dumps of PyTorch's flight recorder and logs of NCCL Inspector within the trace of a job.

The dumps in tests/gold are of a job with gloo (torch 2.13); the paths of source files in them are shortened. Those of
NCCL are made after its sources.
"""

import gzip
import json
import os
import pickle
import resource
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ringtap.analysis.process_traces import flight_recorder
from ringtap.analysis.process_traces.flight_recorder import read_flight_recorder
from ringtap.analysis.process_traces.nccl_inspector import read_nccl_inspector
from ringtap.cli import main
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import RunDirectory
from tests.gold.job_run import MS, START_NS, Node, Truth, write_ddp_job

pytest.importorskip("perfetto")
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from tests.gold.perfetto_rules import check_trace

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

GOLD = Path(__file__).resolve().parents[3] / "gold"
PICKLE, JSON = (GOLD / f"flight-recorder_0.{form}" for form in ("pickle", "json"))
JOB_NS, OFFSET_NS = START_NS + 50 * MS, 5 * MS  # begin of the job; of rank 1's clock


def plain(value):
    """A value whose tuples are lists."""
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def test_a_dump_is_the_same_as_pickle_and_as_json():
    data = PICKLE.read_bytes()
    assert flight_recorder._unpickled(data) == plain(pickle.loads(data))
    one, other = read_flight_recorder(PICKLE), read_flight_recorder(JSON)
    assert one.operations == other.operations
    assert one.rank == other.rank == 0
    assert one.tracks == ["process group 0 default_pg", "process group 1 undefined"]
    names = [operation.name for operation in one.operations]
    assert names[4:] == [
        "gloo:all_reduce, 400 kB, end not recorded",
        "gloo:broadcast, 80 B, end not recorded",
        "gloo:all_gather, 20 B, end not recorded",
        "gloo:barrier, end not recorded",
        "gloo:all_reduce, 12 B, end not recorded",
        "gloo:all_reduce, 44 B, not completed (scheduled)",
    ]
    facts = {"state": "scheduled", "sequence": 7, "types": "Float", "input_bytes": 20, "output_bytes": 40}
    assert dict(one.operations[6].facts) == facts
    assert one.begin_ns.tolist() == [entry["time_created_ns"] for entry in pickle.loads(data)["entries"]]


def entry(number, begin_ms, end_ms=None, **more):
    """An entry of a dump of NCCL, by the clock of rank 1's node."""
    own_ns = JOB_NS + OFFSET_NS
    return {
        "record_id": number,
        "pg_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number + 1,
        "p2p_seq_id": 0,
        "op_id": number + 1,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": own_ns + begin_ms * MS,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None if end_ms is None else own_ns + end_ms * MS,
        "input_sizes": [[1000, 250]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[1000, 250]],
        "output_dtypes": ["BFloat16"],
        "state": "scheduled" if end_ms is None else "completed",
        "retired": end_ms is not None,
        "timeout_ms": 600_000,
        "is_p2p": False,
    } | more


def dump(path, *entries):
    path.write_text(json.dumps({"entries": list(entries), "version": "2.4"}))
    return path


HEADER = {"id": "0x7f8c496ae9f661", "comm_name": "DP", "rank": 0, "n_ranks": 2, "nnodes": 2}
METADATA = {"inspector_output_format_version": "v4.2", "hostname": "h1", "pid": 101, "dump_timestamp_us": 1}


def operation(begin_ms, end_ms, **more):
    own_us = (JOB_NS + OFFSET_NS) // 1000
    times = [(0, 0), (begin_ms, end_ms - 1), (begin_ms + 1, end_ms)]  # of channels; the first took no part
    kernels = [
        {"channel_id": number, "kernel_start_ts": own_us + begin * 1000, "kernel_stop_ts": own_us + end * 1000}
        for number, (begin, end) in enumerate(times)
    ]
    kernels[0] |= {"kernel_start_ts": 0, "kernel_stop_ts": 0}
    start_us = own_us + begin_ms * 1000 - 120
    return {
        "coll": "AllReduce",
        "coll_algo": "RING",
        "coll_proto": "LL",
        "coll_sn": 1407,
        "coll_msg_size_bytes": 500_000,
        "coll_exec_time_us": 61_974,
        "coll_timing_source": "kernel_gpu",
        "coll_busbw_gbs": 485.119099,
        "event_trace_ts": {"coll_start_ts": start_us, "coll_stop_ts": start_us + 5, "kernel_events": kernels},
    } | more


def lines(path, *items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return path


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A job of two ranks; the clock of rank 1's node is 5 ms ahead."""
    path = tmp_path_factory.mktemp("job") / "run"
    write_ddp_job(path, Truth())
    node = path / "nodes" / "n1" / "node.json"
    node.write_text(json.dumps(json.loads(node.read_text()) | {"host": "h1"}))
    return path


def export(job, path, *arguments):
    return main(["export", str(job), "--to", "perfetto", "-o", str(path), *map(str, arguments)])


def slices_of(path, tool):
    """Begin and end in ms since the begin of the job, name, facts, track and process of a tool's slices."""
    data = gzip.decompress(path.read_bytes())
    check_trace(data)
    names, found, is_open = {}, [], {}
    for packet in Trace.FromString(data).packet:
        event, one = packet.track_event, packet.track_descriptor
        if packet.HasField("track_descriptor"):
            names[one.uuid] = (*names.get(one.parent_uuid, ()), one.process.process_name or one.name)
        elif tool in event.categories:
            facts = {fact.name: getattr(fact, fact.WhichOneof("value")) for fact in event.debug_annotations}
            is_open[event.track_uuid] = (packet.timestamp, event.name, facts)
        elif event.track_uuid in is_open:
            begin_ns, name, facts = is_open.pop(event.track_uuid)
            at = [(time_ns - JOB_NS) / MS for time_ns in (begin_ns, packet.timestamp)]
            found.append((*at, name, facts, *names[event.track_uuid]))
    return found


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("node7_rank_12", 12),
        ("comm_lib_trace_rank_3", 3),
        ("rank0.json", 0),
        ("trace_rank_1.pickle.bak", 1),
        ("dump", None),
    ],
)
def test_the_rank_is_at_the_end_of_a_dumps_name(tmp_path, name, rank):
    """PyTorch's, torchcomms' and the debug server's own names; TORCH_FR_DUMP_DYNAMIC_FILE_NAME may have none."""
    for profiled in ("nccl2:all_reduce", "ncclx:all_reduce", "c10d:all_reduce", "my communicator:all_reduce"):
        found = read_flight_recorder(dump(tmp_path / name, entry(0, 100, 130, profiling_name=profiled)))
        assert (found.rank, found.operations[0].name.split(", ")[0]) == (rank, profiled)


def test_collectives_are_on_the_clock_of_the_run(job, tmp_path, capsys):
    recorded = dump(
        tmp_path / "nccl_trace_rank_1",
        entry(70, 100, 130, duration_ms=12.5),
        entry(71, 300, retired=True),
        entry(72, 310, state="started", is_p2p=True, p2p_seq_id=4, profiling_name="nccl:send 1->0", input_dtypes=["Q"]),
        entry(73, 350),
    )
    logged = lines(
        tmp_path / "h1-pid101\udcff.log", {"header": HEADER, "metadata": METADATA, "coll_perf": operation(110, 125)}
    )
    path = tmp_path / "t.gz"
    assert export(job, path, "--flight-recorder", recorded, "--nccl-inspector", logged) == 0
    said = f"ringtap: {recorded} has lost its first 70 collectives: raise TORCH_FR_BUFFER_SIZE to keep more\n"
    assert said in capsys.readouterr().err
    where = ("rank 1 on n1 (pid 101)", f"flight recorder {recorded.name}", "process group 0 default_pg")
    facts = {"types": "BFloat16", "input_bytes": 500_000, "output_bytes": 500_000}
    done, ended, sent, pending = sorted(slices_of(path, "flight recorder"), key=lambda one: one[0])
    name = "nccl:all_reduce, 500 kB"
    assert done == (100, 130, name, facts | {"state": "completed", "sequence": 71, "duration_ms": 12.5}, *where)
    assert ended[:3] == (300, 300, f"{name}, end not recorded")
    assert sent[:3] == (310, 350, "nccl:send 1->0, 500 kB, not completed (started)")
    assert sent[3] == {"state": "started", "sequence": 4, "types": "Q, BFloat16", "output_bytes": 500_000}
    assert pending[:3] == (350, 350, f"{name}, not completed (scheduled)")  # the dump knows no later time
    facts = {"sequence": 1407, "size_bytes": 500_000, "algorithm": "RING", "protocol": "LL"}
    facts |= {"duration_us": 61_974, "duration_source": "kernel_gpu", "bus_bandwidth_gbs": 485.119099}
    where = (where[0], "NCCL Inspector h1-pid101\ufffd.log", "communicator DP 0x7f8c496ae9f661, rank 0 of 2")
    assert slices_of(path, "NCCL Inspector") == [(110, 125, "AllReduce, 500 kB", facts, *where)]


def test_a_dump_of_a_job_that_hung_belongs_to_it(job, tmp_path):
    hung = dump(tmp_path / "rank1", entry(0, 20 * 200 + 10))  # after the last iteration, before the last sample
    assert export(job, tmp_path / "t", "--flight-recorder", hung) == 0
    assert len(slices_of(tmp_path / "t", "flight recorder")) == 1


def test_dumps_of_a_rank_that_was_started_again_belong_to_their_process(tmp_path):
    run = RunDirectory.create(tmp_path / "run", "job", [], 1)
    node = Node(run, "n0")
    for pid, first_ns in ((10, START_NS), (11, START_NS + 60_000 * MS)):
        ends_ns = [first_ns + n * 100 * MS for n in range(1, 5)]
        node.steps(0, [(n, 0, end_ns - 5, end_ns, 0, 0, 0, 1) for n, end_ns in enumerate(ends_ns)], pid=pid)
    node.finish()
    run.finish("complete")
    dumps = [dump(tmp_path / f"{ms}_rank0", entry(0, ms, ms + 1)) for ms in (60_100, 100)]
    assert export(run.path, tmp_path / "t", "--flight-recorder", *dumps) == 0
    found = {(one[0], one[4]) for one in slices_of(tmp_path / "t", "flight recorder")}
    assert found == {(105, "rank 0 on n0 (pid 10)"), (60_105, "rank 0 on n0 (pid 11)")}


def test_both_forms_of_nccl_inspectors_logs(tmp_path):
    p2p = {key.replace("coll", "p2p"): value for key, value in operation(40, 50).items()}
    p2p |= {"p2p": "Send", "p2p_peer": 1, "event_trace_ts": {"p2p_start_ts": 7, "kernel_events": []}}
    items = [{"coll_perf": operation(10, 30)}, {"p2p_perf": p2p}]
    context = {"header": HEADER, "metadata": METADATA}
    whole = read_nccl_inspector(lines(tmp_path / "a", *(context | item for item in items)))
    stats = {"coll_records": 1, "p2p_records": 1, "coll_dropped_since_last_dump": 512}
    short = read_nccl_inspector(lines(tmp_path / "b", context | {"dump_stats": stats}, *items))
    assert whole.operations == short.operations
    assert [one[:3] for one in whole.operations] == [
        (7000, 7000, "Send, 500 kB, end not recorded"),
        (JOB_NS + OFFSET_NS + 10 * MS, JOB_NS + OFFSET_NS + 30 * MS, "AllReduce, 500 kB"),
    ]
    assert whole.left_out == ""
    said = "lacks 512 operations: set NCCL_INSPECTOR_DUMP_COLL_RING_SIZE higher to keep more"
    assert short.left_out == f"{tmp_path / 'b'} {said}"


class Command:
    def __reduce__(self):
        return os.mkdir, ("/tmp/ran",)


ANEW = "of a whole dump of PyTorch's flight recorder"
KEEP = "remove the line, or record the job anew"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", f" is not {ANEW} (it is cut short): dump it anew"),
        (b"hello", f" is not {ANEW} (it is not a JSON object): dump it anew"),
        (JSON.read_bytes()[:2000], f", entry 5 is not {ANEW} (it is cut short or not JSON): dump it anew"),
        (PICKLE.read_bytes()[:2000], f" is not {ANEW} (pickle exhausted before seeing STOP): dump it anew"),
        (pickle.dumps(Command(), 2), f" is not {ANEW} (it has the instruction GLOBAL, which PyTorch does not write)"),
        (b'{"entries": [{"a": 1}], "version": "2.4"}', f" is not {ANEW} (it has no 'input_sizes'): dump it anew"),
        (b'{"version": "1.5"}', f" is not {ANEW} (version is not version 2 of the format): dump it anew"),
        (b'{"version": "2.10"}', " has no collective: run the job with TORCH_FR_BUFFER_SIZE=2000, and dump it anew"),
        (b"\x80\x02]q\x00(" + b"h\x00" * 9 + b"e.", f" is not {ANEW} (it is not an object): dump it anew"),
        # whole numbers of one hash: a dictionary of 100,000 of them takes minutes
        (b"\x80\x02}(\x8a\x09" + (2**61 - 1).to_bytes(9, "little") + b"Nu.", f" is not {ANEW} (it has a key that is"),
    ],
)
def test_files_that_are_no_dump(tmp_path, data, said):
    path = tmp_path / "rank_0"
    path.write_bytes(data)
    with pytest.raises(UsageError) as raised:
        read_flight_recorder(path)
    assert str(raised.value).startswith(f"{path}{said}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", " has no operation: it is not a log of NCCL Inspector, or its job ended too early"),
        ("# HELP x\n", f", line 1 is not of a whole log of NCCL Inspector (it is not JSON): {KEEP}"),
        ('{"a": 1}\n', ", line 1 is not of a whole log of NCCL Inspector (no line before it says its communicator"),
        (json.dumps({"header": HEADER, "metadata": METADATA | {"pid": -1}}), ", line 1 is not of a whole log"),
        (json.dumps({"coll_perf": operation(1, 2)})[:300], ", line 1 is not of a whole log of NCCL Inspector"),
    ],
)
def test_files_that_are_no_log_of_nccl_inspector(tmp_path, text, said):
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(UsageError) as raised:
        read_nccl_inspector(path)
    assert str(raised.value).startswith(f"{path}{said}")


def test_logs_that_cannot_be_shown(job, tmp_path, capsys):
    context = {"header": HEADER, "metadata": METADATA}
    untimed = operation(1, 2)
    del untimed["event_trace_ts"]
    for items, said in (
        (
            [context | {"coll_perf": untimed}],
            ", line 1 has no times of its operation: set NCCL_INSPECTOR_DUMP_VERBOSE=1",
        ),
        ([context, {"header": HEADER, "metadata": METADATA | {"pid": 5}}], ", line 2 is of another process: name one"),
        (
            [{"header": HEADER, "metadata": METADATA | {"hostname": "h2"}, "coll_perf": operation(1, 2)}],
            f" has no time in common with a rank of {job}: it is of process 101 on h2\n",
        ),
    ):
        path = lines(tmp_path / "log", *items)
        assert export(job, tmp_path / "t", "--nccl-inspector", path) == 2
        assert capsys.readouterr().err.startswith(f"ringtap: {path}{said}")
    path = tmp_path / "nccl_inspector_metrics_GPU-1.prom"
    path.write_text('nccl_bus_bandwidth_gbs{version="v5.1",collective="AllReduce"} 678.263\n')
    assert export(job, tmp_path / "t", "--nccl-inspector", path) == 2
    assert "for Prometheus, without their times: unset NCCL_INSPECTOR_PROM_DUMP, set" in capsys.readouterr().err
    path.unlink()
    assert export(job, tmp_path / "t", "--nccl-inspector", tmp_path / "none") == 2
    assert capsys.readouterr().err == f"ringtap: {tmp_path}/none cannot be read: No such file or directory\n"
    assert main(["export", str(job), "--to", "csv", "-o", str(tmp_path / "t"), "--flight-recorder", "f"]) == 2
    assert capsys.readouterr().err == "ringtap: --flight-recorder goes with --to perfetto, not with --to csv\n"
    assert [one.name for one in tmp_path.iterdir()] == ["log"]


@given(st.integers(0, 2300), st.binary(max_size=3), st.integers(0, 3))
@example(4, b"c", 1)
def test_any_damage_of_a_dump_is_a_sentence(tmp_path_factory, at, inserted, removed):
    data = PICKLE.read_bytes()
    path = tmp_path_factory.getbasetemp() / "rank_0"
    path.write_bytes(data[:at] + inserted + data[at + removed :])
    try:
        read_flight_recorder(path)
    except UsageError as error:
        assert str(error).startswith(str(path))


def test_a_pickle_gets_no_more_memory_than_it_may(tmp_path, monkeypatch):
    monkeypatch.setattr(flight_recorder, "MAX_INSTRUCTIONS", 100_000)
    path = tmp_path / "rank_0"
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data, said in (
        (b"}" * 200_000, "more than 100,000 instructions"),
        (b"Nr\xff\xff\xff\xff", "pickle exhausted"),  # LONG_BINPUT: a memo of 4 billion places
        (b"\x96" + b"\xff" * 4 + b"\0" * 4, "bytearray8"),
        (b"]q\0" + b"(h\0" * 1000 + b"e" * 1000 + b".", "not an object"),  # a list of itself
        (b"(" + b")\x85" * 90_000, "instructions"),
    ):
        path.write_bytes(b"\x80\x02" + data)
        with pytest.raises(UsageError, match=said):
            read_flight_recorder(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 100_000
    monkeypatch.setattr(flight_recorder, "MAX_BYTES", 1000)
    with pytest.raises(UsageError, match="has more than"):
        read_flight_recorder(PICKLE)
    monkeypatch.setattr(flight_recorder, "_MAX_VALUES", 5)
    with pytest.raises(UsageError, match="too many tensors"):
        read_flight_recorder(JSON)


def test_a_name_that_is_kept_once_and_used_in_every_entry_is_short(tmp_path):
    path = tmp_path / "rank_0"
    for key in ("profiling_name", "state", "process_group", "input_dtypes"):
        name = "x" * 1001
        with pytest.raises(UsageError, match="a name of more than 1,000 characters"):
            read_flight_recorder(dump(path, entry(0, 10, **{key: [name] if key[-1] in "ps" else name})))


ATTACKS = {
    "GLOBAL": b"\x80\x02cos\nmkdir\n(X\x08\0\0\0/tmp/rantR.",
    "STRING": b"\x80\x02(S'/tmp/ran'\nios\nmkdir\n.",
    "STACK_GLOBAL": b"\x80\x02X\x02\0\0\0osX\x05\0\0\0mkdir\x93.",
    "BUILD": b"\x80\x02}}b.",
    "REDUCE": b"\x80\x02N)R.",
    "NEWOBJ": b"\x80\x02N)\x81.",
    "OBJ": b"\x80\x02(No.",
    "EXT1": b"\x80\x02\x82\x01.",
    "BINPERSID": b"\x80\x02NQ.",
    "FRAME": b"\x80\x04\x95\0\0\0\0\0\0\0\x80N.",
    "LONG4": b"\x80\x02\x8b\x01\0\0\0\x01.",
}


@pytest.mark.parametrize("instruction", ATTACKS)
def test_no_instruction_that_runs_code_is_carried_out(tmp_path, instruction):
    path = tmp_path / "rank_0"
    path.write_bytes(ATTACKS[instruction])
    with pytest.raises(UsageError, match=f"the instruction {instruction}, which PyTorch does not write"):
        read_flight_recorder(path)


def test_lengths_of_a_pickle_ask_for_no_memory(tmp_path):
    path = tmp_path / "rank_0"
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for data, said in (
        (b"\x8e" + (10**9).to_bytes(8, "little"), "expected 1000000000 bytes in a bytes8"),
        (b"\x8d" + (2**62).to_bytes(8, "little"), "bytes in a unicodestring8"),
        (b"\x8b" + (2**31 - 1).to_bytes(4, "little"), "not enough data in stream to read long4"),
        (b"X" + b"\xff" * 4, "expected 4294967295 bytes"),
    ):
        path.write_bytes(b"\x80\x04" + data + b"x.")
        with pytest.raises(UsageError, match=said):
            read_flight_recorder(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 50_000
