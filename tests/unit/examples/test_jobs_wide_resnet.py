"""The Wide ResNet job: its data loader on small files, and whole training runs."""

from __future__ import annotations

import gzip
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import open_records
from tests.frameworks.ranks import QUICK, launch

pytestmark = [pytest.mark.shares, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "wide_resnet.py"
LABELS_MAGIC, IMAGES_MAGIC = 0x801, 0x803  # first numbers of files of labels and of pictures, as for MNIST
IMAGES = (IMAGES_MAGIC, (28, 28))
EPOCH_LINE = re.compile(
    r"^Epoch = (\d+): Cumulative Time = (\d+\.\d{3}), Epoch Time = (\d+\.\d{3}), Images/sec = (\d+\.\d{2}), "
    r"Validation Loss = (\d+\.\d{3}), Validation Accuracy = ([01]\.\d{3})$",
    re.MULTILINE,
)
ALL_REDUCE_LINE = re.compile(r"^Communication Time \(all_reduce\): (\d+\.\d{6}) seconds$", re.MULTILINE)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import torch in the worker that runs these tests, and not in all that collect them."""
    global torch, wide_resnet
    import torch

    from ringtap.examples import wide_resnet


def idx(magic: int, sizes: tuple[int, ...], content: bytes) -> bytes:
    return struct.pack(f">{1 + len(sizes)}I", magic, *sizes) + content


def write_set(folder: Path, count: int = 20) -> None:
    """Four files of ``count`` pictures each; the first and the last are gzipped."""
    pictures = bytes(number % 256 for number in range(count * 28 * 28))
    labels = bytes(number % 10 for number in range(count))
    image_file = idx(IMAGES_MAGIC, (count, 28, 28), pictures)
    label_file = idx(LABELS_MAGIC, (count,), labels)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(image_file))
    (folder / "train-labels-idx1-ubyte").write_bytes(label_file)
    (folder / "t10k-images-idx3-ubyte").write_bytes(image_file)
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(label_file))


def train(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | extra
    command = launch(2, sys.executable, str(SCRIPT), *arguments)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    ("devices", "ranks", "found"),
    [
        (4, 4, ("cuda:3", "nccl")),
        (1, None, ("cuda:0", "nccl")),  # a device for each task of Slurm, which sees no other one
        (2, 4, ("cuda:1", "gloo")),
        (0, 4, ("cpu", "gloo")),
    ],
)
def test_the_fourth_rank_of_a_host(
    monkeypatch: pytest.MonkeyPatch, devices: int, ranks: int | None, found: tuple[str, str]
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    device = wide_resnet.own_device()
    assert (str(device), wide_resnet.own_backend(device)) == found
    assert chosen == [device] * (devices > 0)


@pytest.mark.parametrize("prefix", ["train", "t10k"])
def test_plain_and_gzipped_files_are_read(tmp_path: Path, prefix: str) -> None:
    write_set(tmp_path)
    split = wide_resnet.load_split(tmp_path, prefix)
    assert (split.images.shape, split.images.dtype) == ((20, 28, 28), torch.uint8)
    assert split.images[3].flatten().tolist() == [(3 * 784 + place) % 256 for place in range(784)]
    assert split.labels.tolist() == [number % 10 for number in range(20)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (idx(LABELS_MAGIC, (2, 28, 28), bytes(1568)), "starts with 0x801, where .* 0x803"),
        (idx(IMAGES_MAGIC, (2, 28, 28), bytes(1567)), "announces 2 items .1568 bytes. and holds 1567"),
        (idx(IMAGES_MAGIC, (2, 28, 28), bytes(1569)), "holds 1569"),
        (idx(IMAGES_MAGIC, (2, 32, 32), bytes(2048)), r"items of \[32, 32\], where \[28, 28\]"),
        (idx(IMAGES_MAGIC, (0, 28, 28), b""), "announces 0 items"),
        (b"\x00\x00\x08", "cut short: 3 bytes"),
    ],
    ids=["magic", "truncated", "too long", "shape", "empty", "header"],
)
def test_a_damaged_file_is_named_and_explained(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "pictures"
    path.write_bytes(content)
    with pytest.raises(wide_resnet.DataError, match=f"^{re.escape(str(path))} .*{words}"):
        wide_resnet.read_idx(path, *IMAGES)


@pytest.mark.parametrize("content", [gzip.compress(bytes(5000))[:-9], b"no gzip at all"], ids=["cut", "other"])
def test_a_damaged_gzip_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "pictures.gz"
    path.write_bytes(content)
    with pytest.raises(wide_resnet.DataError, match=r"pictures\.gz cannot be read"):
        wide_resnet.read_idx(path, *IMAGES)


def test_missing_file_unequal_counts_and_unknown_class(tmp_path: Path) -> None:
    write_set(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(idx(LABELS_MAGIC, (19,), bytes(19)))
    with pytest.raises(wide_resnet.DataError, match="20 train pictures, but 19 labels"):
        wide_resnet.load_split(tmp_path, "train")
    labels.write_bytes(idx(LABELS_MAGIC, (20,), bytes([10] * 20)))
    with pytest.raises(wide_resnet.DataError, match="label is 10"):
        wide_resnet.load_split(tmp_path, "train")
    labels.unlink()
    with pytest.raises(wide_resnet.DataError, match="leave out --data"):
        wide_resnet.load_split(tmp_path, "train")


def test_generated_set_repeats_with_its_seed() -> None:
    (one, validation), (again, _), (other, _) = (wide_resnet.generate(60, seed) for seed in (1, 1, 2))
    assert torch.equal(one.images, again.images)
    assert torch.equal(one.labels, again.labels)
    assert not torch.equal(one.images, other.images)
    assert (one.images.shape, one.images.dtype, len(validation.labels)) == ((60, 28, 28), torch.uint8, 10)


@pytest.mark.parametrize(("depth", "width", "parameters"), [(10, 1, 77_562), (16, 2, 691_386)])
def test_model_has_the_layers_of_its_name(depth: int, width: int, parameters: int) -> None:
    model = wide_resnet.build_model(depth, width)
    shortcuts = 3 if width > 1 else 2  # where width or stride changes
    layers = sum(isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear)) for layer in model.modules())
    assert layers - shortcuts == depth - 2
    assert sum(weight.numel() for weight in model.parameters()) == parameters
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_learns_the_generated_set_on_two_ranks(tmp_path: Path) -> None:
    steps = tmp_path / "nodes" / "node" / "steps"
    result = train(
        *["--images", "768", "--depth", "10", "--width", "1", "--batch", "16", "--epochs", "10"],
        PYTHONPATH=os.pathsep.join([str(ROOT / "agents" / "hook"), QUICK]),
        RINGTAP_RUN=str(tmp_path),
        RINGTAP_NODE="node",
        RINGTAP_COLLECT="steps",
    )
    assert result.returncode == 0, result.stderr
    output = result.stdout
    assert "Data: 768 training and 128 validation pictures, generated from seed 1\n" in output
    assert "Model: WRN-10-1, 77562 parameters, 2 ranks on cpu\n" in output
    epochs = [tuple(map(float, line)) for line in EPOCH_LINE.findall(output)]
    last = len(epochs)
    assert [line[0] for line in epochs] == list(range(1, last + 1))
    assert len(ALL_REDUCE_LINE.findall(output)) == last
    assert sum(line[2] for line in epochs) == pytest.approx(epochs[-1][1], abs=0.001 * last)
    assert all(line[3] * line[2] == pytest.approx(768, rel=0.01) for line in epochs)
    # Stops when two epochs in a row have reached the target, and not before.
    reached = [line[5] >= 0.85 for line in epochs]
    assert reached[-2:] == [True, True]
    assert (True, True) not in list(pairwise(reached[:-1]))
    assert output.endswith(f"Early stopping after epoch {last}\n")
    assert sorted((f.about["rank"], f.count) for f in map(open_records, steps.glob("*.rec"))) == [
        (0, last * 24),
        (1, last * 24),
    ]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is not a rank of a job, and has no device but its CPU."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_one_process_trains_from_files_with_a_loader_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_set(tmp_path)
    small = ["--epochs", "1", "--batch", "8", "--depth", "10", "--width", "1"]
    wide_resnet.main(["--data", str(tmp_path), "--workers", "1", *small])
    output = capsys.readouterr().out
    assert f"20 training and 20 validation pictures, read from {tmp_path}\n" in output
    ((_, _, epoch_s, rate, _, _),) = EPOCH_LINE.findall(output)
    assert float(rate) * float(epoch_s) == pytest.approx(16, rel=0.05)  # the last, incomplete batch is left out


@pytest.mark.usefixtures("alone")
def test_a_data_folder_at_fault_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^wide_resnet\.py: .* has no train-images-idx3-ubyte"):
        wide_resnet.main(["--data", str(tmp_path)])


@pytest.mark.parametrize(
    "arguments", [["--depth", "11"], ["--depth", "4"], ["--batch", "0"], ["--patience", "0"], ["--workers", "-1"]]
)
def test_wrong_options_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        wide_resnet.parse_arguments(arguments)
    assert ended.value.code == 2
    assert "must be" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("nodes", "first"), [("n[01-03,07]", "n01"), ("n5", "n5"), ("a1,b[2-3]", "a1"), ("gra[7,9]", "gra7")]
)
def test_ranks_of_srun_meet_at_the_first_node(nodes: str, first: str) -> None:
    task = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456"}
    found = wide_resnet.variables_of_srun(task | {"SLURM_STEP_NODELIST": nodes})
    expected = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": first, "MASTER_PORT": "23456"}
    assert found == expected
    assert wide_resnet.variables_of_srun(found | task) == {}, "a launcher's come first"
    assert wide_resnet.variables_of_srun({"SLURM_STEP_NUM_TASKS": "1"}) == {}
