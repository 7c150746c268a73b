"""Topologies of testbeds: links, routes, the bound on what a machine carries, and their place in a plan."""

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringtap.agents.sweep.bottleneck import busiest
from ringtap.agents.sweep.conductor import run_sweep
from ringtap.agents.sweep.host_roles import testbed_roles as roles_of
from ringtap.agents.sweep.resume_with_edited_plan import plan_changes
from ringtap.agents.sweep.sweep_estimate import layout, resolved
from ringtap.agents.testbed.forwarding_capacity import excess
from ringtap.agents.testbed.shortest_path_routes import carries_all, hops, routes
from ringtap.agents.testbed.topology import LinkCount, TestbedSpec, carried_bps
from ringtap.cli import main
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.sweep_plans.sweep_plan import plan_from_keys
from ringtap.core.testbed_options import MAX_HOSTS

pytestmark = pytest.mark.computes


def spec(hosts: int, topology: str = "star", **options: Any) -> TestbedSpec:
    return TestbedSpec("t", tuple(f"S{number}" for number in range(hosts)), 100_000_000, topology=topology, **options)


LEAVES = {"per_leaf": 2, "spines": 2, "oversubscription": 2.0}
SPECS = st.one_of(
    st.integers(2, 9).map(spec),
    st.integers(3, 9).map(lambda hosts: spec(hosts, "ring")),
    st.sampled_from((2, 16, 54)).map(lambda hosts: spec(hosts, "fat-tree")),
    st.sampled_from((("3x3", 9), ("3x4", 12), ("5x3", 15), ("3x3x3", 27))).map(
        lambda torus: spec(torus[1], "torus", sides=torus[0])
    ),
    st.tuples(st.integers(2, 4), st.integers(1, 3), st.integers(1, 3)).map(
        lambda sizes: spec(sizes[0] * sizes[1], "leaf-spine", per_leaf=sizes[1], spines=sizes[2])
    ),
)


@given(SPECS)
def test_links_go_both_ways_and_interfaces_are_those_of_one_link(testbed: TestbedSpec) -> None:
    directions = {link[:4] for link in testbed.links}
    assert len(directions) == len(testbed.links)
    assert all((c, d, a, b) in directions for a, b, c, d in directions)
    assert len({(link.source, link.source_nic) for link in testbed.links}) == len(testbed.links)
    assert len({link.place for link in testbed.links}) == len(testbed.links)
    assert all(len(link.source_nic) <= 15 for link in testbed.links)  # IFNAMSIZ
    assert set(testbed.nodes) == {link.source for link in testbed.links}


@given(SPECS)
def test_routes_are_the_shortest_paths_of_the_simulated_topology(testbed: TestbedSpec) -> None:
    found = routes(testbed)
    for target, host in enumerate(testbed.hosts):
        distance = hops(testbed, host)
        for source, other in enumerate(testbed.hosts):
            if source != target:
                assert distance[other] == len(testbed.network.path(source, target))
        for node in testbed.nodes:
            if node == host:
                continue
            own = {route.host: route.links for route in found[node]}
            links = own.get(host, own[None])
            assert links
            assert all(link.source == node and distance[link.target] == distance[node] - 1 for link in links)


def test_leaves_share_the_rate_of_their_hosts_over_all_spines() -> None:
    testbed = spec(4, "leaf-spine", **LEAVES)
    rates = {link.place: link.rate_bps for link in testbed.links}
    assert rates["S3", "to leaf1"] == rates["leaf1", "to S3"] == 100_000_000
    # two hosts at 100 Mbit/s, at 2:1, over two spines
    assert rates["leaf0", "to spine1"] == rates["spine1", "to leaf0"] == 50_000_000
    (up, *own) = routes(testbed)["leaf0"]
    assert {link.target for link in up.links} == {"spine0", "spine1"}
    assert [route.host for route in own] == ["S0", "S1"]
    assert [len(found) for node, found in routes(testbed).items() if node in testbed.hosts] == [1] * 4


def test_a_fat_tree_of_sixteen_hosts_has_twenty_switches_and_four_ways_between_pods() -> None:
    testbed = spec(16, "fat-tree")
    assert Counter(node.rstrip("0123456789") for node in testbed.nodes) == {"edge": 8, "agg": 8, "core": 4, "S": 16}
    assert all(count == 4 for node, count in Counter(link.source for link in testbed.links).items() if node[0] != "S")
    found = routes(testbed)
    assert len(next(route.links for route in found["edge0"] if route.host is None)) == 2
    assert hops(testbed, "S15")["S0"] == 6


