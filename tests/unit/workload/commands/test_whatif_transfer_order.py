"""``ringtap whatif``: orders of tensors, against brute force, the papers' theorems and the lecture's example."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.cli import main
from ringtap.core.errors import UsageError
from ringtap.core.thesis_neural_networks import BUCKET_BYTES, profile_named
from ringtap.workload import timed_tensors
from ringtap.workload.execution_trace import Node, NodeType
from ringtap.workload.lowering import Algorithms
from ringtap.workload.model_workloads import model_workload
from ringtap.workload.scaling import Scaling, scale
from ringtap.workload.simulate_iterations import simulate
from ringtap.workload.timed_tensors import read_tensors, workload_tensors
from ringtap.workload.topologies import star
from ringtap.workload.transfer_order_times import (
    METHODS,
    GraphOperation,
    LayerTensor,
    LogGP,
    bound_s,
    bucket_times,
    completion_s,
    network_of,
    ready_s,
    remaining_s,
    schedule,
    schedules,
    tac_order,
    tic_order,
)
from ringtap.workload.workload import Workload, write_workload

pytestmark = [pytest.mark.computes, pytest.mark.long]

UNIT = LogGP(8.0)  # a byte per second
HEADER = "name,bytes,forward_ms,backward_ms\n"
TABLE = HEADER + "conv1,4000000,10,20\nconv2,8000000,10,20\nfc,100000000,5,10\n"
ROUNDING = 1e-9


def layers(numbers: list[tuple[int, int, int]]) -> list[LayerTensor]:
    return [LayerTensor(f"t{i}", size, float(each[0]), float(each[1])) for i, (size, *each) in enumerate(numbers)]


def some_layers(most: int, largest: int = 20) -> st.SearchStrategy[list[LayerTensor]]:
    time = st.integers(0, 10)
    return st.lists(st.tuples(st.integers(0, largest), time, time), min_size=1, max_size=most).map(layers)


def in_turn_s(tensors: list[LayerTensor], order: tuple[int, ...], size_bytes: int | None = None) -> float:
    """The iteration if transfers, or pieces of one size, are sent exactly in an order, each when it is ready."""
    begins_s, rest_s = ready_s(tensors), remaining_s(tensors)
    now_s, total_s = 0.0, begins_s[0] + rest_s[0]
    for number in order:
        size = tensors[number].size_bytes if size_bytes is None else size_bytes
        if size:
            now_s = max(now_s, begins_s[number]) + UNIT.transmission_s(size)
            total_s = max(total_s, now_s + rest_s[number])
    return total_s


def test_the_example_of_the_lecture() -> None:
    # one computation needs A alone, one more needs B, another one C; the last one needs D and all before it
    a, b, c, d = range(4)
    graph = [
        GraphOperation(1, (a,)),
        GraphOperation(3, (b,), (0,)),
        GraphOperation(3, (c,), (0,)),
        GraphOperation(1, (d,), (1, 2)),
    ]
    assert tic_order(graph, 4) == [a, b, c, d]
    assert tac_order(graph, [1, 2, 1, 1]) == [a, c, b, d]
    assert tac_order(graph, [1, 1, 2, 1]) == [a, b, c, d]
    # the computation that C lets begin is so short that B's hides C's transfer
    short = [graph[0], graph[1], graph[2]._replace(duration_s=0.1), graph[3]]
    assert tac_order(short, [1, 2, 1, 1]) == [a, b, c, d]


def test_transfers_that_nothing_needs_come_last() -> None:
    graph = [GraphOperation(1, ()), GraphOperation(1, (2,), (0,)), GraphOperation(1, (0,), (1,))]
    assert tic_order(graph, 3) == tac_order(graph, [1, 1, 1]) == [2, 0, 1]


@settings(max_examples=60, deadline=None)
@given(some_layers(6))
def test_orders_against_all_orders(tensors: list[LayerTensor]) -> None:
    found = schedules(tensors, UNIT, slice_bytes=1)
    best_s = min(in_turn_s(tensors, order) for order in permutations(range(len(tensors))))
    fifo_s, least_s = found["fifo"].iteration_s, bound_s(tensors, UNIT)
    assert fifo_s == in_turn_s(tensors, tuple(found["fifo"].order))
    # whole tensors: no order of priorities is worse than FIFO, under which what is needed first is sent last
    assert all(schedule(tensors, [*order], UNIT).iteration_s <= fifo_s for order in permutations(range(len(tensors))))
    for method in ("tic", "tac"):
        assert best_s <= found[method].iteration_s <= fifo_s
    assert least_s <= best_s
    # times are whole bytes here: a slice of one byte is preempted at once, so that P3 is optimal
    assert found["p3"].iteration_s == found["bytescheduler"].iteration_s == least_s


def merged(counts: list[int]) -> Iterator[tuple[int, ...]]:
    """All orders of pieces, of which those of one transfer are alike."""
    if not any(counts):
        yield ()
    for number, count in enumerate(counts):
        if count:
            for rest in merged([left - (place == number) for place, left in enumerate(counts)]):
                yield (number, *rest)


@settings(max_examples=60, deadline=None)
@given(some_layers(4, largest=3))
def test_priority_by_layer_is_optimal_among_all_orders_of_pieces(tensors: list[LayerTensor]) -> None:
    every = (in_turn_s(tensors, order, 1) for order in merged([each.size_bytes for each in tensors]))
    sliced = schedule(tensors, list(range(len(tensors))), UNIT, 1)
    assert sliced.iteration_s == min(every) == bound_s(tensors, UNIT)


@settings(max_examples=100, deadline=None)
@given(
    some_layers(8, 1000), st.sampled_from([0.0, 0.5, 3.0]), st.integers(1, 50), st.floats(0.1, 100),
    st.sampled_from([0.0, 0.2]),
)  # fmt: skip
def test_bound_and_tolerance(
    tensors: list[LayerTensor], latency_s: float, size: int, rate: float, overhead_s: float
) -> None:
    network = LogGP(8 * rate, 1.5, latency_s, overhead_s)
    found, least_s = schedules(tensors, network, size), bound_s(tensors, network)
    for each in found.values():
        assert each.iteration_s >= least_s * (1 - ROUNDING)
        assert sorted(each.order) == list(range(len(tensors)))
    compute_s = sum(each.forward_s + each.backward_s for each in tensors)
    sent_s = network.transmission_s(sum(each.size_bytes for each in tensors))
    assert least_s >= max(compute_s, sent_s)
    assert found["bytescheduler"].iteration_s <= found["p3"].iteration_s
    if not latency_s + overhead_s:
        # a slice that has begun holds up a tensor that becomes ready meanwhile, by its own transmission at most
        assert found["p3"].iteration_s <= (least_s + network.transmission_s(size)) * (1 + ROUNDING)
        assert max(found["tic"].iteration_s, found["tac"].iteration_s) <= found["fifo"].iteration_s * (1 + ROUNDING)
    if all(each.forward_s for each in tensors):
        assert found["tic"].order == found["tac"].order == list(range(len(tensors)))


def test_credit_hides_latency_and_delays_preemption() -> None:
    slow = LogGP(8.0, latency_s=2.0)
    # four messages of 1 s, each 2 s under way: one after the other, and with all in flight
    assert completion_s([4], [0.0], [0], slow, 1) == [12.0]
    assert completion_s([4], [0.0], [0], slow, 1, 4) == [6.0]
    assert completion_s([4], [0.0], [0], slow) == [6.0]
    # the second transfer becomes ready at 0.5 s and has priority: after the message under way, or after the credit
    assert completion_s([4, 1], [0.0, 0.5], [1, 0], UNIT, 1) == [5.0, 2.0]
    assert completion_s([4, 1], [0.0, 0.5], [1, 0], UNIT, 1, 3) == [5.0, 4.0]
    assert completion_s([0, 1], [7.0, 0.0], [0, 1], slow) == [7.0, 3.0]  # nothing to send


def test_overhead_is_not_hidden_by_a_credit() -> None:
    busy = LogGP(8.0, latency_s=2.0, overhead_s=0.5)
    # four messages of 1 s: one at a time each takes 3.5 s; in flight together, only the first overhead shows
    assert completion_s([4], [0.0], [0], busy, 1) == [14.0]
    assert completion_s([4], [0.0], [0], busy, 1, 4) == [6.5]
    # of 0.25 s each: the sender is the bottleneck
    assert completion_s([4], [0.0], [0], busy._replace(rate_bps=32.0), 1, 4) == [4 * 0.5 + 0.25 + 2.0]


def test_collectives() -> None:
    assert network_of(None, 1e9, 1e-6) == LogGP(1e9, 1.0, 2e-6)
    assert network_of(4, 1e9, 1e-6, 2e-6) == pytest.approx(LogGP(1e9, 1.5, 6e-6, 12e-6))


def test_buckets_trade_messages_for_waiting() -> None:
    tensors = [LayerTensor(f"t{i}", 2**20, 1e-3, 2e-3) for i in range(50)]
    # nothing in a bucket of 50 MiB goes before all gradients are ready: 0.1 s, then 50 MiB, then the forward pass
    times = bucket_times(tensors, LogGP(8 * 2**20 * 1000))
    assert times[50 * 2**20] == times[200 * 2**20] == pytest.approx(0.1 + 0.05 + 0.05)
    assert times[2**20] == pytest.approx(0.1 + 0.001 + 0.05)
    assert times[2**20] == schedules(tensors, LogGP(8 * 2**20 * 1000))["fifo"].iteration_s
    late = bucket_times(tensors, LogGP(8 * 2**20 * 1000, latency_s=0.01))
    assert late[10 * 2**20] < late[2**20]
    # the default has a first bucket of 1 MiB: 49 MiB are left for two more
    assert late[25 * 2**20] == pytest.approx(0.1 + 0.024 + 0.01 + 0.05)


def test_tensors_without_bytes_take_the_time_of_their_computation() -> None:
    tensors = [LayerTensor("a", 0, 1.0, 2.0), LayerTensor("b", 0, 3.0, 4.0)]
    assert set(bucket_times(tensors, UNIT).values()) == {10.0}
    assert {each.iteration_s for each in schedules(tensors, UNIT).values()} == {10.0, bound_s(tensors, UNIT)}


@pytest.mark.parametrize(("name", "rate_bps"), [("vgg16", 25e9), ("resnet50", 5e9)])
def test_default_buckets_take_as_long_as_in_the_simulation_of_flows(name: str, rate_bps: float) -> None:
    made = model_workload(profile_named(name), 8)
    simulated = simulate(made, star(8, rate_bps), Algorithms(), iterations=2).iteration_s
    times = bucket_times(workload_tensors(made, "w"), network_of(8, rate_bps, 0.0))
    assert times[BUCKET_BYTES] == pytest.approx(simulated, rel=0.01)  # layers are not split between buckets


def test_tensors_of_a_model() -> None:
    profile = profile_named("vgg16")
    made = model_workload(profile, 4)
    found = workload_tensors(made, "w")
    assert [each.name for each in found[:2]] == ["features.0.weight", "features.2.weight"]
    assert sum(each.size_bytes for each in found) == 4 * profile.parameters
    assert sum(each.forward_s for each in found) == pytest.approx(profile.compute_s / 3, rel=1e-4)
    assert sum(each.backward_s for each in found) == pytest.approx(profile.compute_s * 2 / 3, rel=1e-4)
    scaled = workload_tensors(scale(made, Scaling(parameters=0.5, compute=3.0)), "w")
    assert [each.size_bytes for each in scaled] == pytest.approx([each.size_bytes / 2 for each in found], abs=1)
    assert sum(each.forward_s for each in scaled) == pytest.approx(profile.compute_s / 2, rel=1e-4)


def profiled(parameters: object) -> Workload:
    times = [
        ("input", 100), ("forward a", 1000), ("forward relu", 50), ("forward b", 2000), ("loss", 500),
        ("backward b.weight", 1500), ("backward b.bias", 10), ("backward", 5), ("backward a.0", 2900), ("backward", 20),
        ("optimizer", 300),
    ]  # fmt: skip
    nodes = [Node(i, name, NodeType.COMP, [i - 1][: i - 1], duration_us=us) for i, (name, us) in enumerate(times, 1)]
    nodes.append(Node(99, "bucket", NodeType.COMM_COLL, [8], attributes={"comm_type": 0, "comm_size": 12_000}))
    return Workload([nodes, nodes], {}, {"parameters": parameters})


PARAMETERS = [
    {"name": name, "elements": elements, "element_bytes": 4}
    for name, elements in (("a.0", 1000), ("b.weight", 1900), ("b.bias", 100), ("a.frozen", 7))
]


def test_tensors_of_a_profile() -> None:
    first, second = workload_tensors(profiled(PARAMETERS), "w")
    # input, what follows the last gradient, and the optimizer count to the first forward pass
    assert first == ("a", 4000, pytest.approx(100e-6 + 1000e-6 + 50e-6 + 20e-6 + 300e-6), pytest.approx(2905e-6))
    assert second == ("b", 8000, pytest.approx(2000e-6), pytest.approx(2010e-6))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        (None, "does not say which layer"),
        ([], "as traces of torch.profiler do not either"),
        ([{"name": "c", "elements": 1, "element_bytes": 4}], "does not say which layer"),
        ([{"name": "a"}], "damaged workload.json"),
        ({"a": 1}, "damaged workload.json"),
        (7, "damaged workload.json"),
        ([{"name": "a", "elements": "x", "element_bytes": 4}], "damaged workload.json"),
    ],
)
def test_workloads_without_tensors(parameters: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        workload_tensors(profiled(parameters), "w")


def test_groups_and_missing_all_reduces_are_refused() -> None:
    grouped = profiled(PARAMETERS)
    grouped.groups = {"1": [0, 1]}
    alone = profiled(PARAMETERS)
    alone.traces[0].pop()
    for workload in (grouped, alone):
        with pytest.raises(UsageError, match="does not say which layer's gradients are all-reduced"):
            workload_tensors(workload, "w")


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main(["whatif", *map(str, arguments)]) == code
    done = capsys.readouterr()
    assert code == 0 or (done.err.startswith("ringtap: ") and done.err.count("\n") == 1 and not done.out)
    return done.err if code else done.out


def test_overhead_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text(TABLE)
    words = (
        "--tensors",
        path,
        "--capacity",
        "10gbit",
        "--workers",
        4,
        "--json",
        "--partition",
        "10kB",
        "--credit",
        "1MB",
    )
    hidden, shown = (json.loads(run(capsys, *words, option, "10us")) for option in ("--latency", "--overhead"))
    # one message at a time pays both alike, also in DDP's buckets; a credit hides latency alone
    assert all(hidden[key] == pytest.approx(shown[key]) for key in ("fifo_s", "tic_s", "tac_s", "p3_s", "bound_s"))
    assert [each["iteration_s"] for each in hidden["buckets"]] == pytest.approx(
        [each["iteration_s"] for each in shown["buckets"]]
    )
    assert hidden["bytescheduler_s"] < shown["bytescheduler_s"]


def test_a_table_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text(TABLE)
    item = json.loads(run(capsys, "--tensors", path, "--capacity", "10gbit", "--json"))
    # FIFO: 10 ms, 80 + 6.4 + 3.2 ms, 25 ms; whole tensors by priority: conv1 waits for fc, then 3.2 ms, 6.4 ms, 15 ms
    assert (item["fifo_s"], item["tic_s"], item["tac_s"]) == pytest.approx((0.1246, 0.1182, 0.1182))
    # no preemption is needed but that of fc, which ends last: 10 ms, 89.6 ms and fc's forward pass
    assert item["bound_s"] == pytest.approx(0.1046)
    assert item["bound_s"] <= item["p3_s"] <= item["bound_s"] + 0.00016
    assert item["bytescheduler_s"] <= item["p3_s"]
    assert item["orders"]["fifo"] == ["fc", "conv2", "conv1"]
    assert item["orders"]["tac"] == item["orders"]["p3"] == ["conv1", "conv2", "fc"]
    assert item["completions"]["tac"] == ["fc", "conv1", "conv2"]
    assert item["completions"]["p3"] == ["conv2", "conv1", "fc"]
    assert (item["collective"], item["workers"], item["buckets"]) == ("parameter-server", None, [])
    text = run(capsys, "--tensors", path, "--capacity", "10gbit")
    assert text.startswith("P3 gains 16.1% over FIFO, 0.1046 s instead of 0.1246 s per iteration; no order gains more")
    assert "DDP" not in text
    assert "\nTime of an iteration under each order, on links of 10 Gbit/s:\norder" in text
    fast = run(capsys, "--tensors", path, "--capacity", "100tbit", "--workers", 4)
    assert fast.startswith("FIFO is as good as any other order: 0.075 s per iteration\n")
    # P3 with one slice at a time pays the latency of each; ByteScheduler hides it
    late = json.loads(run(capsys, "--tensors", path, "--capacity", "10gbit", "--latency", "100us", "--json"))
    assert late["bytescheduler_s"] < late["fifo_s"] < late["p3_s"]
    given = ("--partition", "1MB", "--credit", "3MB")
    chosen = json.loads(run(capsys, "--tensors", path, "--capacity", "10gbit", *given, "--json"))
    assert (chosen["partition_bytes"], chosen["credit_bytes"]) == (1_000_000, 3_000_000)


def test_a_workload_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_workload(model_workload(profile_named("vgg16"), 8), tmp_path / "w")
    words = (tmp_path / "w", "--capacity", "25gbit", "--latency", "10us", "--loads", "0:0.9:0.1")
    item = json.loads(run(capsys, *words, "--json"))
    assert (item["collective"], item["workers"], len(item["buckets"])) == ("ring", 8, 8)
    assert [point["load"] for point in item["points"]] == pytest.approx([step / 10 for step in range(10)])
    bounds = [point["bound_s"] for point in item["points"]]
    assert bounds == sorted(bounds)
    for point in item["points"]:
        assert all(point["bound_s"] <= point[f"{method}_s"] for method in METHODS)
    text = run(capsys, *words)
    assert "order, on links of 25 Gbit/s, by the share that cross traffic takes:\nload " in text
    assert text.startswith("ByteScheduler gains 1") and "\nByteScheduler at 90% load gains " in text
    assert "\nDDP's buckets in FIFO order: 25 MiB, its default, is as good as any of 1 to 200 MiB" in text
    server = run(capsys, tmp_path / "w", "--capacity", "25gbit", "--collective", "parameter-server", "--json")
    assert json.loads(server)["workers"] is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: a header line with name, bytes, forward_ms, backward_ms is needed"),
        (b"name,bytes,forward_ms\na,1,1\n", "has no column backward_ms"),
        (HEADER.encode(), "has no tensors"),
        (b"name,bytes,bytes,forward_ms,backward_ms\n", "line 1 has column bytes twice"),
        (f"{HEADER}a,-1,1,1\n".encode(), "line 2: bytes '-1' is not a number from 0"),
        (f"{HEADER}a,1,1,-2\n".encode(), "line 2: backward_ms '-2' is not a number from 0"),
        (f"{HEADER}a,1,1,1\n\nb,nan,1,1\n".encode(), "line 4: bytes 'nan' is not a number from 0"),
        (f"{HEADER}a,1,inf,1\n".encode(), "forward_ms 'inf' is not a number"),
        (f"{HEADER}a,1.5,1,1\n".encode(), "bytes '1.5' is not a whole number"),
        (f"{HEADER}a,1,1\n".encode(), "backward_ms '' is not a number"),
        (f"{HEADER},1,1,1\n".encode(), "name is empty"),
        (f"{HEADER}a,1,1,1\na,1,1,1\n".encode(), "has two tensors 'a'"),
        (f"{HEADER}a,1,0,0\n".encode(), "no layer takes time"),
        (HEADER.encode() + b"".join(b"%d,1,1,1\n" % i for i in range(1001)), "has 1,001 tensors, more than 1,000"),
        (b"x" * (timed_tensors.MAX_FILE_BYTES + 1), "has more than 1,048,576 bytes"),
        (b'name,"' + b"x" * 200_000, "is no table: give a CSV file with name"),
        (b"\x89PNG\r\n\xff\xfe", "is not UTF-8 text"),
        (None, "cannot be read"),
    ],
)
def test_wrong_tables(content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    if content is not None:
        path.write_bytes(content)
    assert words in run(capsys, "--tensors", path, "--capacity", "1gbit", code=2)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--capacity 1gbit", "name a workload or --tensors FILE.csv"),
        ("--tensors t.csv w --capacity 1gbit", "name a workload or --tensors FILE.csv"),
        ("--tensors t.csv", "--capacity is missing"),
        ("--tensors t.csv --capacity 0gbit", "is not a positive rate"),
        ("--tensors t.csv --capacity fast", "--capacity 'fast' is not understood"),
        ("--tensors t.csv --capacity 1gbit --slice 0", "--slice 0 is below 1"),
        ("--tensors t.csv --capacity 1gbit --slice 1", "messages of 4 bytes are more than 1,000,000 in an iteration"),
        ("--tensors t.csv --capacity 1gbit --partition 0B", "--partition 0 is below 1"),
        ("--tensors t.csv --capacity 1gbit --credit 0B", "--credit 0 is below 1"),
        ("--tensors t.csv --capacity 1gbit --collective rings", "did you mean 'ring'?"),
        ("--tensors t.csv --capacity 1gbit --collective ring", "a ring needs --workers N, from 2 to"),
        ("--tensors t.csv --capacity 1gbit --workers 1", "a ring needs --workers N, from 2 to"),
        ("--tensors t.csv --capacity 1gbit --latency=-1s", "--latency '-1s' is not understood"),
        ("--tensors t.csv --capacity 1gbit --loads 0:1:0.1", "has loads outside 0 to 0.99"),
        ("missing --capacity 1gbit", "is not a directory"),
    ],
)
def test_wrong_calls(
    words: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    assert answer in run(capsys, *words.split(), code=2)


def of_traces(path: Path, second: int = 1_000_000, group: str = "") -> Path:
    """A job of two ranks: 10 ms, of which 1 MB is the result, 10 ms beside it, and 1 ms that needs both of 1 MB."""
    comp, coll = NodeType.COMP, NodeType.COMM_COLL
    reduce = {"comm_type": 0, "pg_name": group}
    trace = [
        Node(1, "backward", comp, duration_us=10_000),
        Node(2, "all_reduce0", coll, [1], attributes={**reduce, "comm_size": 1_000_000}),
        Node(3, "backward", comp, [1], duration_us=10_000),
        Node(4, "all_reduce1", coll, [2, 3], attributes={**reduce, "comm_size": second}),
        Node(5, "optimizer", comp, [2, 4], duration_us=1_000),
    ]
    write_workload(Workload([trace, trace], {"1": [0, 1]} if group else {}, {"parameters": []}), path)
    return path


def test_overlap_in_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At 1 Gbit/s, an all-reduce of 1 MB takes 8 ms on two ranks, and 12 ms on four."""
    path = of_traces(tmp_path / "w")
    item = json.loads(run(capsys, path, "--capacity", "1gbit", "--loads", "0:0.5:0.5", "--json"))
    assert (item["recorded_s"], item["serial_s"]) == pytest.approx((0.010 + 0.010 + 0.008 + 0.001, 0.037))
    assert (item["compute_s"], item["communication_s"], item["bound_s"]) == pytest.approx((0.021, 0.016, 0.021))
    # at half the rate, 16 ms each: the second one waits for the first
    busy = item["points"][1]
    assert (busy["load"], busy["recorded_s"], busy["serial_s"]) == pytest.approx((0.5, 0.010 + 0.032 + 0.001, 0.053))
    assert (busy["communication_s"], busy["bound_s"]) == pytest.approx((0.032, 0.032))
    four = json.loads(run(capsys, path, "--capacity", "1gbit", "--workers", 4, "--json"))
    assert (four["recorded_s"], four["communication_s"]) == pytest.approx((0.010 + 0.024 + 0.001, 0.024))
    text = run(capsys, path, "--capacity", "1gbit")
    assert text.startswith("0.029 s per iteration of 2 ranks, of which perfect overlap would save 27.6%; without any")
    assert "Orders of tensors are not compared: " in text
    for option in ("--slice", "--overhead", "--collective"):
        value = {"--slice": "7", "--overhead": "1us", "--collective": "parameter-server"}[option]
        refused = run(capsys, path, "--capacity", "1gbit", option, value, code=2)
        assert f"{option} is of orders of tensors, and " in refused
    grouped = of_traces(tmp_path / "groups", group="1")
    assert json.loads(run(capsys, grouped, "--capacity", "1gbit", "--json"))["serial_s"] == pytest.approx(0.037)
    assert "cannot be told which collectives" in run(capsys, grouped, "--capacity", "1gbit", "--workers", 4, code=2)


