"""The tensors of the thesis's models, against the models themselves and against what was published."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap import demand
from ringtap.cli import main
from ringtap.core.errors import UsageError
from ringtap.core.thesis_neural_networks import PROFILES, profile_named, ring_bytes

pytestmark = pytest.mark.computes

# scripts/prepare.sh installs it there
TORCHVISION = str(Path(sys.prefix) / "torchvision")
# torchvision's documentation of its models ("GFLOPS", which counts multiplications); BERT-large: 24 layers of 12 hidden
# by hidden products and of scores over 128 tokens, the transform and the decoder of the masked language model
MULTIPLICATIONS = {
    "vgg16": 15.47e9,
    "resnet50": 4.09e9,
    "densenet161": 7.73e9,
    "bert-large": 24 * (12 * 1024**2 + 2 * 128 * 1024) + 1024**2 + 30_522 * 1024,
}
# prints {name: [[tensor, [size, ...]], ...]} of the models as torchvision and transformers register them
REAL_MODELS = """
import gc, json
gc.disable()
import torch
from ringtap.examples.real_model import BATCHES, build_model
with torch.device("meta"):
    models = {name: build_model(name) for name in BATCHES}
def tensors(model):
    return [[name, list(tensor.shape)] for name, tensor in model.named_parameters()]
print(json.dumps({name: tensors(model) for name, model in models.items()}))
gc.freeze()
"""


@pytest.mark.shares
def test_tensors_are_those_of_the_real_models() -> None:
    paths = [TORCHVISION, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", REAL_MODELS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    real = json.loads(done.stdout)
    assert sorted(real) == sorted(PROFILES)
    for name, profile in PROFILES.items():
        assert [[tensor.name, list(tensor.shape)] for tensor in profile.tensors] == real[name]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("bert-large", 335_174_458),  # Table 2.1 has 31,254,528 more: the decoder's weight a second time
        ("vgg16", 138_357_444 + 100),  # Table 2.1 has 100 fewer
        ("densenet161", 28_681_000),
        ("resnet50", 25_557_032),
    ],
)
def test_parameters_are_those_of_table_2_1(name: str, parameters: int) -> None:
    profile = PROFILES[name]
    assert profile.parameters == parameters == sum(tensor.parameters for tensor in profile.tensors)
    assert all(tensor.bytes == 4 * tensor.parameters for tensor in profile.tensors)


def test_table_2_1_counts_the_decoder_of_bert_large_twice() -> None:
    tensors = {tensor.name: tensor.parameters for tensor in PROFILES["bert-large"].tensors}
    decoder = tensors["bert.embeddings.word_embeddings.weight"]  # the decoder's weight is the embeddings'
    assert PROFILES["bert-large"].parameters + decoder == 366_428_986


@pytest.mark.parametrize("name", PROFILES)
def test_compute_is_what_was_published(name: str) -> None:
    shapes = list(PROFILES[name].shapes())
    assert sum(shape.multiplications for shape in shapes) == pytest.approx(MULTIPLICATIONS[name], rel=0.001)
    tensors = PROFILES[name].tensors
    for shares in ([tensor.forward_share for tensor in tensors], [tensor.backward_share for tensor in tensors]):
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0


def test_the_first_layer_of_an_image_model_needs_no_gradient_of_its_input() -> None:
    for name in ("vgg16", "resnet50", "densenet161"):
        first, *others = [tensor for tensor in PROFILES[name].tensors if tensor.forward_share]
        ratio = others[0].backward_share / others[0].forward_share
        assert first.backward_share / first.forward_share == pytest.approx(ratio / 2)
    bert = [tensor for tensor in PROFILES["bert-large"].tensors if tensor.forward_share]
    assert all(tensor.backward_share == pytest.approx(tensor.forward_share) for tensor in bert)


def test_three_quarters_of_vgg16_are_one_tensor_that_is_ready_early() -> None:
    profile = PROFILES["vgg16"]
    names = [tensor.name for tensor in profile.tensors]
    largest = max(profile.tensors, key=lambda tensor: tensor.parameters)
    assert largest.name == "classifier.0.weight"
    assert largest.parameters / profile.parameters == pytest.approx(0.743, abs=0.001)
    after = profile.tensors[names.index(largest.name) :]
    assert sum(tensor.backward_share for tensor in after) < 0.01


def test_layers_hold_every_tensor_once_in_the_order_in_which_they_run() -> None:
    for profile in PROFILES.values():
        tensors = [tensor for layer in profile.layers for tensor in layer]
        assert sorted(tensors) == sorted(profile.tensors)
        assert all(
            len(tensor.shape) == 1 and not tensor.forward_share for layer in profile.layers for tensor in layer[1:]
        )
    assert PROFILES["bert-large"].layers[-1][0].name == "cls.predictions.bias"
    assert [len(PROFILES[name].layers) for name in ("vgg16", "resnet50", "densenet161")] == [16, 54, 161]


def test_tensors_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demand", "--model", "vgg16", "--tensors", "--json"]) == 0
    item = json.loads(capsys.readouterr().out)
    assert item["parameters"] == sum(tensor["parameters"] for tensor in item["tensors"]) == 138_357_544
    assert item["tensors"][0]["name"] == "features.0.weight"
    assert set(item["tensors"][0]) == {"name", "shape", "parameters", "bytes", "forward_share", "backward_share"}
    assert main(["demand", "--model", "vgg16", "--workers", "3", "--tensors", "--json"]) == 0
    item = json.loads(capsys.readouterr().out)
    assert item["demand_mb"] == pytest.approx(737.9, abs=0.05)
    assert len(item["tensors"]) == 32


def test_tensors_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demand", "--model", "resnet50", "--tensors", "--workers", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ResNet-50: 25,557,032 parameters in 161 tensors"
    assert lines[2].split() == ["conv1.weight", "64", "x", "3", "x", "7", "x", "7", "9,408", "2.89%", "1.46%"]
    assert "Demand per worker and iteration  153.3 MB" in lines


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "vgg19", "--tensors"], "model 'vgg19' is unknown: did you mean 'vgg16'?"),
        (["--params", "100", "--tensors"], "--tensors needs --model"),
        (["--model", "vgg16"], "--workers is missing"),
        (["--model", "vgg16", "--tensors", "--iteration", "1s"], "--workers is missing"),
        (["--workers", "3"], "one of the arguments --params --model is required"),
        (["--model", "vgg16", "--params", "3", "--workers", "3"], "not allowed with argument"),
    ],
)
def test_wrong_questions_for_the_demand(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demand", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_demand_in_python_takes_a_model_by_its_name() -> None:
    assert demand("vgg16", 4).worker_bytes == demand(138_357_544, 4).worker_bytes
    with pytest.raises(UsageError, match="did you mean 'resnet50'"):
        demand("resnet", 4)
    assert profile_named("resnet50") is PROFILES["resnet50"]


@pytest.mark.parametrize(("workers", "times"), [(1, 0), (2, 1), (3, 4 / 3), (4, 1.5)])
def test_a_ring_sends_the_gradients_of_equation_3_1(workers: int, times: float) -> None:
    assert ring_bytes(600.0, workers) == pytest.approx(times * 600)
    if workers > 1:
        assert demand(150, workers).worker_bytes == pytest.approx(times * 600)
