"""Layouts of transformers: published sizes, closed formulas of parameters, FLOPs, bytes and time, and wrong files."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.core.errors import UsageError
from ringtap.workload.execution_trace import NodeType
from ringtap.workload.export import goal
from ringtap.workload.lowering import Algorithms, lower
from ringtap.workload.scaling import Scaling, scale
from ringtap.workload.simulate_iterations import SimulatedIterations, simulate
from ringtap.workload.topologies import star
from ringtap.workload.transformer import SCHEDULES, TransformerLayout, layout_workload, read_layout
from ringtap.workload.workload import Workload, check_workload, peer_of, read_workload, size_of, write_workload

pytestmark = [pytest.mark.computes, pytest.mark.long]

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "layout-gpt3.toml"
GPT3 = TransformerLayout(
    layers=96, hidden_size=12288, feed_forward_size=49152, attention_heads=96, vocabulary_size=51200,
    sequence_length=2048, tensor_parallel=8, pipeline_parallel=8, data_parallel=1, micro_batch_size=1, micro_batches=16,
    schedule="1f1b", activation_bytes=2, gradient_bytes=4, recompute=True, flop_per_s=312e12, utilisation=0.5,
    optimizer_s=0.0, gpus_per_node=8,
)  # fmt: skip


@st.composite
def layouts(draw: st.DrawFn) -> TransformerLayout:
    """Layouts whose layers and heads are divisible, with times from microseconds to minutes."""
    t, p, d = draw(st.sampled_from([1, 2, 3])), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    heads = t * draw(st.integers(1, 3))
    hidden_size = heads * draw(st.integers(1, 40))
    return TransformerLayout(
        layers=p * draw(st.integers(1, 3)), hidden_size=hidden_size, feed_forward_size=t * draw(st.integers(1, 500)),
        attention_heads=heads, vocabulary_size=draw(st.integers(1, 2000)), sequence_length=draw(st.integers(1, 99)),
        tensor_parallel=t, pipeline_parallel=p, data_parallel=d, micro_batch_size=draw(st.integers(1, 5)),
        micro_batches=draw(st.integers(1, 6)), schedule=draw(st.sampled_from(SCHEDULES)),
        activation_bytes=draw(st.sampled_from([1, 2, 4])), gradient_bytes=draw(st.sampled_from([2, 4])),
        recompute=draw(st.booleans()), flop_per_s=draw(st.sampled_from([1e7, 1e9, 1e12])), utilisation=0.5,
        optimizer_s=draw(st.sampled_from([0.0, 0.25])), gpus_per_node=draw(st.sampled_from([None, 2])),
    )  # fmt: skip


def with_usual_feed_forward(layout: TransformerLayout) -> TransformerLayout:
    return replace(layout, feed_forward_size=4 * layout.hidden_size)


def without_network(workload: Workload, iterations: int = 1) -> SimulatedIterations:
    """The iterations if all communication takes no time: all ranks are at one host, and there is no latency."""
    return simulate(workload, star(1, 1e9), Algorithms(), iterations=iterations, ranks_per_host=workload.ranks)


def bytes_of(workload: Workload, rank: int, kind: NodeType, name: str) -> int:
    return sum(size_of(node) for node in workload.traces[rank] if (node.type, node.name) == (kind, name))


# Table 1 of Narayanan et al.: parameters in billions, layers, hidden size, heads; GPT-3 as its section 5 has it
@pytest.mark.parametrize(
    ("billions", "layers", "hidden_size", "heads"),
    [
        (1.7, 24, 2304, 24), (3.6, 30, 3072, 32), (7.5, 36, 4096, 32), (18.4, 40, 6144, 48), (39.1, 48, 8192, 64),
        (76.1, 60, 10240, 80), (145.6, 80, 12288, 96), (310.1, 96, 16384, 128), (529.6, 105, 20480, 128),
        (1008.0, 128, 25600, 160), (174.6, 96, 12288, 96),
    ],
)  # fmt: skip
def test_parameters_are_those_that_were_published(billions: float, layers: int, hidden_size: int, heads: int) -> None:
    layout = replace(GPT3, layers=layers, hidden_size=hidden_size, attention_heads=heads, pipeline_parallel=1)
    assert round(with_usual_feed_forward(layout).parameters / 1e9, 1) == billions


def test_the_published_training_time_of_gpt3() -> None:
    """The paper's 34 days for 300 billion tokens on 1024 A100 at 140 TFLOP/s; it leaves out logits and attention."""
    tokens = GPT3.micro_batches * GPT3.sequence_length
    days = GPT3.flop / tokens * 300e9 / (1024 * 140e12) / 86400
    assert days == pytest.approx(34, rel=0.03)


