"""The scale-model job: its shape in this process, and whole jobs under torchrun with the step recorder riding along."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.core import thesis_neural_networks
from ringtap.core.append_only_logs import RecordFile, open_records
from ringtap.core.thesis_neural_networks import PROFILES, ModelProfile
from tests.frameworks.ranks import QUICK, launch
from tests.unit.agent_processes import ended

pytestmark = [pytest.mark.shares, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[3]
HOOK = ROOT / "agents" / "hook"


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import torch in the worker that runs these tests, and not in all that collect them."""
    global torch, scale_model
    import torch

    from ringtap.examples import scale_model


def start(run: Path, launcher: list[str], *arguments: str) -> subprocess.Popen[str]:
    """Start the job on two ranks over loopback, recorded."""
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    env |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{HOOK}{os.pathsep}{QUICK}",
        "RINGTAP_RUN": str(run),
        "RINGTAP_NODE": "node",
    }
    command = [*launcher, str(ROOT / "examples" / "scale_model.py"), *arguments]
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def by_rank(run: Path, suffix: str = ".rec") -> dict[int, RecordFile]:
    paths = [path for path in run.glob("nodes/node/steps/rank*.rec") if "".join(path.suffixes) == suffix]
    paths = [path for path in paths if path.stat().st_size]  # a new one has no header yet
    return {file.about["rank"]: file for file in map(open_records, paths)}


# ---- in this process


@pytest.mark.parametrize("layers", [1, 16, 50, 161])
def test_equal_layers_add_up_to_the_parameters(layers: int) -> None:
    shapes = scale_model.equal_layers(255_570, layers)
    sizes = [size for shape in shapes for size in shape.sizes]
    assert (sum(sizes), len(sizes)) == (255_570, layers)
    assert max(sizes) - min(sizes) <= 1
    assert sum(shape.forward_share for shape in shapes) == pytest.approx(1)


@pytest.mark.parametrize("scale", [1, 7.5, 100, 5000])
@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_a_model_has_its_tensors_divided_by_the_scale(profile: ModelProfile, scale: float) -> None:
    shapes = scale_model.model_layers(profile.name, scale)
    sizes = [size for shape in shapes for size in shape.sizes]
    assert len(sizes) == len(profile.tensors)
    assert min(sizes) >= 1
    # a tensor that would be smaller than one element takes one; there are fewer of these than tensors
    assert abs(sum(sizes) - profile.parameters / scale) <= (1 if scale <= 100 else len(sizes))
    assert sum(shape.forward_share for shape in shapes) == pytest.approx(1)
    assert sum(shape.backward_share for shape in shapes) == pytest.approx(1)


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=50), st.floats(1, 1000))
def test_scaled_sizes_keep_their_sums(sizes: list[int], scale: float) -> None:
    scaled = scale_model.scaled_sizes(sizes, scale)
    assert min(scaled) >= 1
    given_so_far = 0
    for place, (total, size) in enumerate(zip(accumulate(sizes), scaled, strict=True)):
        given_so_far += size
        # never less than its part, and more only by the elements that small tensors were given
        assert -0.5 <= given_so_far - total / scale <= place + 1


