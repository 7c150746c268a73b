"""The models of the thesis themselves, trained for a few iterations: their gradients, and what they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from ringtap.analysis.job.run import Job, open_job
from ringtap.cli import main
from ringtap.core.thesis_neural_networks import PROFILES
from tests.frameworks.ranks import QUICK, launch

pytestmark = [pytest.mark.shares, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "examples" / "real_model.py"
# scripts/prepare.sh installs it there
TORCHVISION = str(Path(sys.prefix) / "torchvision")
LINE = re.compile(
    r"^Iterations (\d+) to (\d+): Iteration Time = ([\d.]+), Samples/sec = ([\d.]+), Loss = ([\d.]+)$", re.M
)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import torch in the worker that runs these tests, and not in all that collect them."""
    global real_model
    from ringtap.examples import real_model


# the job, with BERT-large of two layers instead of 24, which are all alike
TWO_LAYERS = """
import sys, transformers
from ringtap.examples import real_model
whole = transformers.BertConfig
transformers.BertConfig = lambda **sizes: whole(**sizes | {"num_hidden_layers": 2})
real_model.main(sys.argv[1:])
"""
# weights and biases of a layer: attention has four matrices, the rest two, and both end with a normalisation
BERT_LAYER = 4 * (1024 * 1024 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 2 * 2 * 1024


def start(*command: str, **extra: str) -> subprocess.CompletedProcess[str]:
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | extra
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)


def train(run: Path, *arguments: str, script: Sequence[str] = (str(SCRIPT),)) -> tuple[str, Job]:
    """Train on two ranks over loopback, recorded; what the job printed, and its run."""
    job = launch(2, sys.executable, *script, *arguments)
    record = [sys.executable, "-m", "ringtap", "run", "--every", "20ms", "-o", str(run), "--", *job]
    # beside a torch without CUDA, transformers fails where it finds this torchvision
    paths = [str(ROOT), QUICK] if "bert-large" in arguments else [str(ROOT), QUICK, TORCHVISION]
    done = start(*record, PYTHONPATH=os.pathsep.join(paths))
    assert done.returncode == 0, done.stderr
    output = run / "job output.txt"
    output.write_text(done.stdout)
    return done.stdout, open_job(run, output=output)


def parameters_of(name: str, capsys: pytest.CaptureFixture[str]) -> int:
    """Parameters as ``ringtap demand`` counts them."""
    assert main(["demand", "--model", name, "--tensors", "--json"]) == 0
    return int(json.loads(capsys.readouterr().out)["parameters"])


def test_models_and_batches_are_those_of_the_profiles() -> None:
    assert {name: profile.batch for name, profile in PROFILES.items() if profile.library} == real_model.BATCHES


def test_resnet50_moves_the_gradients_that_its_tensors_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "resnet50", "--batch", "2", "--image", "64", "--iterations", "12"]
    printed, job = train(tmp_path / "run", *arguments)
    found = job.summary()
    gradient_bytes = 4 * parameters_of("resnet50", capsys)
    assert found["demand"]["gradient_bytes"] == found["demand"]["synchronised_bytes"] == gradient_bytes
    # by equation 3.1 two ranks send the gradients once. Beside them go gloo's headers and, in each forward pass, the
    # buffers of batch normalisation: 53 layers with means and variances of 26,560 channels in all, 0.2 %. A sample of
    # the sockets every 20 ms bounds the ten iterations to about 1 %.
    assert found["demand"]["sent_bytes"] == pytest.approx(gradient_bytes, rel=0.03)
    lines = LINE.findall(printed)
    assert [line[:2] for line in lines] == [("1", "10"), ("11", "12")]
    for _, _, seconds, rate, _ in lines:
        # of a time with four digits; it has two digits after the point
        assert float(rate) == pytest.approx(2 * 2 / float(seconds), rel=0.001, abs=0.006)
    assert (found["throughput"]["batch"], found["throughput"]["batch_from"]) == (2, "printed")
    assert found["throughput"]["samples_per_s"] == pytest.approx(2 * 2 / found["iterations"]["mean_s"])
    # The job times iterations 11 and 12 at rank 0, and ringtap times them, too. Of the others, the first take several
    # times as long on a busy machine, and ringtap leaves two of them out.
    times_s = job.iterations.set_index("step")["iteration_s"]
    assert 0.7 < float(lines[1][2]) / float(times_s[[10, 11]].mean()) < 1.7


def test_layers_of_bert_large_move_the_gradients_that_their_tensors_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All 24 would train for a minute; that the model has the tensors of its profile is tested without training."""
    job = ["--model", "bert-large", "--batch", "1", "--sequence", "4", "--iterations", "1"]
    printed, recorded = train(tmp_path / "run", *job, script=["-c", TWO_LAYERS])
    found = recorded.summary()
    assert parameters_of("bert-large", capsys) == 335_174_458
    trained = 335_174_458 - 22 * BERT_LAYER
    assert found["demand"]["gradient_bytes"] == 4 * trained
    assert f"Model: bert-large, {trained} parameters, 2 ranks on cpu\nBatch per rank = 1\n" in printed
    assert 0 < float(LINE.findall(printed)[0][4]) < 20  # a loss: ln(30522) is 10.3


def test_without_its_package_a_model_is_refused_in_a_sentence() -> None:
    done = start(sys.executable, "-c", "import sys; sys.modules['torchvision'] = None; from ringtap.examples "
                 "import real_model; real_model.main(['--model', 'vgg16'])", PYTHONPATH=str(ROOT))  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("real_model.py: vgg16 needs torchvision (")
    assert done.stderr.endswith("): pip install torchvision\n")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "vgg19"], "invalid choice: 'vgg19'"),
        (["--model", "vgg16", "--batch", "0"], "--batch must be at least 1"),
        (["--model", "vgg16", "--image", "32"], "--image must be at least 64"),
        (["--model", "bert-large", "--sequence", "513"], "--sequence from 1 to 512"),
        (["--model", "vgg16", "--bucket-bytes", "-1"], "buckets must be at least 1 byte"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        real_model.parse_arguments(arguments)
    assert caught.value.code == 2
    assert says in capsys.readouterr().err