@given(layouts())
@settings(max_examples=200, deadline=None)
def test_parameters_and_flop_are_those_of_the_equations(drawn: TransformerLayout) -> None:
    layout = with_usual_feed_forward(drawn)
    la, h, v, s = layout.layers, layout.hidden_size, layout.vocabulary_size, layout.sequence_length
    assert layout.parameters == 12 * la * h * h + 13 * la * h + (v + s) * h
    batch = layout.micro_batch_size * layout.micro_batches * layout.data_parallel
    # equation 3, and without recomputation a forward pass of the layers less
    layers = 24 * batch * s * la * h * h + 4 * batch * s * s * la * h
    assert layout.flop == (4 if layout.recompute else 3) * layers + 6 * batch * s * h * v


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_ranks_send_the_bytes_of_the_formulas(layout: TransformerLayout) -> None:
    made = layout_workload(layout, "drawn")
    check_workload(made)
    t, p, d = layout.tensor_parallel, layout.pipeline_parallel, layout.data_parallel
    activations = layout.micro_batch_size * layout.sequence_length * layout.hidden_size * layout.activation_bytes
    ranks = range(made.ranks)
    for rank in ranks:
        expected = 4 * layout.layers // p * layout.micro_batches * activations if t > 1 else 0
        assert bytes_of(made, rank, NodeType.COMM_COLL, "tensor-parallel") == expected
    reduced = sum(bytes_of(made, rank, NodeType.COMM_COLL, "data-parallel") for rank in ranks)
    assert reduced == (d * layout.gradient_bytes * layout.parameters if d > 1 else 0)
    for name in ("activations", "gradients"):
        sent = sum(bytes_of(made, rank, NodeType.COMM_SEND, name) for rank in ranks)
        assert sent == (p - 1) * t * d * layout.micro_batches * activations
    tags = Counter(
        (rank, peer_of(node), node.attributes["comm_tag"])
        for rank in ranks for node in made.traces[rank] if node.type == NodeType.COMM_SEND
    )  # fmt: skip
    assert set(tags.values()) <= {1}
    assert len({tag for _, _, tag in tags}) == (2 * layout.micro_batches if p > 1 else 0)
    # each pass is rounded to a microsecond
    computed_us = sum(node.duration_us for trace in made.traces for node in trace if node.name != "optimizer")
    assert computed_us == pytest.approx(
        1e6 * layout.flop / (layout.flop_per_s * layout.utilisation), abs=made.ranks * layout.micro_batches
    )


def pass_us(workload: Workload, rank: int, name: str) -> int:
    return sum(node.duration_us for node in workload.traces[rank] if node.name.split(" ")[0] == name)


