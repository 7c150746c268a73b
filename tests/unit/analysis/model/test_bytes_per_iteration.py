import pytest

from ringtap.analysis.model.bytes_per_iteration import COLLECTIVES, demand
from ringtap.core.errors import UsageError

pytestmark = [pytest.mark.computes, pytest.mark.together]

# Table 3.1 (N = 4) and the demand column of Tables 3.4 and 3.6 (N = 3), in MB
PUBLISHED = [
    (335_174_458, 2011.0, 1787.6),
    (138_357_444, 830.1, 737.9),
    (28_681_000, 172.1, 153.0),
    (25_557_032, 153.3, 136.3),
]


@pytest.mark.parametrize(("parameters", "four_mb", "three_mb"), PUBLISHED)
def test_ring_gives_the_published_demand(parameters, four_mb, three_mb):
    assert demand(parameters, 4).worker_bytes / 1e6 == pytest.approx(four_mb, abs=0.06)
    assert demand(parameters, 3).worker_bytes / 1e6 == pytest.approx(three_mb, abs=0.06)


@pytest.mark.parametrize(
    ("parameters", "iteration_s", "gbps"), [(335_174_458, 0.84, 19.15), (138_357_444, 0.37, 17.95)]
)
def test_required_bandwidth_is_that_of_table_3_1(parameters, iteration_s, gbps):
    assert demand(parameters, 4).required_bps(iteration_s) / 1e9 == pytest.approx(gbps, abs=0.006)


@pytest.mark.parametrize(
    ("collective", "workers", "group", "worker", "busiest"),
    [
        ("ring", 2, 1, 1.0, 1.0),
        ("reduce-scatter-all-gather", 4, 1, 1.5, 1.5),
        ("parameter-server", 4, 1, 1.0, 4.0),
        ("parameter-server", 1, 1, 1.0, 1.0),
        ("tree", 2, 1, 1.0, 1.0),
        ("tree", 3, 1, 4 / 3, 2.0),
        ("tree", 4, 1, 1.5, 2.0),
        ("tree", 5, 1, 1.6, 3.0),
        ("tree", 64, 1, 2 * 63 / 64, 3.0),
        ("hierarchical", 16, 4, 1.5 / 4, 1.5),
    ],
)
def test_other_collectives_in_units_of_the_gradient(collective, workers, group, worker, busiest):
    result = demand(1000, workers, collective, group)
    assert result.worker_bytes / 4000 == pytest.approx(worker)
    assert result.busiest_link_bytes / 4000 == pytest.approx(busiest)
    assert result.source


def test_a_tree_sends_in_total_what_its_edges_carry():
    for workers in range(2, 12):
        sent = demand(1, workers, "tree").worker_bytes * workers
        assert sent == pytest.approx(2 * (workers - 1) * 4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, 4), "parameters"),
        ((-5, 4), "parameters"),
        ((10, 0), "workers"),
        ((10, 1), "one worker"),
        ((10, 4, "star"), "choose one of"),
        ((10, 4, "hierarchical", 3), "groups"),
        ((10, 4, "hierarchical", 4), "groups"),
        ((10, 4, "ring", 2), "hierarchical"),
    ],
)
def test_impossible_counts_are_refused(arguments, says):
    with pytest.raises(UsageError, match=says):
        demand(*arguments)


@pytest.mark.parametrize("iteration_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_iteration_time_is_refused(iteration_s):
    with pytest.raises(UsageError):
        demand(10, 4).required_bps(iteration_s)


def test_every_collective_states_its_source():
    assert {demand(8, 4, name, 2 if name == "hierarchical" else 1).source for name in COLLECTIVES}