def test_without_overlap_ranks_may_wait_for_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both ranks send before they receive: at once they can, one after the other they cannot."""
    traces = []
    for rank in range(2):
        message = {"comm_size": 1_000_000, "comm_tag": 1}
        send = Node(1, "s", NodeType.COMM_SEND, attributes={**message, "comm_dst": 1 - rank})
        receive = Node(2, "r", NodeType.COMM_RECV, attributes={**message, "comm_src": 1 - rank})
        traces.append([send, receive, Node(3, "c", NodeType.COMP, [1, 2], duration_us=2_000)])
    write_workload(Workload(traces), tmp_path / "w")
    item = json.loads(run(capsys, tmp_path / "w", "--capacity", "1gbit", "--json"))
    assert (item["recorded_s"], item["serial_s"]) == (pytest.approx(0.010), None)
    assert "without any overlap" not in run(capsys, tmp_path / "w", "--capacity", "1gbit")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_tables(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    damaged = bytearray(TABLE.encode())
    for _ in range(data.draw(st.integers(1, 6))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place : place + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=5))
        damaged = damaged or bytearray(b",")
    path = tmp_path_factory.getbasetemp() / "damaged.csv"
    path.write_bytes(damaged)
    try:
        found = read_tensors(path)
    except UsageError as error:
        assert str(path) in str(error)
    else:
        assert all(each.size_bytes >= 0 and each.forward_s >= 0 and each.backward_s >= 0 for each in found)
        assert bound_s(found, UNIT) > 0