@given(layouts())
@settings(max_examples=100, deadline=None)
def test_without_communication_a_pipeline_takes_its_passes_and_the_slowest_stage(drawn: TransformerLayout) -> None:
    """The last stage has the logits and may be slower; the rate of the pipeline is that of the slowest stage."""
    layout = replace(drawn, optimizer_s=0.0)
    made = layout_workload(layout, "drawn")
    stride = layout.tensor_parallel * layout.data_parallel
    forward = [pass_us(made, stage * stride, "forward0") for stage in range(layout.pipeline_parallel)]
    backward = [pass_us(made, stage * stride, "backward0") for stage in range(layout.pipeline_parallel)]
    if layout.schedule == "gpipe":
        slowest = max(forward) + max(backward)
    else:
        slowest = max(f + b for f, b in zip(forward, backward, strict=True))
    expected_us = sum(forward) + sum(backward) + (layout.micro_batches - 1) * slowest
    assert without_network(made).iteration_s == pytest.approx(expected_us / 1e6, rel=1e-9)


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_equal_stages_have_the_published_bubble(drawn: TransformerLayout) -> None:
    """(m + p - 1) (t_f + t_b): m (t_f + t_b) and the bubble's share (p - 1) / m of it.

    A layer takes 2000 whole microseconds, and the logits, 1 / (12 h + 2 s) of it, less than half a microsecond.
    """
    layout = replace(
        drawn, hidden_size=1200, attention_heads=12, feed_forward_size=4800, vocabulary_size=1, utilisation=1.0,
        optimizer_s=0.0,
    )  # fmt: skip
    first, second, *_ = layout.forward_flop(0)
    flop_per_s = (first[1] + second[1]) / layout.tensor_parallel / 2000e-6
    made = layout_workload(replace(layout, flop_per_s=flop_per_s), "drawn")
    layers, m, p = layout.layers // layout.pipeline_parallel, layout.micro_batches, layout.pipeline_parallel
    pass_s = 2000e-6 * layers * (4 if layout.recompute else 3)
    assert without_network(made, 3).iteration_s == pytest.approx((m + p - 1) * pass_s, rel=1e-9)
    if layout.schedule == "1f1b":
        assert max(in_flight(layout, stage) for stage in range(p)) <= p


def in_flight(layout: TransformerLayout, stage: int) -> int:
    """The most micro-batches of which a stage keeps activations."""
    kept, most = 0, 0
    for is_backward, _ in layout.order(stage):
        kept += -1 if is_backward else 1
        most = max(most, kept)
    return most


@given(layouts(), st.sampled_from(["ring", "tree", "double-tree", "in-network"]))
@settings(max_examples=40, deadline=None)
def test_layouts_end_on_slow_networks_also_as_messages(layout: TransformerLayout, all_reduce: str) -> None:
    made, algorithms = layout_workload(layout, "drawn"), Algorithms(all_reduce)
    check_workload(made)
    network = star(made.ranks + 1, 1e8)
    simulated = simulate(made, network, algorithms, iterations=2, latency_s=1e-5)
    assert simulated.iteration_s >= without_network(made).iteration_s * (1 - 1e-9)
    lowered = lower(made, algorithms)
    check_workload(lowered)
    same = simulate(lowered, network, Algorithms(), iterations=2, latency_s=1e-5)
    # messages have whole bytes, of which each one may add one to the chain of an iteration
    bytes_s = 2 * max(map(len, lowered.traces)) * 8 / 1e8
    assert same.end_s[:, : made.ranks] == pytest.approx(simulated.end_s, rel=1e-6, abs=bytes_s)
    assert sum(line.startswith("rank ") for line in goal(made, algorithms)) == lowered.ranks


def test_ranks_have_the_places_that_megatron_gives_them(tmp_path: Path) -> None:
    made = layout_workload(replace(GPT3, tensor_parallel=2, data_parallel=2, pipeline_parallel=2), "gpt3")
    assert made.groups == {
        "1": [0, 1], "2": [2, 3], "3": [4, 5], "4": [6, 7], "5": [0, 2], "6": [1, 3], "7": [4, 6], "8": [5, 7],
    }  # fmt: skip
    assert {peer_of(node) for node in made.traces[1] if node.type == NodeType.COMM_SEND} == {5}
    assert {peer_of(node) for node in made.traces[6] if node.type == NodeType.COMM_SEND} == {2}
    names = [node.name.split(" ")[0] for node in made.traces[7] if node.type == NodeType.COMP]
    assert list(dict.fromkeys(names))[:4] == ["forward0", "backward0", "forward1", "backward1"]
    first = [node.name.split(" ")[0] for node in made.traces[0] if node.type == NodeType.COMP]
    assert list(dict.fromkeys(first))[:4] == ["forward0", "forward1", "backward0", "forward2"]
    write_workload(made, tmp_path / "w")
    read = read_workload(tmp_path / "w")
    assert (read.traces, read.groups, read.about) == (made.traces, made.groups, made.about)


def test_one_rank_communicates_with_nobody() -> None:
    alone = replace(GPT3, tensor_parallel=1, data_parallel=1, pipeline_parallel=1)
    made = layout_workload(alone, "gpt3")
    assert {node.type for node in made.traces[0]} == {NodeType.COMP}
    assert made.groups == {}
    assert without_network(made).iteration_s == pytest.approx(alone.flop / (312e12 * 0.5), rel=1e-6)