class Clock:
    """A clock on which nothing takes time but sleeps, which end late.

    Attributes:
        now_s: its time.
        late_s: how late a sleep ends.
    """

    def __init__(self) -> None:
        self.now_s, self.late_s = 100.0, 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, time_s: float) -> None:
        self.now_s += time_s + self.late_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the scale model."""
    clock = Clock()
    monkeypatch.setattr(scale_model, "time", clock)
    return clock


def test_a_layer_is_ready_when_its_share_of_the_pass_is_over(clock: Clock) -> None:
    model = scale_model.build_model(scale_model.equal_layers(103, 4), compute_s=0.24)
    ready_s: dict[int, float] = {}
    for place, layer in enumerate(model):
        layer.weights[0].register_post_accumulate_grad_hook(lambda _, place=place: ready_s.update({place: clock.now_s}))
    start_s = clock.now_s
    loss = model(torch.ones(1, requires_grad=True)).sum()
    turn_s = clock.now_s
    loss.backward()
    # a third of the time forward; then 40 ms a layer, the last one first
    assert turn_s - start_s == pytest.approx(0.08)
    assert list(ready_s) == [3, 2, 1, 0]
    assert [moment_s - turn_s for moment_s in ready_s.values()] == pytest.approx([0.04, 0.08, 0.12, 0.16])
    assert [layer.weights[0].grad.numel() for layer in model] == [26, 26, 26, 25]
    assert all(bool(layer.weights[0].grad.abs().sum() > 0) for layer in model)


def test_lateness_of_a_layer_does_not_add_up(clock: Clock) -> None:
    pace = scale_model.Pace(0.1, [1 / 50] * 50)
    start_s, clock.late_s = clock.now_s, 0.002
    for position in range(50):
        pace.wait(position)
    # 50 sleeps that were each 2 ms late would make 0.2 s
    assert 0.1 <= clock.now_s - start_s + 1e-9 < 0.103


def test_a_layer_waits_for_its_gradient_and_not_for_the_code_around_it(clock: Clock) -> None:
    pace = scale_model.Pace(0.4, [0.25] * 4)
    ends_s = []
    for position, gradient_s in enumerate((99.0, 99.0, 100.5, 100.5)):
        clock.now_s = max(clock.now_s, gradient_s) + 0.03  # the code between two layers
        pace.hold(position, gradient_s)
        pace.wait(position)
        ends_s.append(clock.now_s)
    assert ends_s == pytest.approx([100.13, 100.23, 100.6, 100.7])


def test_gradients_differ_between_ranks_and_repeat() -> None:
    layers = scale_model.equal_layers(10, 2)
    one, again, other = (scale_model.build_model(layers, 0.0, rank)[0].gradients[0] for rank in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_layers_take_their_shares_of_the_passes(clock: Clock) -> None:
    shapes = [scale_model.LayerShape((3, 2), 0.25, 0.5), scale_model.LayerShape((4,), 0.75, 0.5)]
    model = scale_model.build_model(shapes, compute_s=0.3)
    ready: list[tuple[int, float]] = []
    for layer in model:
        for weight in layer.weights:
            weight.register_post_accumulate_grad_hook(lambda weight: ready.append((weight.numel(), clock.now_s)))
    loss = model(torch.ones(1, requires_grad=True)).sum()
    turn_s = clock.now_s
    loss.backward()
    assert [size for size, _ in ready] == [4, 2, 3], "the last tensor first, within a layer too"
    # 0.2 s backward, half of it for each layer
    assert [moment_s - turn_s for _, moment_s in ready] == pytest.approx([0.1, 0.2, 0.2])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--layers", "0"],
        ["--layers", "9", "--parameters", "8"],
        ["--compute-s", "-1"],
        ["--bucket-bytes", "0"],
        ["--model", "vgg16", "--layers", "16"],
        ["--model", "vgg16", "--parameters", "16"],
        ["--scale", "0.5"],
    ],
)
def test_wrong_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        scale_model.parse_arguments(arguments)
    assert ended.value.code == 2
    assert "must" in capsys.readouterr().err


def test_an_unknown_model_is_refused_in_a_sentence() -> None:
    with pytest.raises(SystemExit, match="'alexnet' is not a model with known tensors: give --parameters and --layers"):
        scale_model.layers_of(scale_model.parse_arguments(["--model", "alexnet"]))


def test_buckets_are_those_of_a_job_that_asks_for_no_size_unless_it_does() -> None:
    def sizes(*arguments: str) -> tuple[int, int]:
        options = scale_model.parse_arguments(arguments)
        return options.bucket_bytes, options.first_bucket_bytes

    assert sizes() == (262_144, 10_486)
    assert sizes("--model", "vgg16", "--scale", "10") == (2_621_440, 104_858)
    assert sizes("--bucket-bytes", "5000") == (5000, 5000)
    assert sizes("--bucket-bytes", "5000", "--first-bucket-bytes", "70") == (5000, 70)
    own = (scale_model.DEFAULT_BUCKET_BYTES, scale_model.DEFAULT_FIRST_BUCKET_BYTES, scale_model.FORWARD_SHARE)
    assert own == (
        thesis_neural_networks.BUCKET_BYTES,
        thesis_neural_networks.FIRST_BUCKET_BYTES,
        thesis_neural_networks.FORWARD_SHARE,
    )


@pytest.fixture
def group_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RANK", raising=False)
    assert scale_model.join_group() == (0, 1)
    yield
    torch.distributed.destroy_process_group()


def bucket_sizes(layers: list[scale_model.LayerShape], bucket_bytes: int, first_bucket_bytes: int) -> list[int]:
    model = scale_model.distribute(scale_model.build_model(layers, 0.0), bucket_bytes, first_bucket_bytes)
    before = [weight.detach().clone() for weight in model.module.parameters()]
    scale_model.train(model, 11)  # the first runs in one bucket, as with any DDP job, and the log lags behind
    assert all(not torch.equal(old, new) for old, new in zip(before, model.module.parameters(), strict=True))
    return [int(size) for size in model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")]


@pytest.mark.usefixtures("group_of_one")
def test_one_process_alone_trains_in_buckets_of_the_size_asked_for() -> None:
    sizes = bucket_sizes(scale_model.equal_layers(255_570, 50), 250_000, 250_000)
    # The first one too: it is not DDP's 1 MiB, which would hold the whole model.
    assert len(sizes) == 4
    assert all(250_000 <= size < 250_000 + 4 * 5112 for size in sizes[:-1])
    assert sum(sizes) == 4 * 255_570


# rebuilt_bucket_sizes of DDP's log (torch 2.13, default bucket size) after 11 iterations of torchvision's models and of
# transformers' BertForMaskedLM (hidden_size 1024, 24 layers, 16 heads, intermediate_size 4096), in bytes
_BERT_LAYERS = [33591296, 29396992, 37781504]
REAL_BUCKETS = {
    "vgg16": [16388000, 67125248, 411058176, 28315648, 28320768, 2222336],
    "resnet50": [8196000, 31502336, 26255360, 26550272, 9724160],
    "densenet161": [8836000, 26236800, 26343168, 26276736, 26452992, 578304],
    "bert-large": [4328680, 33583104, *_BERT_LAYERS * 11, 33591296, 29396992, 131330048],
}


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("name", PROFILES)
def test_buckets_are_those_of_the_real_model(name: str) -> None:
    sizes = bucket_sizes(scale_model.model_layers(name, 100), 26_214_400 // 100, 10_486)
    real = REAL_BUCKETS[name]
    assert len(sizes) == len(real)
    # DDP closes a bucket between the bias and the weight of a layer in one or the other order; the largest bias of
    # these models has 4096 elements, and each tensor is rounded to whole elements
    for size, real_bytes in zip(sizes, real, strict=True):
        assert abs(size - real_bytes / 100) <= 4 * (4096 / 100 + 2)


# ---- whole jobs


def test_two_ranks_under_torchrun_are_recorded(tmp_path: Path) -> None:
    arguments = ["--parameters", "60000", "--layers", "6", "--compute-s", "0.06", "--bucket-bytes", "80000"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    job = start(tmp_path, [*launcher, "--nproc-per-node", "2"], *arguments, "--iterations", "12")
    with ended(job):
        output, _ = job.communicate(timeout=120)
    assert job.returncode == 0, output
    files = by_rank(tmp_path)
    assert sorted(files) == [0, 1], "the launcher steps nothing and leaves no file"
    assert list(tmp_path.rglob("hook-*.log")) == []
    mean_s = float(re.findall(r"^12 iterations, (\d+\.\d+) s each$", output, re.MULTILINE)[0])
    for rank, file in files.items():
        records = file.tail()
        assert [record[:2] for record in records] == [(step, 0) for step in range(12)]
        assert (file.about["world_size"], file.about["local_rank"]) == (2, rank)
        periods_s = [(right[5] - left[5]) / 1e9 for left, right in pairwise(records)]
        # Sleeps are never short; a shared machine may make them long, so the upper bound only catches compute counted
        # twice or a sleep a bucket.
        assert min(periods_s) > 0.06 - 0.02
        assert 0.06 <= median(periods_s) < 0.18
    # what the job measured itself on rank 0, its first iteration included, is what was recorded
    records = files[0].tail()
    assert (records[-1][5] - records[0][5]) / 1e9 <= 12 * mean_s + 0.05
    ends = [[record[3] for record in files[rank].tail()] for rank in (0, 1)]
    assert all(abs(one - two) < 150_000_000 for one, two in zip(*ends, strict=True)), "ranks go in step"


def test_an_endless_job_is_read_while_it_runs_and_survives_a_killed_rank(tmp_path: Path) -> None:
    arguments = ["--parameters", "2000", "--layers", "2", "--compute-s", "0.01", "--bucket-bytes", "4000"]
    job = start(tmp_path, launch(2, sys.executable), *arguments)
    try:
        limit_s = time.monotonic() + 90
        while len(by_rank(tmp_path)) < 2 or min(file.count for file in by_rank(tmp_path).values()) < 10:
            assert time.monotonic() < limit_s, "no steps were recorded"
            assert job.poll() is None, job.communicate()[0]
            time.sleep(0.1)
        os.kill(by_rank(tmp_path)[1].about["pid"], signal.SIGKILL)
        job.communicate(timeout=60)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode != 0
    for file in by_rank(tmp_path).values():
        assert file.torn_bytes == 0
        assert [record[0] for record in file.tail()] == list(range(file.count))
        assert file.count >= 10


def test_a_rank_may_compute_longer_than_the_others() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    job = [str(ROOT / "examples" / "scale_model.py"), "--parameters", "2000", "--layers", "2", "--iterations", "8"]
    command = [*launcher, "--nproc-per-node", "2", *job, "--compute-s", "0.01", "0.08"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "0.01 and 0.08 s of compute" in done.stdout
    assert float(re.findall(r"8 iterations, (\d+\.\d+) s each", done.stdout)[0]) > 0.08


def test_the_job_ends_at_once_when_told(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / "scale_model.py"), "--compute-s", "0.01"]
    with ended(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)) as job:
        assert job.stdout is not None
        assert job.stdout.readline().startswith(
            "scale model: 1 ranks, 1383574 parameters in 16 layers, 0.01 s of compute"
        )
        start_s = time.monotonic()
        job.terminate()
        assert job.wait(timeout=30) == -signal.SIGTERM  # a shell calls it 143
    assert time.monotonic() - start_s < 5
