"""A node that dies under a wrapped training job: the run is partial and names it, and the rest of it is whole."""

import json
from pathlib import Path

import pytest

from ringtap.core.records import open_records
from tests.slurm.cluster import SlurmCluster
from tests.slurm.there import ODD, ringtap, said, status, steps, until

pytestmark = [pytest.mark.shares, pytest.mark.together("Slurm"), pytest.mark.usefixtures("unchanged_machine")]
TRAINING = ["python", "-m", "ringtap.examples.scale_model", "--parameters=100000", "--layers=2", "--compute-s=0.05"]
SIZE = ["--mem=1500M", "--account=def-x", "--time=10"]
RECORDED = ["--collect=nic,steps", "--every=50ms"]


# the second is that of the batch script, and begins anew at once
@pytest.mark.parametrize(("nodes", "number", "comes_back"), [(4, 3, False), (2, 0, True)])
def test_a_node_that_dies(cluster: SlurmCluster, nodes: int, number: int, comes_back: bool) -> None:
    run = cluster.home("alice") / f"{ODD} {number}"
    ringtap(cluster, "submit", "-o", run, f"--nodes={nodes}", *SIZE, *RECORDED, "--", *TRAINING)
    until(lambda: len(found := steps(run)) == nodes and min(found.values()) > 20, f"training ({said(run)})")
    before = status(cluster, run)
    assert before["status"] == "running"
    assert [node["status"] for node in before["nodes"]] == ["recording"] * nodes

    cluster.kill(number)
    if comes_back:
        cluster.up(number)
    until(lambda: status(cluster, run)["status"] != "running", "Slurm's notice of the dead node")
    told = status(cluster, run)
    assert told["status"] == "partial"
    assert "NODE_FAIL" in told["why"]
    assert f"the recording of n{number} was cut off" in told["why"]
    assert {node["node"]: node["status"] for node in told["nodes"]} == {
        f"n{other}": "cut off" if other == number else "complete" for other in range(nodes)
    }
    shown = ringtap(cluster, "status", run).stdout
    assert f"n{number} cut off: wrote last at " in shown

    collected = ringtap(cluster, "collect", run).stdout
    info = json.loads((run / "run.json").read_text())
    assert (info["status"], info["why"]) == ("partial", told["why"])
    assert told["why"] in collected
    # settled: nothing is written again, and what Slurm says of the job does not change
    assert status(cluster, run)["why"] == told["why"]
    assert status(cluster, run)["jobs"] == told["jobs"]
    assert "Slurm says NODE_FAIL (NodeDown): a node of it failed" in told["jobs"][0]["why"]
    for node in told["nodes"]:
        check_recording(run / "nodes" / node["node"])
    analyzed = json.loads(ringtap(cluster, "analyze", run, "--json").stdout)
    assert (analyzed["run"]["status"], analyzed["run"]["ranks"]) == ("partial", nodes)


def check_recording(folder: Path) -> None:
    """Whole records of counters and steps, without a gap."""
    nic = open_records(folder / "nic" / "nic.rec")
    times = [row[0] for row in nic.walk()]
    assert len(times) > 20
    assert times == sorted(times)
    (path,) = [path for path in (folder / "steps").glob("rank*.rec") if path.suffixes == [".rec"]]
    numbers = [row[0] for row in open_records(path).walk()]
    assert numbers == list(range(len(numbers)))
