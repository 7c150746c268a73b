"""The fast collectors against ss, tc and ip: two namespaces, a shaped link, real transfers over IPv4 and IPv6."""

import ipaddress
import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ringtap.core.append_only_logs import open_records, read_json_lines
from tests.testbed.collect_network import BYTES, MOVED, PORT, QUIET_S

pytestmark = [pytest.mark.shares, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[2]


class Network:
    """What one run of collect_network left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        done = subprocess.run(
            [sys.executable, "-m", "tests.testbed.collect_network", str(folder)],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            cwd=ROOT,
            env=os.environ | {"RANK": "3"},
        )
        self.said: dict[str, Any] = {}
        if done.returncode == MOVED:
            return
        assert done.returncode == 0, done.stderr
        self.said = json.loads(done.stdout)
        self.sockets = rows(folder / "sockets" / "sockets.rec")
        self.qdiscs = rows(folder / "qdisc" / "qdisc.rec")
        self.nics = rows(folder / "nic" / "nic.rec")

    def of_port(self, port: int) -> list[dict[str, Any]]:
        return [row for row in self.sockets if int.from_bytes(row["sport"], "big") == port]

    def ss(self, port: int) -> dict[str, str]:
        """What ss says of the connection from a port: ``key:value`` words, and those without a colon."""
        line = next(line for line in self.said["ss"].splitlines() if re.search(rf":{port}\s", line))
        words = dict(word.partition(":")[::2] for word in line.split()[5:])
        return words | {f"{name} rate": rate for name, rate in re.findall(r"(pacing|delivery)_rate (\d+)bps", line)}


def rows(path: Path) -> list[dict[str, Any]]:
    records = open_records(path)
    assert records.torn_bytes == 0
    names = [field.name for field in records.fields]
    return [dict(zip(names, row, strict=True)) for row in records.tail()]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Network:
    for _ in range(5):  # neighbours look for each other, and then the tools and the last samples differ by a packet
        network = Network(tmp_path_factory.mktemp("network"))
        if network.said:
            return network
    raise AssertionError("the link was never quiet")


@pytest.mark.parametrize("address", BYTES)
def test_a_connection_reads_as_ss_shows_it(network: Network, address: str) -> None:
    port = network.said["ports"][address]
    last, ss = network.of_port(port)[-1], network.ss(port)
    assert network.said["checks"] == {"sockets": "ok", "qdisc": "ok", "nic": "ok"}
    assert last["family"] == (10 if ":" in address else 2)
    peer = last["destination"][: 16 if ":" in address else 4]
    assert ipaddress.ip_address(peer) == ipaddress.ip_address(address)
    assert int.from_bytes(last["dport"], "big") == PORT
    assert last["bytes_acked"] == BYTES[address] + 1  # the connection's first number counts
    assert last["bytes_retrans"] > 0
    assert last["total_retrans"] > 0
    expected = {
        "ino": last["inode"],
        "bytes_sent": last["bytes_sent"],
        "bytes_retrans": last["bytes_retrans"],
        "bytes_acked": last["bytes_acked"],
        "segs_out": last["segs_out"],
        "segs_in": last["segs_in"],
        "data_segs_out": last["data_segs_out"],
        "mss": last["snd_mss_bytes"],
        "pmtu": last["pmtu_bytes"],
        "cwnd": last["snd_cwnd"],
        "ssthresh": last["snd_ssthresh"],
        "delivered": last["delivered"],
        "snd_wnd": last["snd_wnd_bytes"],
        "pacing rate": last["pacing_rate_bytes_per_s"] * 8,
        "delivery rate": last["delivery_rate_bytes_per_s"] * 8,
        "rcv_space": last["rcv_space_bytes"],
    }
    assert {name: int(ss[name]) for name in expected} == expected
    assert int(ss["sk"], 16) == last["cookie"]
    assert int(ss["retrans"].partition("/")[2]) == last["total_retrans"]
    times = [last["rtt_us"], last["rttvar_us"]]
    assert [round(float(ms) * 1000) for ms in ss["rtt"].split("/")] == times
    assert round(float(ss["minrtt"]) * 1000) == last["min_rtt_us"]
    assert int(ss["busy"].removesuffix("ms")) == last["busy_time_us"] // 1000


@pytest.mark.parametrize("address", BYTES)
def test_a_transfer_is_followed_at_the_rate_asked_for(network: Network, address: str) -> None:
    """Between two dumps, a connection that moves is asked for by name: it must not show in dumps alone."""
    seen = network.of_port(network.said["ports"][address])
    moving = [row for row in seen if 1 < row["bytes_acked"] < BYTES[address]]
    gaps_ms = sorted((after["mono_ns"] - before["mono_ns"]) / 1e6 for before, after in pairwise(moving))
    assert len(moving) > 30
    assert gaps_ms[len(gaps_ms) // 2] < 50
    acked = [row["bytes_acked"] for row in seen]
    assert acked == sorted(acked)
    assert network.said["facts"]["sockets"]["samples"] > 2 * network.said["facts"]["sockets"]["dumps"]
    assert network.said["facts"]["sockets"]["lost_answers"] == 0


def test_what_does_not_change_is_not_written_again(network: Network) -> None:
    """The transfers end before the recording does; ages move on, and are no change."""
    last_ns = max(row["mono_ns"] for row in network.nics)
    for port in network.said["ports"].values():
        assert network.of_port(port)[-1]["mono_ns"] < last_ns - QUIET_S * 0.5e9


def test_a_connection_that_vanished_says_so(network: Network) -> None:
    seen = network.of_port(network.said["short_port"])
    assert [row["state"] == 0 for row in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1]["bytes_sent"] == 1000
    assert all(row["state"] for row in network.of_port(network.said["ports"]["fd80::2"]))


def test_connections_have_owners(network: Network) -> None:
    owners, torn = read_json_lines(network.folder / "sockets" / "owners.jsonl")
    assert torn == 0
    inodes = {row["inode"] for row in network.sockets if row["inode"]}
    assert {owner["inode"] for owner in owners} == inodes
    assert {(owner["pid"], owner["rank"]) for owner in owners} == {(network.said["pid"], 3)}
    assert "collect_network" in owners[0]["command"]


def test_the_queue_reads_as_tc_shows_it(network: Network) -> None:
    tc = json.loads(network.said["tc"])[0]
    about = open_records(network.folder / "qdisc" / "qdisc.rec").about
    index = next(index for index, name in about["interfaces"].items() if name == "left")
    assert about["kinds"][f"{index}:{0x7 << 16}"] == "tbf"
    ours = [row for row in network.qdiscs if row["interface"] == int(index)]
    last = ours[-1]
    assert (last["handle"], last["parent"]) == (0x7 << 16, 0xFFFFFFFF)
    assert tc["drops"] > 0
    expected = {"bytes": last["bytes"], "packets": last["packets"], "drops": last["drops"]}
    expected |= {"overlimits": last["overlimits"], "requeues": last["requeues"]}
    expected |= {"backlog": last["backlog_bytes"], "qlen": last["backlog_packets"]}
    assert {name: tc[name] for name in expected} == expected
    assert 10_000 < max(row["backlog_bytes"] for row in ours) <= 30_000  # while it was full
    assert max(row["backlog_packets"] for row in ours) > 2


def test_interfaces_read_as_ip_shows_them(network: Network) -> None:
    links = {link["ifname"]: link["stats64"] for link in json.loads(network.said["ip"])}
    last = network.nics[-1]
    for nic in ("left", "lo"):
        received, sent = links[nic]["rx"], links[nic]["tx"]
        expected = {"rx_bytes": received["bytes"], "rx_packets": received["packets"], "rx_errors": received["errors"]}
        expected |= {"tx_bytes": sent["bytes"], "tx_packets": sent["packets"], "tx_errors": sent["errors"]}
        expected |= {"rx_drops": received["dropped"], "tx_drops": sent["dropped"]}
        assert {name: last[f"{nic}.{name}"] for name in expected} == expected
    assert last["left.tx_bytes"] > sum(BYTES.values())


def test_the_interfaces_are_those_of_the_namespace(network: Network) -> None:
    """The mount's /sys shows other ones."""
    about = open_records(network.folder / "nic" / "nic.rec").about
    assert about["nics"] == ["left", "lo"]
    assert "left" not in network.said["outer_nics"]
    assert set(network.said["facts"]["nic"]["appeared_ns"]) == {"late", "later"}