def test_a_layout_scales_in_processors_and_hosts_only() -> None:
    made = layout_workload(replace(GPT3, micro_batches=2), "gpt3")
    assert made.about["gpus_per_node"] == 8
    scaled = scale(made, Scaling(gpus_per_node=4, compute=0.5))
    check_workload(scaled)
    assert scaled.about["gpus_per_node"] == 4
    # a node is rounded to half a microsecond
    assert scaled.about["compute_s"] == pytest.approx(made.about["compute_s"] / 2, abs=0.5e-6 * len(made.traces[0]))
    assert [len(trace) for trace in scaled.traces] == [len(trace) for trace in made.traces]
    for scaling in (Scaling(batch=2), Scaling(parameters=2)):
        with pytest.raises(UsageError, match="change batch, model and ranks in its TOML file"):
            scale(made, scaling)


def test_the_example_is_gpt3() -> None:
    assert read_layout(EXAMPLE) == GPT3


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("layers = 96", "layers = 95", "line 11: layout.pipeline_parallel = 8 does not divide layers = 95"),
        ("tensor_parallel = 8", "tensor_parallel = 9", "tensor_parallel = 9 does not divide attention_heads = 96"),
        ("layers = 96", "layers = 96\nfeed_forward_size = 12", "= 8 does not divide feed_forward_size = 12"),
        ("attention_heads = 96", "attention_heads = 80", "line 5: model.attention_heads = 80 does not divide"),
        ("hidden_size", "hiden_size", "line 4: model.hiden_size is not a key of this table; did you mean hidden_size?"),
        ("micro_batches", "schedul = 1\nmicro_batches", "layout.schedul is not a key of this table; did you mean"),
        ("micro_batches", 'schedule = "1f1c"\nmicro_batches', "did you mean 1f1b?"),
        ("[layout]", "[layouts]", "line 9: [layouts] is not a known table; did you mean [layout]?"),
        ("[processor]", "[processor]\nrecompute = true", "processor.recompute is not a key of this table"),
        ("micro_batches = 16", "micro_batches = 1000", "gives up to 6,528,128 nodes on 64 ranks, of which 5,000,000"),
        ("utilisation = 0.5", "utilisation = 1.5", "processor.utilisation = 1.5 is not a number from 0.001 to 1"),
        ("utilisation = 0.5", "", "processor.utilisation is missing"),
        ("312e12", "1e6", "processor.flop_per_s is too low"),
        ("utilisation = 0.5", 'utilisation = 0.5\noptimizer = "30h"', "or the optimizer too long: one pass takes 1.08"),
        ("layers = 96", "layers = true", "model.layers = True is not a whole number from 1 to 10000"),
        ("312e12", "nan", "processor.flop_per_s = nan is not a number from"),
        ("layers = 96", "layers = " + "9" * 5000, "is not TOML"),
        ("layers = 96", "layers = " + "[" * 5000, "is not TOML"),
    ],
)  # fmt: skip
def test_wrong_specifications_end_in_one_sentence(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "gpt.toml"
    text = EXAMPLE.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError) as caught:
        read_layout(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_specification_without_end_is_refused() -> None:
    with pytest.raises(UsageError, match="/dev/zero has more than 16,777,216 characters"):
        read_layout("/dev/zero")


def test_damaged_specifications_are_read_or_refused(tmp_path: Path) -> None:
    """2,000 mutations of the example: each is read as a layout, or refused in one sentence."""
    path, whole, draw = tmp_path / "gpt.toml", EXAMPLE.read_bytes(), random.Random(1)
    refused = 0
    for _ in range(2000):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(data))
            if draw.random() < 0.5:
                data[place] = draw.randrange(256)
            else:
                data[place : place + draw.randint(0, 9)] = draw.choice([b"", b"9", b"=", b"[", b"\n", b'"', b"-"])
        path.write_bytes(data)
        try:
            assert read_layout(path).ranks >= 1
        except UsageError as error:
            refused += 1
            assert str(path) in str(error)
    assert 200 < refused < 2000
