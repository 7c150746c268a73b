"""Bytes on links, times and critical paths of message graphs, against worked values."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.agents.sweep.predict_from_message_graphs import expected_series, scaled_buckets
from ringtap.agents.testbed.topology import Roles, TestbedSpec
from ringtap.core.sweep_plans.sweep_plan import load_plan
from ringtap.core.thesis_neural_networks import PROFILES
from ringtap.workload.iteration_from_message_graphs import ExpectedIteration, expected_iteration
from ringtap.workload.lowering import Algorithms
from ringtap.workload.model_workloads import bucket_workload, buckets
from ringtap.workload.topologies import Topology, fat_tree, leaf_spine, ring, star, with_host_at

pytestmark = pytest.mark.computes

RATE_BPS = 8e6  # a byte per microsecond
SWITCHES = {"star": "switch", "leaf-spine": "spine0", "fat-tree": "core0"}


def expect(
    network: Topology,
    name: str,
    places: list[int],
    every: list[tuple[int, float]],
    latency_s: float = 0.0,
    **counts: int,
) -> ExpectedIteration:
    """An iteration of four workers that compute for 0.3 s."""
    if name == "in-network":
        network = with_host_at(network, SWITCHES[network.name])
        places = [*places[:4], network.hosts - 1]
    workload = bucket_workload(every, 4, 0.3)
    return expected_iteration(workload, network, Algorithms(name, **counts), places, latency_s=latency_s)


def test_a_parameter_server_waits_for_its_own_links() -> None:
    found = expect(star(6, RATE_BPS), "parameter-server", [0, 1, 2, 3, 5], [(100_000, 1.0)])
    # 4 times 100 kB down to the server, then up again, at a byte per microsecond
    assert found.iteration_s == pytest.approx(0.3 + 0.4 + 0.4)
    assert (found.compute_s, found.critical_messages) == (pytest.approx(0.3), 2)
    assert found.first_message_s == pytest.approx(0.3)
    assert found.sending_s == {"h5 down": pytest.approx(0.4), "h5 up": pytest.approx(0.4)}
    assert [found.payload_bytes[f"h{host} up"] for host in range(6)] == [100_000] * 4 + [0, 400_000]
    # each message has a header, its sender's notice goes with it, and its receiver's notice the other way
    assert found.header_bytes["h5 down"] == 4 * 96 + 4 * 48
    assert found.header_bytes["h4 up"] == 0


def test_what_the_backward_pass_hides_is_not_on_the_path() -> None:
    """Two buckets: the first one's 60 ms of a ring lie within the 100 ms in which the second one is computed."""
    found = expect(star(4, RATE_BPS), "ring", [0, 1, 2, 3], [(40_000, 0.5), (40_000, 0.5)])
    assert found.iteration_s == pytest.approx(0.3 + 6 * 0.01)
    assert (found.first_message_s, found.compute_s) == (pytest.approx(0.2), pytest.approx(0.3))
    assert sum(found.sending_s.values()) == pytest.approx(0.06)
    late = expect(star(4, RATE_BPS), "ring", [0, 1, 2, 3], [(40_000, 0.5), (40_000, 0.5)], latency_s=0.002)
    assert (late.latency_s, late.critical_messages) == (pytest.approx(6 * 0.002), 6)


def test_a_process_at_a_switch_has_no_link() -> None:
    found = expect(leaf_spine(8, RATE_BPS, 4, 4.0), "in-network", [0, 1, 4, 5], [(100_000, 1.0)])
    assert found.payload_bytes["leaf0 up"] == found.payload_bytes["leaf1 down"] == 200_000
    assert found.payload_bytes["h0 up"] == found.payload_bytes["h5 down"] == 100_000
    # a leaf's link to the spine has the rate of one host for two of them
    assert found.sending_s.keys() == {"leaf0 up", "leaf0 down"}
    assert found.iteration_s == pytest.approx(0.3 + 0.2 + 0.2)


