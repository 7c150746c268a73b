"""Testbeds with several switches, or with hosts that forward: on the real kernel."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ringtap
from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.core.errors import UsageError
from ringtap.core.run_directory import read_points
from tests.testbed.sweeps import run, status
from tests.testbed.test_lab import RINGTAP, UNPRIVILEGED

pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]

# connects hosts over both networks, within the testbed's namespaces
REACH = """
import json, sys
from ringtap.agents.testbed import build
from ringtap.agents.testbed.topology import TestbedSpec
spec, pairs = TestbedSpec.from_json(json.loads(sys.argv[1])), json.loads(sys.argv[2])
size, count = int(sys.argv[3]), 0
for source, target in pairs:
    # the switch that adds gradients has one address
    for address in (spec.training_ip, spec.cross_ip) if target in spec.hosts else (spec.training_ip,):
        sender, receiver = build._connect(source, target, address(target))
        assert receiver.getpeername()[0] == address(source)
        sender.sendall(bytes(size))
        left = size
        while left:
            left -= len(receiver.recv(left))
        sender.close()
        receiver.close()
        count += 1
print(count)
"""


def spec(name: str, hosts: int, topology: str, **options: object) -> TestbedSpec:
    names = tuple(f"S{number}" for number in range(hosts))
    return TestbedSpec(name, names, 100_000_000, topology=topology, **options)  # type: ignore[arg-type]


def reach(testbed: RunningTestbed, pairs: list[tuple[str, str]], size: int = 1) -> int:
    """Count the connections of pairs of hosts, two each, that carried some bytes."""
    words = [json.dumps(testbed.state.spec.to_json()), json.dumps(pairs), str(size)]
    command = testbed.command(testbed.hosts[0], sys.executable, "-c", REACH, *words)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.alone(1)
def test_every_link_of_leaves_and_spines_gives_its_rate() -> None:
    """Within 5 %, as on a star: a token bucket loses what it may not keep while a machine does not serve its timer."""
    leaves = spec("leaves", 4, "leaf-spine", per_leaf=2, spines=2, oversubscription=2.0)
    with RunningTestbed(leaves) as testbed:
        links = testbed.state.links
    assert [(link["host"], link["direction"]) for link in links] == sorted(link.place for link in leaves.links)
    assert {link["asked_bps"] for link in links} == {100_000_000, 50_000_000}
    for link in links:
        assert link["measured_bps"] == pytest.approx(link["asked_bps"], rel=0.05), link
        assert link["congestion_control"] == "cubic"


def test_flows_between_leaves_take_both_spines() -> None:
    leaves = spec("spread", 4, "leaf-spine", per_leaf=2, spines=2)
    with RunningTestbed(leaves, verify=False) as testbed:
        before = testbed.link_counts()
        assert reach(testbed, [("S0", "S2"), ("S1", "S3")] * 16, 20_000) == 64
        after = testbed.link_counts()
    sent = {
        link.place: last.size_bytes - first.size_bytes
        for link, first, last in zip(leaves.links, before, after, strict=True)
    }
    up = [sent["leaf0", f"to spine{spine}"] for spine in range(2)]
    assert sum(up) > 64 * 20_000
    # each of 64 flows takes either spine: that fewer than 8 take one has a probability of 10^-10
    assert min(up) > 7 * 20_000


def test_hosts_of_a_fat_tree_reach_each_other() -> None:
    with RunningTestbed(spec("fat", 16, "fat-tree"), verify=False) as testbed:
        hosts = testbed.hosts
        # at the same edge switch, in the same pod, and in another one
        pairs = [(host, hosts[(number + away) % 16]) for number, host in enumerate(hosts) for away in (1, 3, 8)]
        aggregator = [(hosts[number], "core0") for number in (0, 5, 10, 15)]
        assert reach(testbed, pairs + aggregator) == 2 * len(pairs) + len(aggregator)
        shown = subprocess.run(
            testbed.command("S0", "ip", "route"), capture_output=True, text=True, check=True
        ).stdout.splitlines()
    assert len(shown) == 3, "one route for training, one for cross traffic, and one to the switch"


@pytest.mark.parametrize(("hosts", "topology", "sides"), [(5, "ring", ""), (9, "torus", "3x3")])
def test_hosts_that_forward_reach_each_other(hosts: int, topology: str, sides: str) -> None:
    with RunningTestbed(spec(topology, hosts, topology, sides=sides), verify=False) as testbed:
        pairs = [(a, b) for a in testbed.hosts for b in testbed.hosts if a != b]
        assert reach(testbed, pairs) == 2 * len(pairs)
        # cross traffic has interfaces of its own, also where it only passes through
        shown = subprocess.run(
            testbed.command("S1", "cat", "/proc/net/dev"), capture_output=True, text=True, check=True
        ).stdout
    received = {line.split(":")[0].strip(): int(line.split()[2]) for line in shown.splitlines()[2:]}
    assert all(received[f"cross{number}"] > 0 for number in range(2 if topology == "ring" else 4))


def test_a_ring_without_privilege() -> None:
    arguments = ["testbed", "up", "--name", "mere", "--hosts", "3", "--topology", "ring"]
    arguments += ["--capacity", "20mbit", "--json"]
    up = subprocess.run([*UNPRIVILEGED, *RINGTAP, *arguments], capture_output=True, text=True, check=False, timeout=120)
    try:
        assert up.returncode == 0, up.stderr
        shown = json.loads(up.stdout)
        assert shown["spec"]["topology"] == "ring"
        assert [link["direction"] for link in shown["links"][:2]] == ["to S1 by eth0", "to S2 by eth1"]
        assert "S2 to S1 by eth" in run("testbed", "status").stdout.replace("  ", "")
    finally:
        down = subprocess.run([*UNPRIVILEGED, *RINGTAP, "testbed", "down", "mere"], check=False)
    assert down.returncode == 0


def test_a_delay_needs_netem() -> None:
    try:
        with RunningTestbed(spec("late", 2, "star", delay_s=0.05), verify=False) as testbed:
            command = testbed.command("S0", "tc", "qdisc", "show", "dev", "eth0")
            assert "delay 50ms" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except UsageError as error:
        assert str(error).startswith("this kernel has no sch_netem, which delays links: load it")


# rank 0 takes half a megabyte from each other rank in an iteration
JOB = """
import os, socket, time, ringtap
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if rank == 0:
    with socket.create_server(address) as server:
        others = [server.accept()[0] for _ in range(ranks - 1)]
