"""What an interface can send, from the facts that an agent records."""

import ipaddress
from typing import Any

import pytest

from ringtap.agents.node import node_facts as node_facts_of
from ringtap.agents.node.node_facts import node_facts
from ringtap.core.interface_capacity import capacity_bps, carrier_of, payload_capacity_bps, unused_networks

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


def test_networks_of_interfaces_that_are_up_and_not_used() -> None:
    def nic(speed: int, *networks: str, **known: Any) -> dict[str, Any]:
        return {"isup": True, "speed": speed, "driver": "mlx5_core", "mtu": 1500, "networks": networks} | known

    nics = {
        "eth0": nic(1_000, "10.0.0.0/24"),
        "vlan5": nic(1_000, "10.5.0.0/24"),  # over eth0
        "eth1": nic(10_000, "10.1.0.0/24", "fd00::/64"),
        "eth2": nic(25_000, "10.1.0.0/24"),
        "eth3": nic(100_000, "10.3.0.0/24", isup=False),
        "docker0": nic(10_000, "172.17.0.0/16", driver=None),
        "eth4": nic(100_000, "10.4.0.0/24") | {"networks": None},
    }
    before = {"nics": nics, "links": {"vlan5": {"below": ["eth0"]}}}
    fast, second = ((speed * (1448 / 1514), name) for speed, name in ((25e9, "eth2"), (10e9, "eth1")))
    assert unused_networks([before], {"eth0"}) == {"10.1.0.0/24": fast, "fd00::/64": second}
    assert unused_networks([before], {"eth0", "eth2"}) == {"10.1.0.0/24": second, "fd00::/64": second}
    # after the run, an interface was down; a killed agent recorded nothing then
    after = {"nics": nics | {"eth2": nics["eth2"] | {"isup": False}}, "links": before["links"]}
    assert unused_networks([before, after], {"eth0"})["10.1.0.0/24"] == second
    assert unused_networks([before, {}], {"eth0"})["10.1.0.0/24"] == fast
    assert unused_networks([], {"eth0"}) == unused_networks([{}], {"eth0"}) == {}


@pytest.mark.parametrize(
    ("address", "mask", "network"),
    [
        ("10.1.2.3", "255.255.255.0", "10.1.2.0/24"),
        ("fd00::7", "ffff:ffff:ffff:ffff::", "fd00::/64"),
        ("127.0.0.1", "255.0.0.0", ""),
        ("fe80::1", "ffff:ffff:ffff:ffff::", ""),
        ("169.254.3.4", "255.255.0.0", ""),
    ],
)
def test_the_network_of_an_address(address: str, mask: str, network: str) -> None:
    assert node_facts_of._network(address, mask) == network


def test_the_facts_of_this_node_have_its_addresses_and_networks() -> None:
    nics = node_facts()["nics"]
    assert "127.0.0.1" in nics["lo"]["addresses"]
    assert nics["lo"]["networks"] == []
    for nic in nics.values():
        for network in nic["networks"]:
            assert any(ipaddress.ip_address(one) in ipaddress.ip_network(network) for one in nic["addresses"])
