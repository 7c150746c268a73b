"""Lists the models of the thesis (Table 2.1) as profiles: their parameter tensors and their compute time.

The tensors follow from the published layer shapes: Simonyan and Zisserman (2015, configuration D) for VGG-16, He et
al. (2016) for ResNet-50, Huang et al. (2017) for DenseNet-161 and Devlin et al. (2019) for BERT-large. Their names and
order are those of torchvision and, for BERT-large, of transformers' BertForMaskedLM.

``compute_s`` is the compute time of a worker in one iteration. It was calibrated on the scale-model testbed
(configuration B, capacity 25 Gbit/s at scale 100, three workers) so that the iteration time without cross traffic is
that of Table 3.1; docs/commands/testbed.md gives the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from ringtap.core.errors import UsageError, did_you_mean

GRADIENT_BYTES = 4  # per parameter, as 32-bit floats
FORWARD_SHARE = 1 / 3  # of the computation of an iteration; a backward pass costs about twice as much
# defaults of torch.nn.parallel.DistributedDataParallel
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20


def ring_bytes(gradient_bytes: float, workers: int) -> float:
    """Return the bytes that each worker sends in an iteration: equation 3.1 of the thesis.

    It is the equation of a ring all-reduce (Patarasuk and Yuan 2009).

    Args:
        gradient_bytes: bytes of all gradients of a worker; `GRADIENT_BYTES` per parameter.
        workers: number of workers, which are the ranks of the job.
    """
    return 2 * (workers - 1) / workers * gradient_bytes


class Tensor(NamedTuple):
    """Parameter tensor of a model.

    Attributes:
        name: name in torchvision or transformers.
        shape: its dimensions.
        parameters: number of its elements.
        bytes: size of its 32-bit gradient.
        forward_share: share of the forward pass's compute, by multiplications; 0 for biases and normalisations.
        backward_share: share of the backward pass's compute, likewise.
    """

    name: str
    shape: tuple[int, ...]
    parameters: int
    bytes: int
    forward_share: float
    backward_share: float


class TensorShape(NamedTuple):
    """Shape of a parameter tensor, and the work that its layer does.

    Attributes:
        name: name in torchvision or transformers.
        shape: its dimensions.
        multiplications: multiplications of the forward pass for one example (BERT-large: for one token).
    """

    name: str
    shape: tuple[int, ...]
    multiplications: int = 0


_Shapes = Iterator[TensorShape]


def _convolution(name: str, outputs: int, inputs: int, kernel: int, side: int) -> TensorShape:
    """Return the weight of a square convolution whose output has ``side`` x ``side`` positions."""
    shape = (outputs, inputs, kernel, kernel)
    return TensorShape(f"{name}.weight", shape, prod(shape) * side * side)


def _linear(name: str, outputs: int, inputs: int) -> _Shapes:
    yield TensorShape(f"{name}.weight", (outputs, inputs), outputs * inputs)
    yield TensorShape(f"{name}.bias", (outputs,))


def _normalisation(name: str, channels: int) -> _Shapes:
    yield TensorShape(f"{name}.weight", (channels,))
    yield TensorShape(f"{name}.bias", (channels,))


def _vgg16() -> _Shapes:
    inputs, position, side = 3, 0, 224
    for outputs, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            yield _convolution(f"features.{position}", outputs, inputs, 3, side)
            yield TensorShape(f"features.{position}.bias", (outputs,))
            inputs, position = outputs, position + 2  # each is followed by a ReLU
        side, position = side // 2, position + 1  # each group by a pooling layer
    yield from _linear("classifier.0", 4096, inputs * side * side)
    yield from _linear("classifier.3", 4096, 4096)
    yield from _linear("classifier.6", 1000, 4096)


def _resnet50() -> _Shapes:
    yield _convolution("conv1", 64, 3, 7, 112)
    yield from _normalisation("bn1", 64)
    inputs, side = 64, 56
    for group, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
        outputs = 4 * width
        for block in range(blocks):
            name, halves = f"layer{group}.{block}", group > 1 and block == 0
            yield _convolution(f"{name}.conv1", width, inputs, 1, side)
            yield from _normalisation(f"{name}.bn1", width)
            side //= 2 if halves else 1  # torchvision halves the side in the 3x3 convolution
            yield _convolution(f"{name}.conv2", width, width, 3, side)
            yield from _normalisation(f"{name}.bn2", width)
            yield _convolution(f"{name}.conv3", outputs, width, 1, side)
            yield from _normalisation(f"{name}.bn3", outputs)
            if block == 0:
                yield _convolution(f"{name}.downsample.0", outputs, inputs, 1, side)
                yield from _normalisation(f"{name}.downsample.1", outputs)
            inputs = outputs
    yield from _linear("fc", 1000, inputs)


def _densenet161() -> _Shapes:
    growth, channels, side = 48, 96, 56
    yield _convolution("features.conv0", channels, 3, 7, 112)
    yield from _normalisation("features.norm0", channels)
    blocks = (6, 12, 36, 24)
    for block, layers in enumerate(blocks, 1):
        for layer in range(1, layers + 1):
            name = f"features.denseblock{block}.denselayer{layer}"
            yield from _normalisation(f"{name}.norm1", channels)
            yield _convolution(f"{name}.conv1", 4 * growth, channels, 1, side)
            yield from _normalisation(f"{name}.norm2", 4 * growth)
            yield _convolution(f"{name}.conv2", growth, 4 * growth, 3, side)
            channels += growth
        if block < len(blocks):
            yield from _normalisation(f"features.transition{block}.norm", channels)
            yield _convolution(f"features.transition{block}.conv", channels // 2, channels, 1, side)
            channels, side = channels // 2, side // 2
    yield from _normalisation("features.norm5", channels)
    yield from _linear("classifier", 1000, channels)


def _bert_large() -> _Shapes:
    hidden, inner, vocabulary, positions = 1024, 4096, 30_522, 512
    sequence = 128  # of nine tenths of the pre-training (Devlin et al., appendix A.2)
    embeddings = "bert.embeddings"
    yield TensorShape(f"{embeddings}.word_embeddings.weight", (vocabulary, hidden))
    yield TensorShape(f"{embeddings}.position_embeddings.weight", (positions, hidden))
    yield TensorShape(f"{embeddings}.token_type_embeddings.weight", (2, hidden))
    yield from _normalisation(f"{embeddings}.LayerNorm", hidden)
    for number in range(24):
        layer = f"bert.encoder.layer.{number}"
        for part in ("query", "key", "value"):
            yield from _linear(f"{layer}.attention.self.{part}", hidden, hidden)
        weight, bias = _linear(f"{layer}.attention.output.dense", hidden, hidden)
        # and the products of queries with keys and of scores with values, which have no parameters
        yield weight._replace(multiplications=weight.multiplications + 2 * sequence * hidden)
        yield bias
        yield from _normalisation(f"{layer}.attention.output.LayerNorm", hidden)
        yield from _linear(f"{layer}.intermediate.dense", inner, hidden)
        yield from _linear(f"{layer}.output.dense", hidden, inner)
        yield from _normalisation(f"{layer}.output.LayerNorm", hidden)
    # the decoder's weight is that of the word embeddings, so its work stands at its bias
    yield TensorShape("cls.predictions.bias", (vocabulary,), vocabulary * hidden)
    yield from _linear("cls.predictions.transform.dense", hidden, hidden)
    yield from _normalisation("cls.predictions.transform.LayerNorm", hidden)


def tensors_of(shapes: Iterable[TensorShape]) -> tuple[Tensor, ...]:
    """Return tensors with their shares of the compute time.

    A layer's backward pass multiplies twice as often as its forward pass, for the gradients of its input and of its
    weight. The first layer needs no gradient of its input.
    """
    shapes = tuple(shapes)
    first = next(place for place, shape in enumerate(shapes) if shape.multiplications)
    forward = [shape.multiplications for shape in shapes]
    # data are the input of an image model's first layer; BERT-large's is an embedding, which has a gradient
    takes_data = first == 0
    backward = [amount if place == first and takes_data else 2 * amount for place, amount in enumerate(forward)]
    return tuple(
        Tensor(
            shape.name,
            shape.shape,
            prod(shape.shape),
            prod(shape.shape) * GRADIENT_BYTES,
            forward[place] / sum(forward),
            backward[place] / sum(backward),
        )
        for place, shape in enumerate(shapes)
    )


@dataclass(frozen=True)
class ModelProfile:
    """A training job as the network sees it.

    Attributes:
        name: name used in plans.
        title: name used in reports.
        shapes: yields the parameter tensors in the order in which the model registers them.
        compute_s: forward and backward compute time of an iteration, in seconds.
        thesis_iteration_s: mean iteration time without cross traffic (Table 3.1), None for other models.
        runs_last: name of the tensor that the forward pass uses last, if it is not the last one registered.
        batch: samples of a worker in an iteration (Table 2.1); None: not known.
        library: package that has the model itself, for examples/real_model.py; empty: none.
    """

    name: str
    title: str
    shapes: Callable[[], Iterable[TensorShape]]
    compute_s: float
    thesis_iteration_s: float | None = None
    runs_last: str = ""
    batch: int | None = None
    library: str = ""

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """The parameter tensors in the order in which the model registers them."""
        return tensors_of(self.shapes())

    @cached_property
    def parameters(self) -> int:
        """Number of parameters of all tensors."""
        return sum(tensor.parameters for tensor in self.tensors)

    @cached_property
    def layers(self) -> tuple[tuple[Tensor, ...], ...]:
        """The tensors by layer, in the order of the forward pass.

        A layer is a tensor of weights, or one whose layer computes, with the biases and normalisations that follow it.
        """
        layers: list[tuple[Tensor, ...]] = []
        for tensor in sorted(self.tensors, key=lambda tensor: tensor.name == self.runs_last):
            if not layers or len(tensor.shape) > 1 or tensor.forward_share:
                layers.append((tensor,))
            else:
                layers[-1] += (tensor,)
        return tuple(layers)


PROFILES: dict[str, ModelProfile] = {
    profile.name: profile
    for profile in (
        ModelProfile(
            "bert-large", "BERT-large", _bert_large, 0.56, 0.84, "cls.predictions.bias", batch=8, library="transformers"
        ),
        ModelProfile("vgg16", "VGG-16", _vgg16, 0.356, 0.37, batch=64, library="torchvision"),
        ModelProfile("densenet161", "DenseNet-161", _densenet161, 0.374, 0.38, batch=64, library="torchvision"),
        ModelProfile("resnet50", "ResNet-50", _resnet50, 0.154, 0.16, batch=64, library="torchvision"),
    )
}


def profile_of(text: str) -> ModelProfile | None:
    """Return the profile with a name or title, however it is spelled (``vgg16``, ``VGG-16``); None if there is none."""

    def plain(name: str) -> str:
        return "".join(letter for letter in name.lower() if letter.isalnum())

    return next((one for one in PROFILES.values() if plain(text) in (plain(one.name), plain(one.title))), None)


def profile_named(name: str) -> ModelProfile:
    """Return the profile of `profile_of`.

    Raises:
        UsageError: no profile has this name.
    """
    profile = profile_of(name)
    if profile is None:
        hint = did_you_mean(name, PROFILES)
        raise UsageError(f"model {name!r} is unknown: {hint}the models with known tensors are {', '.join(PROFILES)}")
    return profile