NETWORKS = st.sampled_from([star(8, RATE_BPS), leaf_spine(8, RATE_BPS, 4, 4.0, spines=2), fat_tree(4, RATE_BPS)])
ALGORITHMS = st.sampled_from(
    [
        ("ring", {}), ("halving-doubling", {}), ("tree", {"pieces": 3}), ("double-tree", {"pieces": 2}),
        ("hierarchical", {"group": 2}), ("parameter-server", {"shards": 2}), ("in-network", {"pieces": 3}),
    ]
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    NETWORKS, ALGORITHMS, st.permutations(range(8)), st.lists(st.integers(0, 50_000), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.001]),
)  # fmt: skip
def test_the_path_is_as_long_as_the_iteration(
    network: Topology, algorithm: tuple[str, dict[str, int]], places: list[int], sizes: list[int], latency_s: float
) -> None:
    name, counts = algorithm
    every = [(4 * size, 1 / len(sizes)) for size in sizes]
    found = expect(network, name, places[: 4 + Algorithms(name, **counts).others], every, latency_s, **counts)
    # computations are whole microseconds
    assert found.iteration_s == pytest.approx(found.compute_s + sum(found.sending_s.values()) + found.latency_s)
    assert found.compute_s <= 0.3 + 1e-5
    ways: dict[str, int] = {"up": 0, "down": 0}
    for link, size_bytes in found.payload_bytes.items():
        if link.startswith("h"):
            ways[link.split()[1]] += size_bytes
    sent = sum(Algorithms(name, **counts).graph(0, 4, 4 * size).size_bytes.sum() for size in sizes)
    if name == "in-network":  # a switch sends and receives without a link
        assert ways["up"] + ways["down"] == sent
    else:
        assert ways["up"] == ways["down"] == sent


def test_bundles_are_links_over_which_flows_are_spread() -> None:
    assert set(fat_tree(4, 1.0).bundles) == {
        f"{node}{number} {way}"
        for node, count in (("h", 16), ("edge", 8), ("pod", 4))
        for number in range(count)
        for way in ("up", "down")
    }
    assert set(leaf_spine(4, 1.0, 2, spines=3).bundles) >= {"leaf0 up", "leaf1 down", "h3 up"}
    assert set(ring(5, 1.0).bundles) == {"all"}


PLAN = {
    "sweep": {"name": "n", "loads": [0], "traffic": ["consistent"], "collective": ["ring", "in-network"]},
    "models": [
        {"name": "vgg16"},
        {"name": "own", "parameters": 25_000_000, "compute": 0.05, "layers": 8},
    ],
}


def test_a_scale_model_has_ddps_buckets() -> None:
    plan = load_plan({**PLAN, "models": [{"name": "vgg16"}]})
    (found, *_) = [scaled_buckets(model, plan.scale) for model in plan.models]
    full = list(buckets(PROFILES["vgg16"]))
    assert sum(size for size, _ in found) == 4 * round(PROFILES["vgg16"].parameters / 100)
    for (size, share), (full_size, full_share) in zip(found, full, strict=True):
        assert abs(size - full_size / 100) <= 4
        assert share == full_share
    own = load_plan(PLAN).models[2]
    # eight layers of 12.5 MB in buckets of 25 MiB: one, then three of two and one, as the first bucket has 1 MiB
    assert [size for size, _ in scaled_buckets(own, 100)] == [125_000, 375_000, 375_000, 125_000]


def test_a_series_of_a_plan() -> None:
    plan = load_plan(PLAN)
    spec = TestbedSpec("t", ("S0", "S1", "S2", "S3"), plan.capacity_bps)
    roles = Roles("custom", ("S0", "S1", "S3"), "S2", "S0")
    found = expected_series(plan, plan.models[1], spec, roles)
    size = 4 * round(PROFILES["vgg16"].parameters / 100)
    sent = {link["link"]: link["payload_bytes"] for link in found["links"]}
    assert [sent[f"{host} up"] for host in spec.hosts] == [size, size, 0, size]
    parts = [found["compute_s"], *(link["critical_s"] for link in found["links"])]
    assert found["iteration_s"] == pytest.approx(math.fsum(parts))
    job = load_plan({**PLAN, "models": [{"name": "own", "parameters": 100, "command": ["train"]}]})
    assert expected_series(job, job.models[0], spec, roles)["why"].startswith("only of scale models")