@pytest.mark.parametrize(
    ("hosts", "options", "words"),
    [
        (4, {"topology": "leafspine"}, "did you mean 'leaf-spine'"),
        (4, {"topology": "clos"}, "choose star, leaf-spine, fat-tree, torus, ring"),
        (5, {"topology": "leaf-spine"}, "per_leaf = 2, and 5 hosts do not fill two or more leaves"),
        (2, {"topology": "leaf-spine"}, "2 hosts do not fill"),
        (4, {"topology": "leaf-spine", "oversubscription": 0.5}, "oversubscription = 0.5 is outside 1 to"),
        (4, {"topology": "leaf-spine", "oversubscription": float("nan")}, "oversubscription = nan is outside"),
        (4, {"topology": "leaf-spine", "spines": 0}, "spines = 0 is outside 1 to"),
        (4, {"topology": "leaf-spine", "spines": 10**9}, "outside 1 to 16"),
        (8, {"topology": "fat-tree"}, r"k³/4 hosts \(2, 16, 54, 128\), not 8"),
        (9, {"topology": "torus"}, "a torus needs sides"),
        (9, {"topology": "torus", "sides": "3x4"}, "with the product 9"),
        (9, {"topology": "torus", "sides": "3by3"}, "sides '3by3' is not a whole number"),
        (8, {"topology": "torus", "sides": "2x4"}, "lengths above 2"),
        (9, {"topology": "torus", "sides": "9"}, "two or more lengths"),
        (2, {"topology": "ring"}, "three or more hosts"),
        (4, {"sides": "2x2"}, "sides is for topology 'torus', and this one is 'star'"),
        (4, {"topology": "ring", "spines": 2}, "spines is for topology 'leaf-spine'"),
        (MAX_HOSTS + 1, {"topology": "ring"}, f"2 to {MAX_HOSTS} hosts"),
        (4, {"delay_s": -1.0}, "delay = -1 s is outside"),
    ],
)
def test_topologies_that_cannot_be_are_refused(hosts: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        spec(hosts, **options)


def test_a_host_cannot_have_the_name_of_a_switch() -> None:
    assert TestbedSpec("t", ("leaf0", "core1"), 100_000_000).hosts == ("leaf0", "core1")
    with pytest.raises(UsageError, match="names 'leaf0', which is the name of a switch"):
        TestbedSpec("t", ("leaf0", "b", "c", "d"), 100_000_000, topology="leaf-spine")


def test_a_testbed_that_this_machine_cannot_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    for rate_bps in (250_000_000, 1_000_000_000):
        assert not excess(TestbedSpec("t", ("a", "b", "c", "d"), rate_bps), 4)
    assert "4 hosts that send 10 Gbit/s over 2.0 links need about 4.3 cores" in excess(
        TestbedSpec("t", ("a", "b", "c", "d"), 10_000_000_000), 4
    )
    large = {"queue_bytes": 2**20, "burst_bytes": 2**20, "mtu": 9000, "offload_segments": 44}
    assert not excess(TestbedSpec("t", ("a", "b", "c", "d"), 10_000_000_000, **large), 2)


PLAN: dict[str, Any] = {"loads": [0, 0.5], "traffic": ["consistent"], "models": ["vgg16"]}
TESTBED = {"topology": "leaf-spine", "oversubscription": 4.0}


def test_the_capacity_of_a_plan_is_the_rate_of_its_slowest_links() -> None:
    found, _ = layout(plan_from_keys(PLAN | {"testbed": TESTBED}))
    assert {link.rate_bps for link in found.links} == {250_000_000, 500_000_000}
    assert found.rate_bps == 500_000_000
    found, _ = layout(plan_from_keys(PLAN | {"testbed": {"topology": "ring", "delay": "1ms"}}))
    assert (found.rate_bps, found.delay_s) == (250_000_000, 0.001)


@pytest.mark.parametrize(
    ("testbed", "words"),
    [
        ({"topology": "fat-tree"}, "k³/4 hosts"),
        ({"topology": "Ring"}, "did you mean 'ring'"),
        ({"topology": "leaf-spine", "per_leaf": 3}, "4 hosts do not fill"),
        ({"topology": "leaf-spine", "oversubscription": 0.5}, "testbed.oversubscription = 0.5 is not a number from 1"),
    ],
)
def test_a_plan_with_a_wrong_topology_is_refused(testbed: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        layout(plan_from_keys(PLAN | {"testbed": testbed}))


def test_a_sweep_beyond_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    with pytest.raises(UsageError, match=r"send 25 Gbit/s over 2.0 links need about 10.7 cores.*this machine has 2"):
        run_sweep(None, tmp_path / "out", **PLAN, scale=1)
    assert not (tmp_path / "out").exists()


def test_a_plan_of_a_star_goes_on_without_the_keys_of_topologies() -> None:
    now = resolved(plan_from_keys(PLAN))
    new = ("topology", "per_leaf", "spines", "oversubscription", "sides", "delay_s")
    before = now | {"topology": {key: value for key, value in now["topology"].items() if key not in new}}
    point = {"series": "vgg16-consistent", "model": "vgg16", "traffic": "consistent", "step": 0, "requested_bps": 0}
    assert plan_changes(before, now, [point]).touching == []
    ring = resolved(plan_from_keys(PLAN | {"testbed": {"topology": "ring"}}))
    assert plan_changes(before, ring, [point]).touching == ["topology.topology"]


def test_the_bottleneck_is_the_first_of_the_fullest_links() -> None:
    testbed = spec(4, "leaf-spine")
    full = {("leaf1", "to spine0"): 0.99, ("spine0", "to leaf0"): 1.0, ("leaf0", "to S0"): 0.97}
    use = {link: full.get(link.place, 0.4) for link in testbed.links}
    assert busiest(use, testbed, "S2").place == ("leaf1", "to spine0")
    assert busiest(use | {testbed.links[0]: 1.2}, testbed, "S2") == testbed.links[0]


def test_cross_traffic_with_parallel_paths_passes_a_link_in_part() -> None:
    leaves, ring = spec(4, "leaf-spine", **LEAVES), spec(4, "ring")
    for testbed, place, pair, expected in (
        (leaves, ("leaf0", "to spine0"), ("S0", "S2"), False),
        (leaves, ("S0", "to leaf0"), ("S0", "S2"), True),
        (spec(4, "leaf-spine"), ("leaf0", "to spine0"), ("S0", "S2"), True),
        (spec(4, "leaf-spine"), ("leaf1", "to spine0"), ("S0", "S2"), False),
        (ring, ("S0", "to S1 by eth0"), ("S0", "S2"), False),
        (ring, ("S0", "to S1 by eth0"), ("S0", "S1"), True),
    ):
        (link,) = (link for link in testbed.links if link.place == place)
        assert carries_all(testbed, link, *pair) == expected


def test_roles_on_a_ring_count_both_ways_to_the_receiver() -> None:
    plan = plan_from_keys(PLAN | {"testbed": {"topology": "ring"}})
    network = roles_of(*layout(plan), "")
    assert [counter["nic"] for counter in network.bottleneck["cross"]] == ["cross0", "cross1"]
    # until the bottleneck is found, both links to S0
    assert {(c["node"], c["nic"]) for c in network.bottleneck["total"]} == {("S1", "eth0"), ("S3", "eth0")}
    assert set(network.recorded) == {"S0", "S1", "S2", "S3"}


def test_an_unknown_topology_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["testbed", "up", "--topology", "fattree"]) == 2
    assert "did you mean 'fat-tree'?" in capsys.readouterr().err


def test_a_link_whose_counters_were_reset_has_no_rate() -> None:
    link = spec(2).links[0]
    first = LinkCount(0, 1000, 10**9, 2**32 - 10)
    later = LinkCount(10**9, 10**9 + 1000, 10**9 + 25_000_000, 16_500)  # packets wrap
    assert carried_bps(link, first, later) == 200e6
    for after in (later._replace(size_bytes=500_000_000), LinkCount(10**9, 10**9, 0, 0)):
        with pytest.raises(MeasurementError, match=f"the counters of {link.source_nic} of {link.source} were reset"):
            carried_bps(link, first, after)
