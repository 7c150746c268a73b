"""What an interface can send, from the facts that an agent records."""

from typing import Any

import pytest

from ringtap.agents.node.node_facts import node_facts
from ringtap.core.interface_capacity import capacity_bps, carrier_of, payload_capacity_bps

pytestmark = pytest.mark.computes


@pytest.mark.parametrize(
    ("nic", "link", "rate_bps"),
    [
        ({"speed": 25_000, "driver": "mlx5_core"}, {}, 25e9),
        ({"speed": 25_000, "driver": "mlx5_core"}, {"qdisc": "tbf", "rate_bps": 200_000_000}, 200e6),
        ({"speed": 1_000, "driver": "e1000"}, {"qdisc": "tbf", "rate_bps": 2_000_000_000}, 1e9),
        ({"speed": 10_000, "driver": None}, {"qdisc": "tbf", "rate_bps": 200_000_000}, 200e6),
        ({"speed": 10_000, "driver": None}, {"qdisc": "noqueue"}, None),  # a veth says so, whatever it carries
        ({"speed": 10_000}, {}, None),
        ({"speed": -1, "driver": "virtio_net"}, {}, None),
        ({"speed": 0, "driver": "e1000"}, {"rate_bps": None}, None),
    ],
)
def test_the_limit_of_a_queue_and_the_speed_of_a_device(nic: Any, link: Any, rate_bps: float | None) -> None:
    assert capacity_bps({"nics": {"eth0": nic}, "links": {"eth0": link}}, "eth0") == rate_bps


def test_an_interface_over_another_one_is_as_fast_as_that_one() -> None:
    nics = {"eth0": {"speed": 10_000, "driver": "mlx5_core"}, "eth1": {"speed": 10_000, "driver": "mlx5_core"}}
    links = {
        "eth0": {"below": []},
        "vlan5": {"below": ["eth0"]},
        "cross0": {"below": ["vlan5"], "rate_bps": 20_000_000_000},
        "slow0": {"below": ["vlan5"], "rate_bps": 1_000_000_000},
        "bond0": {"below": ["eth0", "eth1"]},
        "a": {"below": ["b"]},
        "b": {"below": ["a"]},
    }
    before = {"nics": nics, "links": links}
    rates_bps = {name: capacity_bps(before, name) for name in ("eth0", "vlan5", "cross0", "slow0", "bond0", "a")}
    assert rates_bps == {"eth0": 10e9, "vlan5": 10e9, "cross0": 10e9, "slow0": 1e9, "bond0": None, "a": None}
    carriers = {name: carrier_of(before, name) for name in (*links, "eth1", "gone")}
    assert carriers == dict.fromkeys(("eth0", "vlan5", "cross0", "slow0"), "eth0") | {
        **{"bond0": "bond0", "a": "b", "b": "a"},
        **{"eth1": "eth1", "gone": "gone"},
    }


@pytest.mark.parametrize("before", [{}, {"nics": None, "links": None}, {"nics": {"eth0": {}}, "links": {"lo": {}}}])
def test_facts_that_lack_something(before: dict[str, Any]) -> None:
    assert capacity_bps(before, "eth0") is None
    assert payload_capacity_bps(before, "10.0.0.1") is None


def test_payload_of_the_interface_that_has_the_address() -> None:
    slow = {"addresses": ["10.0.0.1", "fe80::1"], "speed": 1_000, "driver": "e1000", "mtu": 1500}
    fast = {"addresses": ["10.0.1.1"], "speed": 100_000, "driver": "mlx5_core", "mtu": 9000}
    before = {"nics": {"eth0": slow, "eth1": fast, "eth2": {"addresses": None}}}
    before["nics"]["eth3"] = slow | {"addresses": ["10.0.3.1"], "mtu": 40}  # less than the headers: a damaged file
    assert payload_capacity_bps(before, "10.0.3.1") is None
    assert payload_capacity_bps(before, "fe80::1") == pytest.approx(1e9 * 1448 / 1514)
    assert payload_capacity_bps(before, "10.0.1.1") == pytest.approx(100e9 * 8948 / 9014)
    assert payload_capacity_bps(before, "10.0.2.1") is None


def test_the_facts_of_this_node_have_its_addresses() -> None:
    assert "127.0.0.1" in node_facts()["nics"]["lo"]["addresses"]
