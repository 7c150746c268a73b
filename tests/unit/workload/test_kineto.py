"""Workloads of Kineto traces that are written here, with known times; a real one is in tests/frameworks."""

from __future__ import annotations

import gzip
import json
import random
import shlex
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ringtap.cli import main
from ringtap.core import large_json
from ringtap.core.errors import UsageError
from ringtap.workload import kineto, workload_from_profile
from ringtap.workload.execution_trace import Collective, NodeType
from ringtap.workload.kineto import read_kineto_traces
from ringtap.workload.scaling import Scaling, scale
from ringtap.workload.workload import Workload, carried_out_as, kind_of, peer_of, read_workload, size_of
from ringtap.workload.workload_from_profile import profile_workload

pytestmark = [pytest.mark.computes, pytest.mark.long]

START = 4_756_021_649_552.75  # us, as of a host that runs for weeks
MAIN, BACKWARD = 100, 101
STEP_US = 1000.0


def event(category: str, name: str, begin: float, length: float, thread: int = MAIN, **args: Any) -> dict[str, Any]:
    item = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread}
    return item | {"ts": START + begin, "dur": length, "args": args}


def kernel(launched: float, begin: float, length: float, thread: int = MAIN, name: str = "gemm", **args: Any) -> Any:
    number = round(launched * 10)
    runtime = event("cuda_runtime", "cudaLaunchKernel", launched, 1, thread, correlation=number)
    return [runtime, event("kernel", name, begin, length, 7, correlation=number, **args)]


def stream_wait(at: float, thread: int = BACKWARD) -> dict[str, Any]:
    return event("cuda_runtime", "cudaStreamWaitEvent", at, 1, thread, correlation=round(at * 10))


def metadata(kind: str, elements: int, dtype: str = "Float", ranks: Any = (0, 1), **more: Any) -> dict[str, Any]:
    item = {"Collective name": kind, "In msg nelems": elements, "dtype": dtype, "Group size": len(ranks)}
    return item | {"Process Group Name": "0", "Process Group Ranks": str(list(ranks))} | more


def nccl(launched: float, begin: float, length: float, **args: Any) -> list[Any]:
    """A collective of NCCL with the waits that are part of its launch."""
    launch = kernel(launched, begin, length, BACKWARD, "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", **args)
    call = event("cpu_op", "record_param_comms", launched - 3, 6, BACKWARD, **args)
    return [call, stream_wait(launched - 2), *launch, stream_wait(launched + 2)]


def gpu_step(number: int) -> list[Any]:
    """Two buckets of DDP: the first within the backward pass, the second longer than it."""
    at = number * STEP_US
    backward = [
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", at + 60, 10, BACKWARD),
        *kernel(at + 62, at + 220, 180, BACKWARD),  # until 400
        *nccl(at + 80, at + 401, 150, **metadata("allreduce", 1000)),
        *kernel(at + 92, at + 400, 200, BACKWARD),  # until 600
        *nccl(at + 100, at + 601, 199, **metadata("allreduce", 500, "BFloat16")),
        stream_wait(at + 110),
        stream_wait(at + 112),
    ]
    optimizer = [event("user_annotation", "Optimizer.step#SGD.step", at + 120, 20), *kernel(at + 125, at + 802, 98)]
    step = event("user_annotation", f"ProfilerStep#{number}", at, STEP_US - 5)
    return [step, *kernel(at + 20, at + 100, 100), *kernel(at + 30, at + 210, 10), *backward, *optimizer]


def trace(events: list[Any], rank: int = 0, ranks: int = 2, **more: Any) -> dict[str, Any]:
    info = {"backend": "nccl", "rank": rank, "world_size": ranks, "pg_config": [{"pg_name": "0", "ranks": []}]}
    return {"schemaVersion": 1, "distributedInfo": info | more, "traceEvents": events, "traceName": "t"}


def gpu_events(steps: int = 3) -> list[Any]:
    meta = {"ph": "M", "name": "process_name", "args": {"name": "python"}}
    return [meta, *(one for number in range(steps) for one in gpu_step(number))]


def write(path: Path, item: Any) -> Path:
    data = json.dumps(item).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def made(*paths: Path, execution_traces: tuple[Path, ...] = ()) -> Workload:
    return profile_workload(read_kineto_traces(paths, execution_traces), "run")


def of_one_rank(folder: Path, events: list[Any], **more: Any) -> Workload:
    return made(write(folder / "one.json", trace(events, ranks=1, **more)))


def rows(workload: Workload, rank: int = 0) -> list[tuple[str, int, list[int]]]:
    return [(node.name, node.duration_us, sorted(node.deps)) for node in workload.traces[rank]]


def communication(workload: Workload, rank: int = 0) -> list[tuple[Any, int]]:
    sized = [node for node in workload.traces[rank] if node.type == NodeType.COMM_COLL]
    return [(kind_of(node), size_of(node)) for node in sized]


