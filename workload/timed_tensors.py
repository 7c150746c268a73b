"""Reads layers' tensors with the times of their passes: from a table, or from the workload of a model or a profile."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ringtap.core.csv_table import read_csv
from ringtap.core.errors import UsageError
from ringtap.core.thesis_neural_networks import PROFILES, ModelProfile
from ringtap.workload.execution_trace import Collective, Node, NodeType
from ringtap.workload.transfer_order_times import LayerTensor
from ringtap.workload.workload import Workload, kind_of, size_of

COLUMNS = ("name", "bytes", "forward_ms", "backward_ms")
MAX_TENSORS = 1000
MAX_FILE_BYTES = 2**20
_MAX_NUMBER = 2**53  # integers beyond are not exact


class UnknownLayersError(UsageError):
    """A workload that does not say which layer has which tensor."""


def read_tensors(path: Path) -> list[LayerTensor]:
    """Read a CSV file with a row per tensor, in the order of the forward pass; other columns are ignored.

    Raises:
        UsageError: the file cannot be read, is no such table, or a value is wrong; names the line.
    """
    header, lines = read_csv(path, COLUMNS, MAX_FILE_BYTES)
    tensors = [_tensor(f"{path} line {number}", dict(zip(header, cells, strict=False))) for number, cells in lines]
    return _checked(tensors, str(path))


def _tensor(where: str, cells: dict[str, str]) -> LayerTensor:
    numbers = []
    for column in COLUMNS[1:]:
        try:
            value = float(cells.get(column, ""))
        except ValueError:
            value = math.nan
        if not 0 <= value <= _MAX_NUMBER:
            shown = cells.get(column, "")[:40]
            raise UsageError(f"{where}: {column} {shown!r} is not a number from 0 to {_MAX_NUMBER:,}")
        numbers.append(value)
    if not cells["name"]:
        raise UsageError(f"{where}: name is empty: name the tensor")
    if numbers[0] != int(numbers[0]):
        raise UsageError(f"{where}: bytes {cells['bytes'][:40]!r} is not a whole number")
    return LayerTensor(cells["name"], int(numbers[0]), numbers[1] / 1e3, numbers[2] / 1e3)


def _checked(tensors: list[LayerTensor], where: str) -> list[LayerTensor]:
    """Return tensors whose iteration can be simulated.

    Raises:
        UsageError: there is none, there are too many, two have one name, or nothing takes time.
    """
    if not tensors:
        raise UsageError(f"{where} has no tensors: give a row per layer")
    if len(tensors) > MAX_TENSORS:
        raise UsageError(f"{where} has {len(tensors):,} tensors, more than {MAX_TENSORS:,}: give a row per layer")
    names = [each.name for each in tensors]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{where} has two tensors {twice[:80]!r}: give each a name of its own")
    if not any(each.forward_s + each.backward_s for each in tensors):
        raise UsageError(f"{where}: no layer takes time: give the times of its forward and backward pass")
    return tensors


def workload_tensors(workload: Workload, name: str) -> list[LayerTensor]:
    """Return the tensors of a data-parallel workload, a layer each, of its model or of its profile.

    Times and bytes are those of rank 0 in the workload, which may be scaled: the gradients have as many bytes as its
    all-reduces.

    Args:
        workload: the workload.
        name: its name, for messages.

    Raises:
        UnknownLayersError: the workload does not say which layer has which tensor and takes which time.
        UsageError: it is damaged, or has too many layers.
    """
    nodes, model = workload.traces[0], workload.about.get("model")
    reduced_bytes = sum(size_of(node) for node in nodes
                        if node.type == NodeType.COMM_COLL and kind_of(node) == Collective.ALL_REDUCE)  # fmt: skip
    computations = [node for node in nodes if node.type == NodeType.COMP]
    try:
        if isinstance(model, str) and model in PROFILES:
            tensors = _of_model(PROFILES[model], computations)
        else:
            tensors = _of_profile(workload.about.get("parameters"), computations)
    except (TypeError, LookupError, AttributeError, ValueError) as error:
        raise UsageError(f"{name} has a damaged workload.json: write the workload anew") from error
    total_bytes = sum(each.size_bytes for each in tensors)
    if not total_bytes or not reduced_bytes or workload.groups:
        raise UnknownLayersError(
            f"{name} does not say which layer's gradients are all-reduced and how long its passes take, as traces of "
            "torch.profiler do not either: give a workload of ringtap workload new --model or --run of a data-parallel "
            "job, or --tensors FILE.csv"
        )
    factor = reduced_bytes / total_bytes
    return _checked([each._replace(size_bytes=round(each.size_bytes * factor)) for each in tensors], name)


def _of_model(profile: ModelProfile, computations: Sequence[Node]) -> list[LayerTensor]:
    """Return the layers of a model, which share its passes by their multiplications."""
    forward_s = sum(node.duration_us for node in computations if node.name == "forward") / 1e6
    backward_s = sum(node.duration_us for node in computations) / 1e6 - forward_s
    return [
        LayerTensor(
            layer[0].name,
            sum(tensor.bytes for tensor in layer),
            forward_s * sum(tensor.forward_share for tensor in layer),
            backward_s * sum(tensor.backward_share for tensor in layer),
        )
        for layer in profile.layers
    ]


def _of_profile(parameters: list[dict[str, object]] | None, computations: Sequence[Node]) -> list[LayerTensor]:
    """Return the modules of a profile that have parameters, in the order of their forward passes.

    A computation without a parameter of its own counts to the module or gradient that comes next in its pass, or in
    the forward pass to the one before. The optimizer and the loading of data count to the first forward pass.
    """
    modules = {node.name.partition(" ")[2] for node in computations if node.name.startswith("forward ")}
    owners: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for each in parameters or []:
        owner = str(each["name"])
        while owner and owner not in modules:
            owner = owner.rpartition(".")[0]
        owners[str(each["name"])] = owner
        sizes[str(each["name"])] = int(each["elements"]) * int(each["element_bytes"])  # type: ignore[call-overload]
    times_us: dict[str, dict[str, int]] = {"forward": defaultdict(int), "backward": defaultdict(int)}
    sizes_bytes: dict[str, int] = defaultdict(int)
    layer, pending_us = "", 0
    for node in computations:
        pass_, _, name = node.name.partition(" ")
        pending_us += node.duration_us
        if pass_ == "forward" and name:
            layer = name if name in owners.values() else layer
        elif pass_ == "backward" and owners.get(name):
            layer = owners[name]
            sizes_bytes[layer] += sizes.pop(name, 0)  # of parameters with a gradient, once
        else:
            continue
        if layer:
            times_us[pass_][layer] += pending_us
            pending_us = 0
    layers = list(times_us["forward"])
    if layers:
        times_us["forward"][layers[0]] += pending_us
    return [LayerTensor(each, sizes_bytes[each], times_us["forward"][each] / 1e6, times_us["backward"][each] / 1e6)
            for each in layers]  # fmt: skip
