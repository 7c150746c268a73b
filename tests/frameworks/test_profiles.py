"""Profiles of real jobs under ``ringtap run --profile``, and the workloads made of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ringtap.core.errors import UsageError
from ringtap.workload.execution_trace import Collective, Node, NodeType
from ringtap.workload.lowering import Algorithms, lower
from ringtap.workload.scaling import Scaling, scale
from ringtap.workload.workload import Workload, carried_out_as, kind_of, peer_of, read_workload, size_of
from ringtap.workload.workload_from_profile import RankProfile, profile_workload, read_profiles
from tests.frameworks.ranks import RecordedInterpreter, WarmInterpreter, launch, quick, recorded_interpreter

pytestmark = [pytest.mark.shares, pytest.mark.together("frameworks")]

COLLECT = ["--collect", "none", "--profile"]
JOB = Path(__file__).resolve().parent / "jobs" / "profiled.py"
RINGTAP = [sys.executable, "-m", "ringtap"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PARAMETERS = 84_488  # of the small model
# gloo puts 48 bytes before each message, and sends two such headers more: that it is ready to send, and to receive.
# In an all-reduce over two ranks, each rank sends and receives four messages; in a broadcast, rank 0 sends one.
GLOO_HEADER_BYTES = 48
GLOO_HEADERS = {Collective.ALL_REDUCE: 4 * 3, Collective.BROADCAST: 2}


@dataclass(frozen=True)
class Profiled:
    """A profiled job: its output, its run, the profiles of its ranks, and the workload."""

    kind: str
    output: str
    errors: str
    path: Path

    @property
    def profiles(self) -> list[RankProfile]:
        return read_profiles(self.path)

    @property
    def workload(self) -> Workload:
        return profile_workload(self.profiles, "test")


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RINGTAP_")}
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
    return inherited | own | quick()


def run(command: list[str], code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode == 0) == (code == 0), done.stdout + done.stderr
    return done


@dataclass(frozen=True)
class Profiling:
    """Profiles jobs of ranks that need not import torch."""

    interpreter: RecordedInterpreter

    def __call__(self, folder: Path, kind: str, iterations: int = 30, ranks: int = 2) -> Profiled:
        folder.mkdir(exist_ok=True)
        job, path = [str(JOB), kind, str(iterations)], folder / "run"
        output, errors, said = self.interpreter.run(COLLECT, job, path, environment(), ranks)
        assert "USDT" not in errors, "PyTorch's profiler prints"
        return Profiled(kind, output, said, path)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profiling]:
    with recorded_interpreter(tmp_path_factory.mktemp("warm"), "steps,profile") as found:
        yield Profiling(found)


def launched(folder: Path, kind: str, launcher: list[str], code: int = 0) -> Profiled:
    """Profile a job of ranks as a user starts them."""
    command = [*RINGTAP, "run", *COLLECT, "-o", str(folder / "run"), "--"]
    done = run([*command, *launcher, str(JOB), kind, "30"], code)
    assert "USDT" not in done.stderr, "PyTorch's profiler prints"
    return Profiled(kind, done.stdout, done.stderr, folder / "run")


def communication(trace: list[Node]) -> list[tuple[object, int]]:
    """Return kind and bytes of each collective, and the peer and bytes of each message."""
    found: list[tuple[object, int]] = []
    for node in trace:
        if node.type == NodeType.COMM_COLL:
            found.append((kind_of(node), size_of(node)))
        elif node.type in (NodeType.COMM_SEND, NodeType.COMM_RECV):
            found.append((f"{node.type.name} {peer_of(node)}", size_of(node)))
    return found


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> Profiled:
    return launched(tmp_path_factory.mktemp("ddp"), "ddp", TORCHRUN)


def check_unharmed(done: Profiled, warm: WarmInterpreter) -> None:
    """The same digest as without ringtap, and no word of the recorder about a failure."""
    plain, _ = warm.run([str(JOB), done.kind, "30"], done.path.parent / "plain", environment(), 2)
    assert plain.startswith("digest ")
    assert done.output == plain
    assert not list(done.path.glob("nodes/*/steps/hook*.log"))


def test_buckets_of_ddp(ddp: Profiled, warm: WarmInterpreter) -> None:
    check_unharmed(ddp, warm)
    workload = ddp.workload
    # the last layers' bucket first; together all gradients
    assert communication(workload.traces[0]) == [(Collective.ALL_REDUCE, 271_392), (Collective.ALL_REDUCE, 66_560)]
    assert sum(one["elements"] for one in workload.about["parameters"]) == PARAMETERS
    by_name = {node.name: node for node in workload.traces[0]}
    first, second = by_name["all_reduce0"], by_name["all_reduce1"]
    assert first.id < by_name["backward 0.weight"].id < second.id  # begins within the backward pass
    end = next(node for node in workload.traces[0] if {first.id, second.id} <= node.deps)
    assert end.name == "backward"
    assert by_name["optimizer"].id > end.id
    assert [node.name for node in workload.traces[0]][:6] == ["input", *(f"forward {i}" for i in range(5))]
    assert "Next: ringtap workload new -o WORKLOAD --run " in ddp.errors


@pytest.mark.parametrize("kind", ["fsdp", "fully_shard"])
def test_shards_are_gathered_and_scattered(
    profiled: Profiling, tmp_path: Path, warm: WarmInterpreter, kind: str
) -> None:
    done = profiled(tmp_path, kind)
    check_unharmed(done, warm)
    workload = done.workload
    kinds = [one for one, _ in communication(workload.traces[0])]
    if kind == "fsdp":
        assert communication(workload.traces[0]) == [
            (Collective.ALL_GATHER, 4 * PARAMETERS // 2), (Collective.REDUCE_SCATTER, 4 * PARAMETERS),
        ]  # fmt: skip
    else:  # three layers gathered twice but the last one's output, and scattered
        assert kinds.count(Collective.REDUCE_SCATTER) == 3
        assert kinds.count(Collective.ALL_GATHER) in (5, 6)
    assert "reduce_scatter is carried out as all_reduce, as gloo did" in workload.about["assumptions"]
    collectives = [node for node in workload.traces[0] if node.type == NodeType.COMM_COLL]
    scattered = [node for node in collectives if kind_of(node) == Collective.REDUCE_SCATTER]
    assert {carried_out_as(node) for node in scattered} == {Collective.ALL_REDUCE}
    # as a job of four ranks communicates, but for parameters that do not divide by four
    scaled = scale(workload, Scaling(4))
    own = communication(profiled(tmp_path / "4", kind, 10, ranks=4).workload.traces[0])
    found = communication(scaled.traces[0])
    assert [one for one, _ in found] == [one for one, _ in own]
    assert [size for _, size in found] == pytest.approx([size for _, size in own], rel=0.001)


def test_plain_collectives(profiled: Profiling, tmp_path: Path, warm: WarmInterpreter) -> None:
    done = profiled(tmp_path, "collectives")
    check_unharmed(done, warm)
    trace = done.workload.traces[0]
    sizes = [4 * 256 * 64, 4 * 256, 4 * 256 * 256, 4 * 256, 4 * 8 * 256, 4 * 8]
    expected: list[tuple[object, int]] = [(Collective.ALL_REDUCE, size) for size in sizes]
    assert communication(trace) == [*expected, (Collective.BARRIER, 0)]
    reduces = [node for node in trace if node.type == NodeType.COMM_COLL][:-1]
    barrier = next(node for node in trace if node.name.startswith("barrier"))
    waited: set[int] = set()
    for node in trace:
        waited |= node.deps if node.id < barrier.id and node.type == NodeType.COMP else set()
    assert {node.id for node in reduces} <= waited
    optimizer = next(node for node in trace if node.name == "optimizer")
    assert all(barrier.id not in node.deps for node in trace if node.id < barrier.id)
    assert any(barrier.id in node.deps for node in trace if barrier.id < node.id <= optimizer.id)


def test_two_stages_of_a_pipeline(profiled: Profiling, tmp_path: Path, warm: WarmInterpreter) -> None:
    done = profiled(tmp_path, "pipeline")
    check_unharmed(done, warm)
    first, second = (communication(trace) for trace in done.workload.traces)
    assert first == [("COMM_SEND 1", 4 * 32 * 256), ("COMM_RECV 1", 4 * 32 * 256)]
    assert second == [("COMM_RECV 0", 4 * 32 * 256), ("COMM_SEND 0", 4 * 32 * 256)]
    # what the backward pass of rank 0 waited for is no computation
    assert done.workload.about["compute_s"] < done.workload.about["iteration_s"]


def test_a_compiled_job_is_not_compiled_anew(profiled: Profiling, tmp_path: Path, warm: WarmInterpreter) -> None:
    done = profiled(tmp_path, "compiled")
    check_unharmed(done, warm)
    trace = done.workload.traces[0]
    assert communication(trace) == [(Collective.ALL_REDUCE, 4 * PARAMETERS)]
    assert not any(node.name.startswith("forward ") for node in trace)
    assert sum(one["elements"] for one in done.workload.about["parameters"]) == PARAMETERS


@pytest.mark.parametrize("kind", ["scale_model", "wide_resnet"])
def test_bytes_and_order_of_known_models(profiled: Profiling, tmp_path: Path, kind: str) -> None:
    done = profiled(tmp_path, kind)
    profiles, workload = done.profiles, done.workload
    count = 255_570 if kind == "scale_model" else 77_562
    assert sum(one["elements"] for one in workload.about["parameters"]) == count
    gradients = sum(size for one, size in communication(workload.traces[0]) if one == Collective.ALL_REDUCE)
    assert gradients == 4 * count
    # the ready order is that of DDP's buckets
    for profile in profiles:
        (buckets,) = profile.buckets
        of_parameter = {number: place for place, bucket in enumerate(buckets) for number in bucket}
        for iteration in range(len(profile.iterations)):
            places = [
                of_parameter[event.number] for event in profile.iterations[iteration].events if event.code == "ready"
            ]
            assert places == sorted(places)
            assert len(places) == len(profile.parameters)
    sent = float(done.output.split()[1])
    messages = [node for node in lower(workload, Algorithms("ring")).traces[0] if node.type == NodeType.COMM_SEND]
    kinds = [kind_of(node) for node in workload.traces[0] if node.type == NodeType.COMM_COLL]
    headers = GLOO_HEADER_BYTES * sum(GLOO_HEADERS[kind] for kind in kinds)
    assert sum(map(size_of, messages)) == pytest.approx(sent - headers, rel=1e-3)


def test_a_job_that_profiles_itself_keeps_its_profiler(
    profiled: Profiling, tmp_path: Path, warm: WarmInterpreter
) -> None:
    done = profiled(tmp_path, "profiles_itself")
    check_unharmed(done, warm)
    # the iterations before the job's own profiler, in which ringtap's saw the collectives
    assert [size for _, size in communication(done.workload.traces[0])] == [4 * PARAMETERS]


def test_uneven_all_to_alls_have_the_bytes_to_each_rank(
    profiled: Profiling, tmp_path: Path, warm: WarmInterpreter
) -> None:
    """The first recorded iteration is the fourth one: of 32 rows of 32 bytes, rank 0 gets 3 and 13."""
    done = profiled(tmp_path, "experts")
    check_unharmed(done, warm)
    # Sizes repeat after 16 iterations: if they told iterations apart, no more than 2 of 20 would be alike. On a busy
    # machine, 1 of 20 was once seen to differ in something else.
    assert done.workload.about["typical_share"] >= 0.8
    for trace, rows in zip(done.workload.traces, ([3, 29], [13, 19]), strict=True):
        assert communication(trace) == [(Collective.ALL_TO_ALL, 1024)]
        splits = [node.attributes["comm_split_bytes"] for node in trace if node.type == NodeType.COMM_COLL]
        assert splits == [[32 * row for row in rows]]


@pytest.mark.alone(2)
def test_a_trace_of_the_profiler_of_pytorch_gives_the_same_workload(
    profiled: Profiling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACES", str(tmp_path))
    done = profiled(tmp_path, "traces_itself", 20)
    traces = [str(path) for path in sorted(tmp_path.glob("rank*.json.gz"))]
    made = run([*RINGTAP, "workload", "new", "--kineto", *traces, "-o", str(tmp_path / "w")]).stdout
    assert "Assumed: a thread that runs nothing for 0.1 ms until a collective ends waits for it" in made
    traced, own = read_workload(tmp_path / "w"), done.workload
    assert [communication(nodes) for nodes in traced.traces] == [communication(nodes) for nodes in own.traces]
    assert traced.groups == own.groups == {}
    # Of other iterations, in which PyTorch's profiler notes every operation; ranks and threads of gloo share the cores.
    assert 0.4 < traced.about["compute_s"] / own.about["compute_s"] < 2.5


GAN = """\
import ringtap, torch
nets = [torch.nn.Linear(size, size) for size in (50, 60)]
critic, generator = (torch.optim.Adam(net.parameters()) for net in nets)
for _ in range(30):
    for optimizer, net in [(critic, nets[0])] * 5 + [(generator, nets[1])]:
        net(torch.randn(4, net.in_features)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    MARK
"""


def test_iterations_of_several_optimizers_are_marked_or_refused(tmp_path: Path) -> None:
    """The first mark comes after recording began, and the generator's module is found after it."""
    for name, mark in (("plain", "pass"), ("marked", "ringtap.step()")):
        job = [sys.executable, "-c", GAN.replace("MARK", mark)]
        run([*RINGTAP, "run", "--profile", "-o", str(tmp_path / name), "--", *job])
    with pytest.raises(UsageError, match="its steps are no iterations"):
        profile_workload(read_profiles(tmp_path / "plain"), "plain")
    (profile,) = read_profiles(tmp_path / "marked")
    assert {sum(event.code == "stepped" for event in one.events) for one in profile.iterations} == {7}  # and the mark
    about = profile_workload([profile], "marked").about
    assert sum(one["elements"] for one in about["parameters"]) == 50 * 51 + 60 * 61


def test_a_killed_job_keeps_what_was_recorded(tmp_path: Path) -> None:
    done = launched(tmp_path, "is_killed", launch(2, sys.executable), code=1)
    assert len(done.profiles[0].iterations) == 7  # of ten, three of warm-up
    made = run([*RINGTAP, "workload", "new", "--run", str(done.path), "-o", str(tmp_path / "w")], code=2)
    assert "has no communication of DDP" in made.stderr
    assert made.stderr.count("\n") == 1


def test_from_the_command_line_to_a_simulation(tmp_path: Path, ddp: Profiled) -> None:
    path = str(tmp_path / "w")
    made = run([*RINGTAP, "workload", "new", "--run", str(ddp.path), "-o", path]).stdout
    assert made.startswith("2 ranks: 84,488 parameters in 6 tensors, 2 collectives of 338 kB")
    run([*RINGTAP, "workload", "scale", path, "--workers", "8", "-o", f"{path}8"])
    network = [f"{path}8", "--capacity", "25gbit"]
    assert "Critical path: " in run([*RINGTAP, "workload", "show", *network]).stdout
    shown: dict[str, Any] = json.loads(run([*RINGTAP, "workload", "show", *network, "--json"]).stdout)
    found: dict[str, Any] = json.loads(run([*RINGTAP, "workload", "simulate", *network, "--json"]).stdout)
    assert found["ranks"] == 8
    # the computations of a rank come one after the other, and the last one waits for the collectives
    assert found["points"][0]["iteration_s"] > max(shown["compute_s"]) > 0