def test_buckets_of_ddp_on_gpus(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{rank}.json{'.gz' * rank}", trace(gpu_events(), rank)) for rank in range(2)]
    workload = made(*reversed(paths))
    assert communication(workload, 1) == [(Collective.ALL_REDUCE, 4000), (Collective.ALL_REDUCE, 1000)]
    # From the end of the last kernel before, 900, the host computes until 1100; from 800 on the optimizer can run.
    assert rows(workload) == [
        ("forward", 320, []), ("backward", 180, [1]), ("all_reduce0", 0, [2]), ("backward", 200, [2]),
        ("all_reduce1", 0, [3, 4]), ("backward", 0, [4]), ("between", 0, [6]), ("optimizer", 100, [3, 5, 7]),
    ]  # fmt: skip
    about = workload.about
    assert about["compute_s"] == 0.0008
    assert (about["iteration_s"], about["typical_share"]) == (0.001, 1.0)
    assert any("the GPU of rank 0 runs 59%" in text for text in about["assumptions"])


def one_gpu_step(number: int, elements: int = 8) -> list[Any]:
    """A kernel of 400 us that begins 20 us after the step, and a broadcast of one rank."""
    at = number * STEP_US
    args = metadata("broadcast", elements, ranks=[0])
    step = event("user_annotation", f"ProfilerStep#{number}", at, STEP_US)
    return [step, *kernel(at + 10, at + 20, 400), *nccl(at + 30, at + 420, 80, **args)]


def test_iterations_of_different_bytes_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [one for number in range(7) for one in one_gpu_step(number, 8 + number)]
    about = of_one_rank(tmp_path, steps).about
    assert (about["iterations"], about["typical_iterations"], about["typical_share"]) == (6, 1, 0.167)
    assert set(about["variation"].values()) == {None}
    assert any("the first of 6 iterations of rank 0 is used alone" in text for text in about["assumptions"])
    alike = [one for number, size in enumerate([1, 8, 9, 8, 7, 8, 6]) for one in one_gpu_step(number, size)]
    write(tmp_path / "one.json", trace(alike, ranks=1))
    assert main(["workload", "new", "--kineto", str(tmp_path / "one.json"), "-o", str(tmp_path / "w")]) == 0
    assert "3 of 6 iterations of rank 0 are used, the most that" in capsys.readouterr().out
    assert main(["workload", "show", str(tmp_path / "w")]) == 0
    said = "0.001 s per iteration (median of 3 alike, of 6); standard deviation over mean: iteration 0.0%"
    assert said in capsys.readouterr().out


def test_the_first_iteration_of_a_gpu_has_no_begin(tmp_path: Path) -> None:
    """The host waits 500 us after the last collective of each iteration, also before the first one."""
    about = of_one_rank(tmp_path, [*one_gpu_step(0), *one_gpu_step(1), *one_gpu_step(2)]).about
    assert (about["iterations"], about["iteration_s"], about["compute_s"]) == (2, 0.001, 0.00092)
    assert any("the first iteration of a trace is not used" in text for text in about["assumptions"])
    alone = of_one_rank(tmp_path, one_gpu_step(0)).about
    assert (alone["iterations"], alone["iteration_s"]) == (1, 0.0005)
    assert any("a trace of one iteration has no time between" in text for text in alone["assumptions"])


def test_what_was_launched_before_a_trace_is_left_out(tmp_path: Path) -> None:
    """GPUs may be more than an iteration behind the host."""
    steps = [*one_gpu_step(0), *one_gpu_step(1), *one_gpu_step(2)]
    late = [one | {"ts": one["ts"] + 3000} if one["cat"] == "kernel" else one for one in steps]
    earlier = [
        event("kernel", "ncclKernel_AllReduce", 1500, 10, 7, correlation=1),
        event("kernel", "gemm", 2500, 500, 7, correlation=2),
    ]
    workload = of_one_rank(tmp_path, [*earlier, *late])
    assert communication(workload) == [(Collective.BROADCAST, 32)]
    assert (workload.about["iteration_s"], workload.about["compute_s"]) == (0.001, 0.00092)
    alone = of_one_rank(tmp_path, [*earlier, *late[: len(late) // 3]]).about
    assert alone["iteration_s"] == 0.0005  # from the end of the earlier kernel on
    assert not any("no time between" in text for text in alone["assumptions"])
    with pytest.raises(UsageError, match="has no collective name and size"):
        of_one_rank(tmp_path, [earlier[0] | {"ts": START + 4000}, *late])


def test_an_annotation_counts_once(tmp_path: Path) -> None:
    """As older versions write it, a stream of the GPU has the annotations again; and the host's may be there twice."""
    events = gpu_events()
    again = [one for one in events if one.get("cat") == "user_annotation"]
    stream = [one | {"tid": 7, "ts": one["ts"] + 5} for one in again]
    workload = made(*(write(tmp_path / f"{rank}.json", trace([*again, *stream, *events], rank)) for rank in range(2)))
    plain = made(*(write(tmp_path / f"{rank}.json", trace(events, rank)) for rank in range(2)))
    assert rows(workload) == rows(plain)
    assert workload.about["iterations"] == 2
    other = [one | {"pid": 2} for one in again]
    with pytest.raises(UsageError, match="has the steps of several processes: name one trace per rank"):
        of_one_rank(tmp_path, [*events, *other])


def test_iterations_without_what_others_have_are_refused(tmp_path: Path) -> None:
    """Gradients are summed over four steps of the profiler, and reduced in one."""
    steps = [one for number in range(9) for one in one_gpu_step(number)[: 3 if number % 4 else None]]
    with pytest.raises(
        UsageError, match="communication in 2 of 8 iterations, and most have none: add --steps 4, the number"
    ):
        of_one_rank(tmp_path, steps)
    with pytest.raises(UsageError, match="has no collective in the iterations that can be used"):
        of_one_rank(tmp_path, [*one_gpu_step(0), *one_gpu_step(1)[:3]])


def made_of_steps(path: Path, steps: int) -> Workload:
    return profile_workload(read_kineto_traces([path], steps=steps), "run")


def test_several_steps_of_the_profiler_are_an_iteration(tmp_path: Path) -> None:
    """Gradients are reduced in every fourth step: 0, 4, 8 and 12."""
    alone = [one_gpu_step(number)[: 3 if number % 4 else None] for number in range(13)]
    path = write(tmp_path / "one.json", trace([one for step in alone for one in step], ranks=1))
    workload = made_of_steps(path, 4)  # of steps 1 to 4, 5 to 8 and 9 to 12, and step 0 before them
    assert communication(workload) == [(Collective.BROADCAST, 32)]
    about = workload.about
    # the broadcast ends 500 us after the begin of the last step
    assert (about["iterations"], about["iteration_s"], about["typical_share"]) == (3, 0.004, 1.0)
    assert about["compute_s"] == pytest.approx(0.004 - 80e-6)  # that of the broadcast, for which the GPU waits
    assert "an iteration is 4 steps of the profiler, as --steps says" in about["assumptions"]
    with pytest.raises(UsageError, match="has 13 steps, fewer than the 14 of --steps"):
        made_of_steps(path, 14)
    two = [event("user_annotation", f"Optimizer.step#{each}.step", STEP_US * number + 5 + 2 * each, 1)
           for number in range(13) for each in range(1 + number % 2)]  # fmt: skip
    one_each = [one_gpu_step(number) for number in range(13)]
    write(path, trace([*two, *(one for step in one_each for one in step)], ranks=1))
    with pytest.raises(UsageError, match="so its steps are no iterations: add --steps 2, the number"):
        made(path)
    assert len(communication(made_of_steps(path, 2))) == 2


@pytest.mark.parametrize(("arguments", "says"), [
    (["--steps", "0", "--kineto"], "--steps 0 is below 1"),
    (["--steps", "2", "--run"], "--steps goes with --kineto"),
])  # fmt: skip
def test_wrong_steps_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["workload", "new", *arguments, str(tmp_path), "-o", str(tmp_path / "w")]) == 2
    assert says in capsys.readouterr().err


def sharded_step(number: int, rank: int, described: str | None) -> list[Any]:
    """A layer under FSDP on two ranks of a mesh of 2 x 2: 1000 parameters in bfloat16, gradients in float."""
    at, group = number * STEP_US, [rank % 2, rank % 2 + 2]
    more = {} if described is None else {"Process Group Description": described}
    gather = metadata("_allgather_base", 500, "BFloat16", group, **{"Out msg nelems": 1000, "Process Group Name": "1"})
    scatter = metadata(
        "_reduce_scatter_base", 1000, "Float", group, **{"Out msg nelems": 500, "Process Group Name": "1"}
    )
    activations = metadata(
        "allreduce", 64, "BFloat16", [rank // 2 * 2, rank // 2 * 2 + 1], **{"Process Group Name": "2"}
    )
    return [
        event("user_annotation", f"ProfilerStep#{number}", at, STEP_US),
        *nccl(at + 20, at + 40, 10, **gather | more), *nccl(at + 60, at + 70, 10, **activations),
        *nccl(at + 80, at + 90, 10, **gather | more), *nccl(at + 100, at + 110, 10, **scatter | more),
    ]  # fmt: skip


@pytest.mark.parametrize("described", ["mesh_dp_shard", None])
def test_shards_of_a_mesh_are_scaled(tmp_path: Path, described: str | None) -> None:
    """Among 8 ranks of each data-parallel group, a rank gathers 125 parameters and reduces all gradients as before."""
    paths = []
    for rank in range(4):
        groups = [{"pg_name": "1", "pg_desc": "mesh_dp_shard", "ranks": [rank % 2, rank % 2 + 2]},
                  {"pg_name": "2", "pg_desc": "mesh_tp", "ranks": [rank // 2 * 2, rank // 2 * 2 + 1]}]  # fmt: skip
        events = [one for number in range(2) for one in sharded_step(number, rank, described)]
        paths.append(write(tmp_path / f"{rank}.json", trace(events, rank, 4, pg_config=groups)))
    workload = made(*paths)
    assert communication(workload, 3) == [
        (Collective.ALL_GATHER, 1000), (Collective.ALL_REDUCE, 128), (Collective.ALL_GATHER, 1000),
        (Collective.REDUCE_SCATTER, 4000),
    ]  # fmt: skip
    scaled = scale(workload, Scaling(16))
    assert communication(scaled, 15) == [
        (Collective.ALL_GATHER, 250), (Collective.ALL_REDUCE, 128), (Collective.ALL_GATHER, 250),
        (Collective.REDUCE_SCATTER, 4000),
    ]  # fmt: skip
    members = [list(scaled.members(node)) for node in scaled.traces[15] if node.type == NodeType.COMM_COLL]
    assert members == [[1, 3, 5, 7, 9, 11, 13, 15], [14, 15], *[[1, 3, 5, 7, 9, 11, 13, 15]] * 2]


def test_a_collective_that_began_early_waits_for_less(tmp_path: Path) -> None:
    def step(number: int) -> list[Any]:
        at = number * STEP_US
        first = event("user_annotation", f"ProfilerStep#{number}", at, STEP_US)
        return [first, *kernel(at + 10, at + 20, 400), *nccl(at + 30, at + 120, 100, **one_rank)]

    one_rank = metadata("broadcast", 8, ranks=[0])
    workload = of_one_rank(tmp_path, [*step(0), *step(1)])
    assert [name for name, *_ in rows(workload)] == ["input", "broadcast0", "input", "input"]
    assert rows(workload)[-1][2] == [2, 3]  # an iteration ends when its communication has ended


def test_categories_of_older_versions(tmp_path: Path) -> None:
    former = {
        "cpu_op": "Operator", "user_annotation": "Operator", "kernel": "Kernel", "cuda_runtime": "Runtime",
    }  # fmt: skip
    events = [one | {"cat": former.get(one.get("cat"), "")} for one in gpu_events()]
    paths = [write(tmp_path / f"{rank}.json", trace(events, rank)) for rank in range(2)]
    others = [write(tmp_path / f"new{rank}.json", trace(gpu_events(), rank)) for rank in range(2)]
    assert rows(made(*paths)) == rows(made(*others))


def test_names_may_have_control_characters(tmp_path: Path) -> None:
    text = json.dumps(trace([*one_gpu_step(0), *one_gpu_step(1)], ranks=1))
    (tmp_path / "one.json").write_text(text.replace("gemm", "ge\x01\tmm\n"))
    assert communication(made(tmp_path / "one.json")) == [(Collective.BROADCAST, 32)]


@pytest.mark.parametrize(
    ("name", "dtype", "kind", "size_bytes"),
    [
        ("_allgather_base", "Half", Collective.ALL_GATHER, 2000),
        ("allgather_into_tensor_coalesced", "Float", Collective.ALL_GATHER, 4000),
        ("_reduce_scatter_base", "BFloat16", Collective.REDUCE_SCATTER, 2000),
        ("reduce", "Double", Collective.REDUCE, 8000),
        ("all_to_allv", "Long", Collective.ALL_TO_ALL, 8000),
        ("broadcast", "Float8_e4m3fn", Collective.BROADCAST, 1000),
        ("barrier", "Byte", Collective.BARRIER, 0),
    ],
)
def test_names_and_types_of_pytorch(tmp_path: Path, name: str, dtype: str, kind: Collective, size_bytes: int) -> None:
    step = event("user_annotation", "ProfilerStep#1", 0, STEP_US)
    workload = of_one_rank(tmp_path, [step, *nccl(20, 40, 10, **metadata(name, 1000, dtype, [0]))])
    assert communication(workload) == [(kind, size_bytes)]


def test_groups_and_messages_of_nccl(tmp_path: Path) -> None:
    paths = []
    for rank in range(4):
        pair = [0, 1] if rank < 2 else [2, 3]
        if rank == 3:  # a list that PyTorch has cut short
            reduce = metadata("allreduce", 100, ranks=pair) | {"Process Group Ranks": "[2, ...]"}
        else:
            reduce = metadata("allreduce", 100, ranks=pair)
        peer = {"Dst Rank": rank + 2} if rank < 2 else {"Src Rank": rank - 2}
        message = metadata("send" if rank < 2 else "recv", 64, ranks=range(4), **peer)
        step = event("user_annotation", "ProfilerStep#1", 0, STEP_US)
        events = [step, *nccl(20, 40, 10, **reduce), *nccl(60, 70, 10, **message)]
        groups = [{"pg_name": "0", "ranks": pair}, {"pg_name": "1", "ranks": [0, 1, 2, 3]}]
        paths.append(write(tmp_path / f"{rank}.json", trace(events, rank, 4, pg_config=groups)))
    workload = made(*paths)
    assert sorted(workload.groups.values()) == [[0, 1], [2, 3]]
    messages = [[node for node in nodes if node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV)]
                for nodes in workload.traces]  # fmt: skip
    assert [(peer_of(node), size_of(node)) for (node,) in messages] == [(2, 256), (3, 256), (0, 256), (1, 256)]


@pytest.mark.parametrize("listed", ["[0, 2]", "[0, ...]"])
def test_a_number_of_ranks_that_groups_contradict_is_refused(tmp_path: Path, listed: str) -> None:
    args = metadata("allreduce", 10) | {"Process Group Ranks": listed}
    events = [event("user_annotation", "ProfilerStep#1", 0, STEP_US), *nccl(20, 40, 10, **args)]
    groups = [{"pg_name": "0", "ranks": [0, 2]}, {"pg_name": "1", "ranks": [0, 1, 2, 3]}]
    path = write(tmp_path / "one.json", trace(events, 0, 2, pg_config=groups))
    with pytest.raises(UsageError, match="has a collective of rank 2 in a job of 2 ranks: correct world_size"):
        read_kineto_traces([path], alike=True)


@pytest.mark.parametrize("name", ["ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", "ncclKernelAllReduceCtranDirect<x>"])
def test_nccl2_and_ncclx_have_parameters_without_ranges_and_ranks(tmp_path: Path, name: str) -> None:
    args = metadata("all_reduce", 100)
    del args["Process Group Ranks"]
    step = event("user_annotation", "ProfilerStep#1", 0, STEP_US)
    call = event("cpu_op", "record_param_comms", 17, 6, BACKWARD, **args)
    events = [step, call, *kernel(20, 40, 10, BACKWARD, name)]
    workload = made(*(write(tmp_path / f"{rank}.json", trace(events, rank, 2)) for rank in (0, 1)))
    assert communication(workload) == [(Collective.ALL_REDUCE, 400)]


def test_older_kernels_have_their_sizes_in_the_annotation(tmp_path: Path) -> None:
    step = event("user_annotation", "ProfilerStep#1", 0, STEP_US)
    note = event("user_annotation", "nccl:_all_gather_base", 19, 5, **{"Input Dims": [[8, 4]], "Input type": ["float"]})
    launch = kernel(20, 40, 10, MAIN, "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)")
    again = kernel(21, 51, 10, MAIN, "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWorkElem)")
    assert communication(of_one_rank(tmp_path, [step, note, *launch, *again])) == [(Collective.ALL_GATHER, 128)]
    del note["args"]["Input Dims"]
    with pytest.raises(UsageError, match="no size of 'nccl:_all_gather_base': profile with record_shapes=True"):
        of_one_rank(tmp_path, [step, note, *launch])
    with pytest.raises(UsageError, match="has no collective name and size"):
        of_one_rank(tmp_path, [step, *launch])
    note["args"]["Input Dims"] = [[8, 4]]
    del note["args"]["Input type"]  # as before PyTorch 1.9
    with pytest.raises(UsageError, match="no size of 'nccl:_all_gather_base'"):
        of_one_rank(tmp_path, [step, note, *launch])
    with pytest.raises(UsageError, match="of the type 'Int3': how many bytes is not known"):
        of_one_rank(tmp_path, [step, *nccl(20, 40, 10, **metadata("allreduce", 5, "Int3", [0]))])
    with pytest.raises(UsageError, match="has a collective 'coalesced'"):
        of_one_rank(tmp_path, [step, *nccl(20, 40, 10, **metadata("coalesced", 0))])


def gloo_step(number: int, shapes: bool = True) -> list[Any]:
    """An asynchronous all-reduce that ends while the thread does nothing, and a blocking all-gather."""
    at = number * STEP_US
    dims = {"Input Dims": [[10, 10]], "Input type": ["float"]} if shapes else {}
    values = [{"Concrete Inputs": ["", "", is_async, "-1"]} if shapes else {} for is_async in ("True", "False")]
    ids = [{"Record function id": number * 4 + place + 1} for place in range(4)]
    return [
        event("user_annotation", f"ProfilerStep#{number}", at, STEP_US),
        event("cpu_op", "aten::mm", at, 100),
        event("cpu_op", "c10d::allreduce_", at + 100, 20, **values[0], **ids[0]),
        event("user_annotation", "gloo:all_reduce", at + 110, 390, 200, **dims, **ids[1]),  # until 500
        event("cpu_op", "aten::mm", at + 120, 80),  # until 200
        event("cpu_op", "aten::mm", at + 510, 90),  # until 600
        event("cpu_op", "c10d::allgather_", at + 600, 10, **values[1], **ids[2]),
        event("user_annotation", "gloo:all_gather", at + 605, 45, 200, **dims, **ids[3]),  # until 650
        event("cpu_op", "aten::mm", at + 660, 40),
    ]


def test_gloo_and_the_thread_of_the_training_loop(tmp_path: Path) -> None:
    workload = of_one_rank(tmp_path, [*gloo_step(0), *gloo_step(1)])
    assert rows(workload) == [
        ("input", 100, []), ("all_reduce0", 0, [1]), ("input", 100, [1]), ("input", 100, [2, 3]),
        ("all_gather1", 0, [4]), ("input", 350, [5]),
    ]  # fmt: skip
    assert communication(workload) == [(Collective.ALL_REDUCE, 400), (Collective.ALL_GATHER, 400)]
    # gloo carries out a reduce-scatter as an all-reduce
    scattered = [each | {"name": "c10d::reduce_scatter_"} if each["name"] == "c10d::allreduce_" else each
                 for each in (*gloo_step(0), *gloo_step(1))]  # fmt: skip
    first = next(node for node in of_one_rank(tmp_path, scattered).traces[0] if node.type == NodeType.COMM_COLL)
    assert kind_of(first) == Collective.REDUCE_SCATTER
    assert carried_out_as(first) == Collective.ALL_REDUCE
    silent = event("cpu_op", "c10d::broadcast_", 700, 10)
    known = of_one_rank(tmp_path, [*gloo_step(0), *gloo_step(1), silent])
    assert communication(known) == communication(workload)
    assert {*known.about["assumptions"]} - {*workload.about["assumptions"]} == {
        "calls of torch.distributed for which gloo has no range send nothing"
    }
    two_groups = [{"pg_name": name, "ranks": [0]} for name in "01"]
    assert communication(of_one_rank(tmp_path, [*gloo_step(0), *gloo_step(1)], pg_config=two_groups)) == communication(
        workload
    )
    two_groups[1] = {"pg_name": "1", "ranks": []}
    with pytest.raises(UsageError, match="does not say which ranks take part"):
        of_one_rank(tmp_path, gloo_step(0), pg_config=two_groups)


@pytest.mark.parametrize("category", ["mtia_ccp_events", "hpu_op"])
def test_devices_that_are_no_gpus_are_refused(category: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"is of a device that is no GPU \\({category}\\)"):
        of_one_rank(tmp_path, [*gloo_step(0), event(category, "matmul", 20, 40, 7)])


def test_an_execution_trace_adds_shapes(tmp_path: Path) -> None:
    path = write(tmp_path / "trace.json", trace([*gloo_step(0, False), *gloo_step(1, False)], ranks=1))
    with pytest.raises(UsageError, match="has no size of 'gloo:all_reduce'"):
        made(path)
    nodes = []
    for number in range(2):
        for place, name in enumerate(["c10d::allreduce_", "gloo:all_reduce", "c10d::allgather_", "gloo:all_gather"]):
            values = ["<Object>", place == 0, -1]
            inputs = {"values": values, "shapes": [[[10, 10]]], "types": ["GenericList[Tensor(c10::Half)]"]}
            attributes = [{"name": "rf_id", "type": "uint64", "value": number * 4 + place + 1}]
            nodes.append({"id": len(nodes), "name": name, "inputs": inputs, "attrs": attributes})
    shapes = write(tmp_path / "et.json", {"schema": "1.1.1-chakra.0.0.4", "nodes": nodes})
    workload = made(path, execution_traces=(shapes,))
    assert communication(workload) == [(Collective.ALL_REDUCE, 200), (Collective.ALL_GATHER, 200)]
    assert rows(workload) == rows(of_one_rank(tmp_path, [*gloo_step(0), *gloo_step(1)]))
    former = [
        {"id": node["id"], "name": node["name"], "rf_id": node["attrs"][0]["value"], "inputs": node["inputs"]["values"],
         "input_shapes": node["inputs"]["shapes"], "input_types": node["inputs"]["types"]}
        for node in nodes
    ]  # fmt: skip
    write(shapes, {"schema": "1.0.1", "nodes": former})
    assert rows(made(path, execution_traces=(shapes,))) == rows(workload)
    nodes[0]["name"] = "c10d::broadcast_"
    write(shapes, {"nodes": nodes})
    with pytest.raises(UsageError, match="is of another run: it has 'c10d::broadcast_' for 'c10d::allreduce_'"):
        made(path, execution_traces=(shapes,))
    nodes[0] |= {"name": "c10d::allreduce_", "attrs": [{"name": "rf_id", "type": "uint64", "value": 99}]}
    write(shapes, {"nodes": nodes[:1]})
    with pytest.raises(UsageError, match="its execution trace does not have this one"):
        made(path, execution_traces=(shapes,))
    write(shapes, {"nodes": []})
    with pytest.raises(UsageError, match="is not an execution trace of a distributed job"):
        made(path, execution_traces=(shapes,))
    with pytest.raises(UsageError, match="2 execution traces and 1 Kineto trace"):
        made(path, execution_traces=(shapes, shapes))


PAGE = Path(__file__).resolve().parents[3] / "docs" / "commands" / "workload-new.md"


def test_the_commands_from_8_gpus_to_64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each bucket of the ring crosses each host's link once: 2 x 63/64 of its bytes."""
    section = PAGE.read_text().partition("### From 8 GPUs to 64")[2]
    commands = section.partition("```\n")[2].partition("```")[0].splitlines()
    assert len(commands) == 4
    monkeypatch.chdir(tmp_path)
    Path("traces").mkdir()
    for rank in range(8):
        text = json.dumps(trace(gpu_events(), rank, 8)).replace('"Group size": 2', '"Group size": 8')
        write(Path("traces") / f"worker{rank}.pt.trace.json.gz", json.loads(text))
    said = []
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, command
        said.append(capsys.readouterr().out)
    assert "8 ranks: 2 collectives of 5 kB" in said[0]
    assert "add --gpus-per-node" not in said[0]
    for place, links in ((2, 16), (3, 20)):
        assert "64 ranks on a" in said[place]
        assert f"Bytes per iteration on {links} links: 9.844 kB on each" in said[place]
    assert main(["workload", "new", "--kineto", "traces", "-o", "apart"]) == 0
    assert "if hosts have several GPUs, name their number with --gpus-per-node" in capsys.readouterr().out


def test_some_ranks_may_have_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [write(tmp_path / f"{rank}.json", trace(gpu_events(), rank)) for rank in range(2)]
    words = ["workload", "new", "--alike", "-o", str(tmp_path / "w"), "--kineto", str(paths[1])]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "Assumed: 1 rank without a trace: as rank 1" in said
    assert "the GPU of rank 1 runs 59% of the time" in said
    alike, both = read_workload(tmp_path / "w"), made(*paths)
    assert [rows(alike, rank) for rank in range(2)] == [rows(both, rank) for rank in range(2)]
    large = write(tmp_path / "large.json", trace(gpu_events(), 0, 100_000))
    text = large.read_text().replace('"Group size": 2', '"Group size": 100000')
    large.write_text(text)
    monkeypatch.setattr(workload_from_profile, "MAX_NODES", 799_999)
    (read,) = read_kineto_traces([large], alike=True)
    with pytest.raises(UsageError, match="100,000 ranks have more than 799,999 nodes"):
        profile_workload([read], "run", read.ranks)
    pair = metadata("allreduce", 100, ranks=[0, 1])
    for args, says in (
        (pair, "has collectives of some ranks, so that ranks differ: name the traces of all 4 ranks"),
        (metadata("send", 64, ranks=range(4)) | {"Dst Rank": 1}, "has messages between two ranks"),
    ):
        events = [event("user_annotation", "ProfilerStep#1", 0, STEP_US), *nccl(20, 40, 10, **args)]
        profiles = read_kineto_traces([write(tmp_path / "four.json", trace(events, 0, 4))], alike=True)
        with pytest.raises(UsageError, match=says):
            profile_workload(profiles, "run", profiles[0].ranks)


def test_a_trace_may_say_its_rank_alone(tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        item = trace(gpu_events(), rank)
        item["distributedInfo"] = {"rank": rank}
        paths.append(write(tmp_path / f"{rank}.json", item))
    workload = made(*paths)
    assert workload.ranks == 2
    assert any("as many ranks as there are traces" in text for text in workload.about["assumptions"])
    with pytest.raises(UsageError, match="is of rank 1, but --kineto names 1 trace: name one per rank"):
        made(paths[1])
    with pytest.raises(UsageError, match="does not say how many ranks its job has: add world_size"):
        read_kineto_traces(paths[:1], alike=True)
    third = write(tmp_path / "2.json", trace(gpu_events(), 2, 3))
    with pytest.raises(UsageError, match=r"0.json is of 2 ranks and .*2.json of 3: name the traces of one job"):
        read_kineto_traces([write(paths[0], trace(gpu_events(), 0, 2)), third], alike=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty has no \*.json and no \*.json.gz"):
        made(tmp_path / "empty")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    one = write(tmp_path / "one.json", trace(gpu_events()))
    with pytest.raises(UsageError, match="is of rank 0 of 2, but --kineto names 1 trace: name one per rank"):
        made(one)
    with pytest.raises(UsageError, match="are both of rank 0"):
        made(one, one)
    steps = [each for each in gpu_events() if not each["name"].startswith("ProfilerStep")]
    for item, says in (
        ({"traceEvents": gpu_events()}, 'has no distributedInfo with a rank: .*{"rank": R, "world_size": N}'),
        ({"schema": "1.0.1", "nodes": []}, "is not a Kineto trace, .*: name it with --execution-trace"),
        ({"data": [1]}, "is not a Kineto trace, which has traceEvents: name what torch.profiler exported"),
        (trace(steps, ranks=1), "has no iteration: call step"),
        (trace(gpu_step(0)[:5], ranks=1), "has no kernel of NCCL and no collective of gloo"),
        (
            trace([*gpu_step(0)[:5], event("user_annotation", "gloo:all_reduce", 19, 5)], ranks=1),
            "has kernels of a GPU and collectives of gloo, which have none: use NCCL with GPUs",
        ),
        (
            trace([one for one in gpu_events() if one.get("cat") != "kernel"], ranks=1),
            "profile a distributed job, GPUs too, or unset TORCH_DISTRIBUTED_USE_TORCHCOMMS with gloo",
        ),
        (
            trace([*gpu_step(0)[:5], event("user_annotation", "xccl:all_reduce", 19, 5)], ranks=1),
            "has collectives of xccl: use NCCL, RCCL or gloo",
        ),
        (trace([event("kernel", "k", 0, -1)], ranks=1), "event 1 is damaged .dur is not a number of at least 0"),
        (trace([1], ranks=1), "event 1 is damaged .it is not an object"),
        ([], "it is not a JSON object"),
        ({"traceEvents": {}}, "traceEvents is not a list"),
    ):
        with pytest.raises(UsageError, match=says):
            made(write(tmp_path / "wrong.json", item))
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        made(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot be read: it is not a regular file"):
        made(Path("/dev/zero"))


def test_hostile_files_end_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json.gz"
    whole = gzip.compress(json.dumps(trace(gpu_events(), ranks=1)).encode())
    for data, says in (
        (whole[: len(whole) // 2], "is cut short or damaged"),
        (b'{"a": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"traceEvents": [' + b'{"a":' * 200_000, "nested too deeply"),
        (b'{"traceEvents": [{"name"', "cut short or not JSON"),
        (b'{"traceEvents": [12', "cut short"),
        (b'{"traceEvents": [] "a"', "a comma is missing"),
    ):
        path.write_bytes(data)
        with pytest.raises(UsageError, match=says):
            made(path)
    step = event("user_annotation", "ProfilerStep#1", 0, STEP_US)
    wide = {"Input Dims": [[2**50] * 100_000], "Input type": ["float"]}
    note = event("user_annotation", "nccl:all_reduce", 19, 5, **wide)
    with pytest.raises(UsageError, match="more than 64 dimensions"):
        of_one_rank(tmp_path, [step, note, *kernel(20, 40, 10, MAIN, "ncclKernel_AllReduce")])
    monkeypatch.setattr(kineto, "MAX_EVENTS", 10)
    with pytest.raises(UsageError, match="has more than 10 events: profile fewer iterations"):
        of_one_rank(tmp_path, gpu_events())
    monkeypatch.setattr(large_json, "MAX_BYTES", 1 << 20)
    bomb = zlib.compressobj(wbits=31)
    path.write_bytes(bomb.compress(b'{"a": 1' + b" " * (3 << 20)) + bomb.flush())
    with pytest.raises(UsageError, match="it has more than"):
        made(path)
    monkeypatch.setattr(large_json, "MAX_BYTES", 4 << 30)
    monkeypatch.setattr(large_json, "_ANY_RATIO", 1 << 20)
    with pytest.raises(UsageError, match="it has more than 1 MiB when it is unpacked"):
        made(path)


def test_damaged_traces_are_refused_in_a_sentence(tmp_path: Path) -> None:
    random_ = random.Random(7)
    values = ["null", "-1", "1e400", '"x"', "[]", "{}", "99999999999999999999", "NaN", "true", "0"]
    for events in (gpu_events(), [*gloo_step(0), *gloo_step(1)]):
        whole = (
            json.dumps(trace(events, ranks=1)).replace("[0, 1]", "[0]").replace('"Group size": 2', '"Group size": 1')
        )
        path = write(tmp_path / "trace.json", json.loads(whole))
        assert len(communication(made(path))) == 2  # whole, it can be used
        for number in range(300):
            text = whole
            for _ in range(random_.randint(1, 3)):
                place = random_.randrange(len(text))
                kind = random_.randrange(8)
                if kind < 3:
                    text = text[:place] + random_.choice('0123456789"[]{},:x\n\x00') + text[place + 1 :]
                elif kind == 3:
                    text = text[: place + 1]
                else:
                    end = min((text.find(mark, place) for mark in ",]}" if text.find(mark, place) > 0), default=place)
                    begin = max(text.rfind(mark, 0, place) for mark in ",[:") + 1
                    text = text[:begin] + random_.choice(values) + text[end:]
            path.write_bytes(gzip.compress(text.encode())[: None if number % 9 else -9])
            try:
                made(path)
            except UsageError as error:
                assert "\n" not in str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.text(), JSON, max_size=4), st.lists(JSON, max_size=6), st.integers(1, 40))
def test_members_are_those_of_the_json_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: dict[str, Any], items: list[Any], chunk: int
) -> None:
    monkeypatch.setattr(large_json, "_CHUNK", chunk)
    path = tmp_path / "members.json"
    others.pop("items", None)
    path.write_text(json.dumps(others | {"items": items}, indent=chunk % 3 or None))
    found = list(large_json.members(path, "items"))
    assert [value for key, value in found if key == "items"] == items
    assert {key: value for key, value in found if key != "items"} == others


@pytest.mark.parametrize("chunk", [1, 3, 64, 1 << 20])
def test_a_member_without_a_value_is_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Some versions of PyTorch write a description that is empty like this."""
    monkeypatch.setattr(large_json, "_CHUNK", chunk)
    path = tmp_path / "members.json"
    path.write_text(r'{"items": [{"a": 1, "b": , "c": {"d":}}, 2], "e": {"f": , "g": 3, ":,": "\\\": ,:}", "h" : }}')
    assert list(large_json.members(path, "items")) == [
        ("items", {"a": 1, "b": None, "c": {"d": None}}), ("items", 2),
        ("e", {"f": None, "g": 3, ":,": '\\": ,:}', "h": None}),
    ]  # fmt: skip
    for wrong in ('{"items": [1, , 2]}', '{"items": [{, "a": 1}]}', '{"items": [{"a" , 1}]}', '{"items": [[1,]]}'):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=r"cut short|not JSON"):
            list(large_json.members(path, "items"))


def test_many_members_without_a_value_take_no_longer_than_others(tmp_path: Path) -> None:
    path, count, begin_s = tmp_path / "members.json", 200_000, time.process_time()
    path.write_text('{"e": {' + ", ".join(f'"{number}": ' for number in range(count)) + "}}")
    assert list(large_json.members(path, "items")) == [("e", dict.fromkeys(map(str, range(count))))]
    assert time.process_time() - begin_s < 20  # parsed anew for each of them, it takes minutes


def test_descriptions_may_be_left_out(tmp_path: Path) -> None:
    args = metadata("allreduce", 10, ranks=[0]) | {"Process Group Description": "none"}
    step = event("user_annotation", "ProfilerStep#1", 0, STEP_US)
    text = json.dumps(trace([step, *nccl(20, 40, 10, **args)], ranks=1)).replace('"none"', "")
    (tmp_path / "one.json").write_text(text)
    workload = made(tmp_path / "one.json")
    assert communication(workload) == [(Collective.ALL_REDUCE, 40)]
    assert "group_descriptions" not in workload.about


def test_split_sizes_of_an_all_to_all_are_read(tmp_path: Path) -> None:
    def traces(*splits: str, sent: int = 1000, **more: Any) -> Workload:
        step, paths = event("user_annotation", "ProfilerStep#1", 0, STEP_US), []
        for rank, rows in enumerate(splits):
            exchange = metadata("all_to_allv", sent, ranks=range(2), **{"In split size": rows}, **more)
            paths.append(write(tmp_path / f"{rank}.json", trace([step, *nccl(20, 40, 10, **exchange)], rank, 2)))
        return made(*paths)

    workload = traces("[3, 7]", "[10, 0]")
    assert [node.attributes.get("comm_split_bytes") for nodes in workload.traces for node in nodes
            if node.type == NodeType.COMM_COLL] == [[1200, 2800], [4000, 0]]  # fmt: skip
    even = traces("[5, 5]", "[]", **{"Out msg nelems": 1000})
    assert not any("comm_split_bytes" in node.attributes for nodes in even.traces for node in nodes)
    assert communication(traces("[0, 0]", "[0, 0]", sent=0)) == [(Collective.ALL_TO_ALL, 0)]
    for splits, more in ((["[3, ...]", "[10, 0]"], {}), (["[]", "[]"], {"Out msg nelems": 999})):
        with pytest.raises(UsageError, match=r"0\.json has an all-to-all of 2 ranks with [01] split sizes, so that"):
            traces(*splits, **more)
    step = event("user_annotation", "ProfilerStep#1", 0, STEP_US)
    silent = [step, *nccl(20, 40, 10, **metadata("all_to_all", 1000))]
    with pytest.raises(UsageError, match="of 2 ranks with 0 split sizes"):
        made(*(write(tmp_path / f"{rank}.json", trace(silent, rank, 2)) for rank in range(2)))


def exchange_of_former_pytorch(rows: list[int], tensors: int = 1) -> tuple[list[Any], list[Any]]:
    """An all-to-all of 10 numbers as PyTorch 2.0 traces it, with other ids than those of its execution trace."""
    shapes = [[10 // tensors]] * tensors
    events = [
        event("user_annotation", "ProfilerStep#1", 0, STEP_US),
        event("cpu_op", "c10d::alltoall_base_", 8, 20, BACKWARD, **{"External id": 5}),
        event("cpu_op", "record_param_comms", 10, 18, BACKWARD, **{"External id": 6}),
        event("user_annotation", "nccl:all_to_all", 12, 14, BACKWARD,
              **{"External id": 7, "Input Dims": shapes, "Input type": ["float"] * tensors}),
        *kernel(20, 40, 10, BACKWARD, "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(x)"),
    ]  # fmt: skip
    values = [["<Object>"], [[1, 2], 147, 0, 0, "all_to_allv", rows, [9]], [[1, 2]]]
    names = ["c10d::alltoall_base_", "record_param_comms", "nccl:all_to_all"]
    nodes = [
        {"name": name, "id": place, "rf_id": 2 + 3 * place, "inputs": inputs, "input_shapes": shapes,
         "input_types": ["Tensor(float)"] * tensors}
        for place, (name, inputs) in enumerate(zip(names, values, strict=True))
    ]  # fmt: skip
    return events, nodes


@pytest.mark.parametrize(
    ("rows", "tensors", "sent"), [([3, 7], 1, [12, 28]), ([], 1, None), ([], 2, "with 0 split sizes")]
)
def test_an_execution_trace_adds_split_sizes(tmp_path: Path, rows: list[int], tensors: int, sent: Any) -> None:
    paths, shapes = [], []
    for rank in range(2):
        events, nodes = exchange_of_former_pytorch(rows, tensors)
        paths.append(write(tmp_path / f"{rank}.json", trace(events, rank, 2)))
        shapes.append(write(tmp_path / f"et{rank}.json", {"schema": "1.0.1", "nodes": nodes}))
    with pytest.raises(UsageError, match="--execution-trace has whole lists"):
        made(*paths)
    if isinstance(sent, str):
        with pytest.raises(UsageError, match=sent):
            made(*paths, execution_traces=(*shapes,))
        return
    node = next(node for node in made(*paths, execution_traces=(*shapes,)).traces[1] if node.type == NodeType.COMM_COLL)
    assert (size_of(node), node.attributes.get("comm_split_bytes")) == (40, sent)


def test_an_execution_trace_has_the_whole_of_lists_that_are_cut_short(tmp_path: Path) -> None:
    exchange = metadata("all_to_allv", 10, ranks=range(2)) | {"In split size": "[3, ...]", "Record function id": 4}
    events = [event("user_annotation", "ProfilerStep#1", 0, STEP_US), *nccl(20, 40, 10, **exchange)]
    inputs = {"values": [[], 1, "0", 0, "all_to_allv", [3, 7]], "shapes": [[10]], "types": ["Tensor(float)"]}
    node = {"name": "record_param_comms", "inputs": inputs, "attrs": [{"name": "rf_id", "value": 4}]}
    shapes = write(tmp_path / "et.json", {"nodes": [node]})
    paths = [write(tmp_path / f"{rank}.json", trace(events, rank, 2)) for rank in range(2)]
    with pytest.raises(UsageError, match="of 2 ranks with 1 split sizes"):
        made(*paths)
    found = made(*paths, execution_traces=(shapes, shapes))
    assert found.traces[0][1].attributes["comm_split_bytes"] == [12, 28]


@pytest.mark.parametrize(
    ("inputs", "sent"),
    [
        (["", "", "", "[6, 4]", "[3, 7]", "False", "-1"], [120, 280]),
        (["", "", "", "[]", "[]", "False", "-1"], None),
        ([], "with 0 split sizes"),
    ],
)
def test_split_sizes_of_gloo_are_those_of_the_call(tmp_path: Path, inputs: list[str], sent: Any) -> None:
    dims = {"Input Dims": [[10, 10]], "Input type": ["float"]}
    events = [
        event("user_annotation", "ProfilerStep#0", 0, STEP_US),
        event("cpu_op", "c10d::alltoall_base_", 100, 20, **({"Concrete Inputs": inputs} if inputs else {})),
        event("user_annotation", "gloo:all_to_all", 110, 390, 200, **dims),
        event("cpu_op", "aten::mm", 510, 90),
    ]
    paths = [write(tmp_path / f"{rank}.json", trace(events, rank, 2)) for rank in range(2)]
    if not inputs:
        with pytest.raises(UsageError, match=sent):
            made(*paths)
        return
    node = next(node for node in made(*paths).traces[0] if node.type == NodeType.COMM_COLL)
    assert (size_of(node), node.attributes.get("comm_split_bytes")) == (400, sent)