else:
    while rank:
        try:
            others = [socket.create_connection(address)]
            break
        except OSError:
            time.sleep(0.05)
while True:
    for other in others:
        if rank == 0:
            other.recv(500_000, socket.MSG_WAITALL)
            other.sendall(b".")
        else:
            other.sendall(bytes(500_000))
            other.recv(1)
    ringtap.step()
"""
PLAN = f"""
[sweep]
name = "leaves"
scale = 250
loads = [0.6]
traffic = ["consistent"]
[testbed]
topology = ["leaf-spine", "star"]
oversubscription = 4
configuration = "custom"
hosts = ["S0", "S1", "S2", "S3"]
workers = ["S0", "S3"]
cross_from = "S2"
cross_to = "S1"
[window]
warmup_iterations = 2
settle = "300ms"
min_time = "1s"
min_iterations = 5
max_time = "10s"
[[models]]
name = "gather"
parameters = 1
command = ["{{python}}", "-c", {json.dumps(JOB)}]
"""


def test_a_sweep_of_two_topologies_finds_the_oversubscribed_uplink(tmp_path: Path) -> None:
    """S3 sends to S0 and S2 to S1: both pass from leaf1 to leaf0, over links with half the rate of the hosts'."""
    (tmp_path / "plan.toml").write_text(PLAN)
    done = run("sweep", tmp_path / "plan.toml", "-o", tmp_path / "out", "--force")
    assert done.returncode == 0, done.stderr
    assert status(tmp_path / "out") == ("complete", "")
    info = json.loads((tmp_path / "out" / "run.json").read_text())
    leaves, star = info["bottlenecks"]["leaf-spine"], info["bottlenecks"]["star"]
    assert leaves["cross"] == star["cross"] == [{"node": "S1", "nic": "cross0", "direction": "rx"}]
    assert leaves["total"] == [{"node": "leaf1", "nic": "to-spine0", "direction": "tx"}]
    assert star["total"] == [{"node": "switch", "nic": "to-S1", "direction": "tx"}]
    assert leaves["carries_all"]
    points = read_points(tmp_path / "out" / "points.jsonl")[0]
    assert [(point["series"], point["topology"]) for point in points] == [
        ("gather-consistent-leaf-spine", "leaf-spine"), ("gather-consistent-star", "star"),
    ]  # fmt: skip
    nodes = {path.name for path in (tmp_path / "out" / points[0]["directory"] / "nodes").iterdir()}
    assert nodes == {"S0", "S1", "S2", "S3", "leaf1"}
    first, second = ringtap.open_sweep(tmp_path / "out").points.to_dict("records")
    assert (first["topology"], second["topology"]) == ("leaf-spine", "star")
    # job and cross traffic share the uplink, and nothing in the star
    assert first["mean_s"] > 1.2 * second["mean_s"]
