"""Workloads of profiles that are written here, with known times; real ones are in tests/frameworks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from ringtap.core.errors import UsageError
from ringtap.workload.execution_trace import NodeType
from ringtap.workload.scaling import Scaling, scale
from ringtap.workload.workload import Workload, size_of
from ringtap.workload.workload_from_profile import profile_workload, read_profiles

pytestmark = pytest.mark.computes

MS = 1_000_000
START = 1_795_000_000_000_000_000
UNTIL = START + 10**12


def parameter(name: str, elements: int) -> dict[str, Any]:
    item = {"name": name, "shape": [elements], "elements": elements, "dtype": "float32"}
    return item | {"element_bytes": 4, "device": "cpu", "needs_gradient": True}


def model(ranks: int, **more: Any) -> dict[str, Any]:
    item = {"kind": "model", "format": "ringtap-profile", "version": 1, "ranks": ranks, "modules": ["Net", "a", "b"]}
    item["parameters"] = [parameter("a.weight", 1000), parameter("b.weight", 500)]
    return item | {"batch": 16, "device": "cpu", "ddp": [list(range(ranks))]} | more


def iteration(number: int, events: list[list[Any]], length_ms: float, **more: Any) -> dict[str, Any]:
    begin = START + number * 100 * MS
    moved = [[begin + round(event[0] * MS), *event[1:]] for event in events]
    item = {"kind": "iteration", "begin_ns": begin, "end_ns": begin + round(length_ms * MS)}
    return item | {"mono_ns": 0, "real_ns": 0, "events": moved, "signatures": []} | more


def ddp_events(stretch: float = 1.0) -> list[list[Any]]:
    """One bucket per parameter; the last gradient is ready at 8 ms x stretch."""
    forward = [[1, "enter", 0], [1, "enter", 1], [2, "leave", 1], [2, "enter", 2], [3, "leave", 2], [3, "leave", 0]]
    later: list[list[Any]] = [[3.5, "backward"], [5, "ready", 1], [8, "ready", 0]]
    moved = [[event[0] * stretch, *event[1:]] for event in [*forward, *later]]
    return [*moved, [14, "backward_end"], [14.5, "step", 0], [15.5, "stepped", 0]]


def ddp_ranges(number: int) -> list[list[Any]]:
    begin = START + number * 100 * MS
    # the first one ends within the second one, which ends at 12 ms
    first, second = begin + round(5.1 * MS), begin + round(8.1 * MS)
    return [["gloo:all_reduce", first, 4 * MS, 2000], ["gloo:all_reduce", second, begin + 12 * MS - second, 4000]]


def write(folder: Path, rank: int, lines: list[Any], node: str = "n") -> None:
    path = folder / "nodes" / node / "steps" / f"rank{rank}-{100 + rank}.profile.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def ddp_lines(ranks: int = 2, count: int = 5, **more: Any) -> list[Any]:
    lines = [model(ranks, **more), *(iteration(number, ddp_events(), 15.5) for number in range(count))]
    lines.append(
        {"kind": "ranges", "until_ns": UNTIL, "ranges": [one for number in range(count) for one in ddp_ranges(number)]}
    )
    return [*lines, {"kind": "end", "buckets": [[[1], [0]]]}]


def made(folder: Path) -> Workload:
    return profile_workload(read_profiles(folder), "run")


def test_an_iteration_of_ddp(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, ddp_lines(), f"n{rank}")
    workload = made(tmp_path)
    trace = workload.traces[1]
    rows = [(node.name, node.duration_us, sorted(node.deps)) for node in trace]
    assert rows == [
        ("input", 1000, []), ("forward a", 1000, [1]), ("forward b", 1000, [2]), ("loss", 500, [3]),
        ("backward b.weight", 1500, [4]), ("backward", 100, [5]), ("all_reduce0", 0, [6]),
        ("backward a.weight", 2900, [6]), ("backward", 100, [8]), ("all_reduce1", 0, [9]),
        # from the end of the last all-reduce at 12 ms on; before it, the rank waits from 8 ms on
        ("backward", 2000, [7, 9, 10]), ("between", 500, [11]), ("optimizer", 1000, [12]),
    ]  # fmt: skip
    assert [size_of(node) for node in trace if node.type == NodeType.COMM_COLL] == [2000, 4000]
    about = workload.about
    assert (about["iteration_s"], about["compute_s"]) == pytest.approx((0.0155, 0.0116))
    assert (about["batch"], about["typical_share"]) == (16, 1.0)
    assert [one["elements"] for one in about["parameters"]] == [1000, 500]


def test_a_busy_backend_takes_a_bucket_later(tmp_path: Path) -> None:
    lines = ddp_lines(1, 1, parameters=[parameter(name, 1000) for name in "abc"])
    lines[1]["events"].insert(6, [START + 4 * MS, "ready", 2])
    # two run when the third is handed over at 8 ms; it begins when the first one has ended
    times = [(4.1, 9), (5.1, 13), (9, 13.5)]
    ranges = [["gloo:all_reduce", START + round(b * MS), round((e - b) * MS), 4000] for b, e in times]
    end = {"kind": "end", "buckets": [[[2], [1], [0]]]}
    write(tmp_path, 0, [*lines[:2], {"kind": "ranges", "until_ns": UNTIL, "ranges": ranges}, end])
    trace = made(tmp_path).traces[0]
    third = next(node for node in trace if node.name == "all_reduce2")
    first = next(node for node in trace if node.name == "all_reduce0")
    before = next(node for node in trace if node.name == "backward a")
    assert third.start_us == before.start_us + before.duration_us == 8000
    assert first.id in third.deps


def test_the_typical_iteration_is_that_of_most(tmp_path: Path) -> None:
    lines = ddp_lines(1, 9)
    lines[2]["events"].append([lines[2]["end_ns"], "step", 1])  # another optimizer, once
    lines[3]["events"] = lines[3]["events"][2:]
    lines[4]["real_ns"] = 5 * MS  # the clock was set
    for place in (5, 6):  # slower ones; the median does not see them
        lines[place] = iteration(place - 1, ddp_events(1.02), 15.5)
    write(tmp_path, 0, lines)
    workload = made(tmp_path)
    assert workload.about["typical_share"] == pytest.approx(6 / 9, abs=0.001)
    assert (workload.about["iterations"], workload.about["typical_iterations"]) == (9, 6)
    assert (
        "6 of 9 iterations of rank 0 are used, the most that compute and communicate alike"
        in workload.about["assumptions"]
    )
    assert workload.about["variation"]["iteration"] == 0.0  # of the six alone
    durations = [node.duration_us for node in workload.traces[0] if node.name == "forward a"]
    assert durations == [1000]


def calls(*signatures: list[Any], events: list[list[Any]], ranks: int = 2) -> list[Any]:
    return [model(ranks, ddp=[]), *(iteration(n, events, 20, signatures=list(signatures)) for n in range(3))]


def test_calls_that_block_and_calls_that_return_at_once(tmp_path: Path) -> None:
    signatures: list[list[Any]] = [
        ["all_gather", 100, [0, 1], None, 0, "float32", "torch", False],
        ["all_reduce", 300, [0, 1], None, 0, "float32", "torch", True],
    ]
    events: list[list[Any]] = [
        [2, "call", 0, 5], [6, "called", 5], [7, "call", 1, 6], [7.5, "called", 6], [9, "wait", 6], [11, "waited", 6],
        [12, "call", 1, 7], [12, "called", 7], [13, "step", 0], [14, "stepped", 0],
    ]  # fmt: skip
    for rank in range(2):
        write(tmp_path, rank, calls(*signatures, events=events))
    workload = made(tmp_path)
    rows = [(node.name, node.duration_us, sorted(node.deps)) for node in workload.traces[0]]
    assert rows == [
        ("input", 2000, []), ("all_gather0", 0, [1]), ("input", 1000, [2]), ("all_reduce1", 0, [2, 3]),
        ("input", 2000, [3]), ("input", 1000, [4, 5]), ("all_reduce2", 0, [4, 6]),
        ("input", 1000, [6]), ("optimizer", 1000, [7, 8]), ("input", 6000, [9]),
    ]  # fmt: skip
    assert workload.about["assumptions"] == ["the optimizer waits for communication for which no call waited"]


def test_tensors_of_a_cycle_of_horovod_are_sent_together(tmp_path: Path) -> None:
    signatures = [["all_reduce", 100, [0], None, 0, "float32", "horovod", True]]
    events: list[list[Any]] = []
    for place, at_ms in enumerate((2, 2.4, 2.8, 5, 5.5)):
        events += [[at_ms, "call", 0, place], [at_ms, "called", place]]
    events += [event for place in range(5) for event in ([8, "wait", place], [8, "waited", place])]
    write(tmp_path, 0, calls(*signatures, events=[*events, [9, "step", 0], [10, "stepped", 0]], ranks=1))
    trace = made(tmp_path).traces[0]
    collectives = {node.id: size_of(node) for node in trace if node.type == NodeType.COMM_COLL}
    assert list(collectives.values()) == [300, 200]
    waiting = [node for node in trace if collectives.keys() & node.deps and node.type == NodeType.COMP]
    assert [sorted(collectives.keys() & node.deps) for node in waiting] == [sorted(collectives)]


def test_ranks_agree_on_the_cycles_of_horovod(tmp_path: Path) -> None:
    """On rank 1, which is held up, the third tensor comes later than a cycle takes."""
    signatures = [["all_reduce", 100, [0, 1], None, 0, "float32", "horovod", True]]
    for rank, times_ms in enumerate(((2, 2.4, 2.8), (2, 2.4, 3.8))):
        events: list[list[Any]] = []
        for place, at_ms in enumerate(times_ms):
            events += [[at_ms, "call", 0, place], [at_ms, "called", place]]
        events += [event for place in range(3) for event in ([8, "wait", place], [8, "waited", place])]
        write(tmp_path, rank, calls(*signatures, events=[*events, [9, "step", 0], [10, "stepped", 0]], ranks=2))
    for trace in made(tmp_path).traces:
        assert [size_of(node) for node in trace if node.type == NodeType.COMM_COLL] == [200, 100]


def test_groups_and_messages(tmp_path: Path) -> None:
    for rank in range(4):
        pair = [0, 1] if rank < 2 else [2, 3]
        signatures: list[list[Any]] = [["all_reduce", 100, pair, None, 0, "float32", "torch", False]]
        peer = (rank + 2) % 4
        signatures.append(["send" if rank < 2 else "recv", 64, [0, 1, 2, 3], peer, 9, "float32", "torch", False])
        events: list[list[Any]] = [[1, "call", 0, 0], [2, "called", 0], [3, "call", 1, 1], [4, "called", 1]]
        write(tmp_path, rank, calls(*signatures, events=events, ranks=4))
    workload = made(tmp_path)
    assert sorted(workload.groups.values()) == [[0, 1], [2, 3]]
    kinds = [[node.type for node in trace if node.type != NodeType.COMP] for trace in workload.traces]
    assert kinds == [[NodeType.COMM_COLL, NodeType.COMM_SEND]] * 2 + [[NodeType.COMM_COLL, NodeType.COMM_RECV]] * 2
    with pytest.raises(UsageError, match="cannot be told which collectives are data-parallel"):
        scale(workload, Scaling(8))


def test_what_is_missing_or_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no profile: record one with ringtap run --profile"):
        read_profiles(tmp_path)
    write(tmp_path, 0, ddp_lines())
    with pytest.raises(UsageError, match="profiles of 1 of 2 ranks, and none of rank 1"):
        read_profiles(tmp_path)
    write(tmp_path, 1, ddp_lines()[:-2])
    with pytest.raises(UsageError, match="has no communication of DDP"):
        made(tmp_path)
    write(tmp_path, 1, ddp_lines(device="cuda"))
    with pytest.raises(UsageError, match="computed on cuda"):
        made(tmp_path)
    write(tmp_path, 1, [model(2)])
    with pytest.raises(UsageError, match="has no iteration"):
        made(tmp_path)
    write(tmp_path, 1, ddp_lines(version=2))
    with pytest.raises(UsageError, match="version 2: update ringtap"):
        made(tmp_path)
    lines = ddp_lines()
    for line in lines[1:6]:
        line["real_ns"] = 5 * MS
    write(tmp_path, 1, lines)
    with pytest.raises(UsageError, match="no iteration to use: the clock was set in each"):
        made(tmp_path)
    write(tmp_path, 1, ddp_lines(), "other")
    with pytest.raises(UsageError, match="two profiles of rank 1"):
        made(tmp_path)
    any_source = [["recv", 64, [0], None, 9, "float32", "torch", False]]
    one = tmp_path / "one"
    write(one, 0, calls(*any_source, events=[[1, "call", 0, 0], [2, "called", 0]], ranks=1))
    with pytest.raises(UsageError, match="a receive from any rank"):
        made(one)


def test_a_profile_whose_steps_are_no_iterations_is_refused(tmp_path: Path) -> None:
    """Five steps of the discriminator, then one of the generator."""
    events = [[[1, "enter", 0], [5, "leave", 0], [6, "step", 0], [7, "stepped", 0]] for _ in range(10)]
    for number in (3, 8):
        events[number][:0] = [[0.2, "step", 1], [0.4, "stepped", 1]]
    lines = [model(1, ddp=[]), *(iteration(number, one, 7) for number, one in enumerate(events))]
    write(tmp_path, 0, [*lines, {"kind": "end", "buckets": []}])
    with pytest.raises(UsageError, match=r"its steps are no iterations: call ringtap.step\(\)"):
        made(tmp_path)
    # marked, and recorded from the first mark on
    whole = [[[1, "step", 0], [2, "stepped", 0], [3, "step", 1], [4, "stepped", 1]] for _ in range(3)]
    marked = [model(1, ddp=[]), *(iteration(number + 10, one, 7) for number, one in enumerate(whole))]
    write(tmp_path, 0, [*lines, *marked, {"kind": "end", "buckets": []}])
    assert made(tmp_path).about["iterations"] == 3


def test_damaged_profiles_are_refused_in_a_sentence(tmp_path: Path) -> None:
    random_ = random.Random(5)
    whole = "".join(json.dumps(line) + "\n" for line in ddp_lines(1))
    path = tmp_path / "nodes" / "n" / "steps" / "rank0-1.profile.jsonl"
    path.parent.mkdir(parents=True)
    values = ["null", "-1", "1e400", '"x"', "[]", "{}", "99999999999999999999", "NaN", "true", "0"]
    for _ in range(1500):
        text = whole
        for _ in range(random_.randint(1, 3)):
            place = random_.randrange(len(text))
            kind = random_.randrange(3)
            if kind == 0:
                text = text[:place] + random_.choice('0123456789"[]{},:x\n\x00') + text[place + 1 :]
            elif kind == 1:
                text = text[: place + 1]
            else:
                end = min((text.find(mark, place) for mark in ",]}" if text.find(mark, place) > 0), default=place)
                begin = max(text.rfind(mark, 0, place) for mark in ",[:") + 1
                text = text[:begin] + random_.choice(values) + text[end:]
        path.write_text(text)
        try:
            made(tmp_path)
        except UsageError as error:
            assert "\n" not in str(error)


def test_times_at_another_batch_follow_the_line_of_each_computation(tmp_path: Path) -> None:
    paths = []
    for batch, stretch in ((16, 1.0), (32, 1.5), (64, 2.5)):
        path = tmp_path / str(batch)
        lines = ddp_lines(1, batch=batch)
        for number in range(5):
            events = [[event[0] * (stretch if event[1] != "stepped" else 1), *event[1:]] for event in ddp_events()[:9]]
            end: list[list[Any]] = [[30, "backward_end"], [30.5, "step", 0], [31.5, "stepped", 0]]
            lines[1 + number] = iteration(number, [*events, *end], 31.5)
        lines[6]["ranges"] = [
            ["gloo:all_reduce", START + number * 100 * MS + round(at * MS), MS, size]
            for number in range(5)
            for at, size in ((24, 2000), (28, 4000))
        ]
        write(path, 0, lines)
        paths.append(made(path))
    first, *others = paths
    scaled = scale(first, Scaling(batch=8.0), others)  # 128 samples: 0.5 + batch / 32 times the first
    times = {node.name: node.duration_us for node in scaled.traces[0]}
    assert times["forward a"] == pytest.approx(4500, abs=2)
    assert times["backward b.weight"] == pytest.approx(1500 * 4.5, abs=2)
    assert times["optimizer"] == 1000
    assert scaled.about["batch"] == 128
    assert "by the line of each through batches of 16, 32, 64" in scaled.about["assumptions"][-1]
    assumed = scale(first, Scaling(batch=8.0))
    assert {node.duration_us for node in assumed.traces[0] if node.name == "forward a"} == {8000}
    assert {node.duration_us for node in assumed.traces[0] if node.name == "optimizer"} == {1000}
    with pytest.raises(UsageError, match="a law needs two batch sizes"):
        scale(first, Scaling(batch=2.0), [first])
    with pytest.raises(UsageError, match="workload 2 does not have the computations of the first"):
        scale(first, Scaling(batch=2.0), [Workload([others[0].traces[0][:-1]], about={"batch": 32})])
    del first.about["batch"]
    with pytest.raises(UsageError, match="batch size of a workload is not known"):
        scale(first, Scaling(batch=2.0), others)


def test_bytes_of_uneven_all_to_alls_differ_between_iterations(tmp_path: Path) -> None:
    """Experts get other tokens in each iteration; the bytes are those of the first one."""
    sent = [[[300, 700], [800, 200], [500, 500]], [[0, 64], [64, 0], [32, 32]]]
    for rank in range(2):
        lines = [model(2, ddp=[])]
        for number in range(3):
            splits = sent[rank][number]
            signature = ["all_to_all", sum(splits), [0, 1], None, 0, "float32", "torch", False, splits]
            events: list[list[Any]] = [[2, "call", 0, 5], [6, "called", 5]]
            lines.append(iteration(number, events, 20, signatures=[signature]))
        write(tmp_path, rank, lines)
    workload = made(tmp_path)
    found = [node.attributes["comm_split_bytes"] for trace in workload.traces for node in trace
             if node.type == NodeType.COMM_COLL]  # fmt: skip
    assert found == [[300, 700], [0, 64]]
    assert workload.about["typical_share"] == 1.0
    assert "bytes of uneven all-to-alls: those of the first iteration that is used" in workload.about["assumptions"]


def test_horovod_sends_no_two_all_to_alls_together(tmp_path: Path) -> None:
    signatures = [["all_to_all", 100, [0], None, 0, "float32", "horovod", True, [100]]]
    events: list[list[Any]] = []
    for place, at_ms in enumerate((2, 2.4)):
        events += [[at_ms, "call", 0, place], [at_ms, "called", place]]
    events += [event for place in range(2) for event in ([8, "wait", place], [8, "waited", place])]
    write(tmp_path, 0, calls(*signatures, events=[*events, [9, "step", 0], [10, "stepped", 0]], ranks=1))
    trace = made(tmp_path).traces[0]
    assert [size_of(node) for node in trace if node.type == NodeType.COMM_COLL] == [100, 100]
