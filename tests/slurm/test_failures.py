"""A node that dies under a job, a job that takes its nodes, a job that exceeds its memory: the run says why."""

import json
import re
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import open_records
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

    collected = ringtap(cluster, "merge", run).stdout
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


def test_a_job_that_is_preempted(cluster: SlurmCluster) -> None:
    home, told = cluster.home("alice"), {}
    for name in ("requeue", "no-requeue"):
        submit = ["submit", "-o", home / name, "--json", f"--sbatch={name}", *SIZE, *RECORDED, "--", *TRAINING]
        told[name] = json.loads(ringtap(cluster, *submit).stdout)["job"]
    until(lambda: all(sum(steps(home / name).values()) > 20 for name in told), "training of both jobs")
    urgent = ["--parsable", "--partition=urgent", "--account=def-x", "--nodes=4", "--exclusive", "--wrap=true"]
    cluster.run(["scontrol", "create", "PartitionName=urgent", "Nodes=ALL", "PriorityTier=10", "State=UP"])
    try:
        cluster.wait(cluster.run(["sbatch", *urgent], user="bob").stdout.strip(), "COMPLETED")
    finally:
        cluster.run(["scontrol", "delete", "PartitionName=urgent"])

    cluster.wait(told["no-requeue"], "PREEMPTED")
    ended = status(cluster, home / "no-requeue")
    assert ended["status"] == "partial"
    assert "it was cancelled or preempted" in ended["why"]
    assert "Slurm says PREEMPTED: another job took its nodes" in ended["jobs"][0]["why"]

    assert "its last run ended" in status(cluster, home / "requeue")["why"]
    # Slurm would let it wait for two minutes
    cluster.run(["scontrol", "update", f"JobId={told['requeue']}", "StartTime=now"])
    again = home / "requeue-restart1"
    until(lambda: sum(steps(again).values()) > 20, f"training anew ({said(home / 'requeue')})")
    ended = status(cluster, home / "requeue")
    assert (ended["status"], ended["nodes"][0]["status"]) == ("partial", "complete")
    assert ended["why"] == "Slurm started the job again: requeue-restart1 has its next start"
    assert status(cluster, again)["status"] == "running"
    for run in (home / "requeue", home / "no-requeue"):
        check_recording(next((run / "nodes").iterdir()))


def test_a_job_that_exceeds_its_memory(cluster: SlurmCluster) -> None:
    run = cluster.home("alice") / "memory"
    # no more than it takes: Slurm's daemon may look late
    hog = "kept = []; import time\nwhile True: len(kept) < 24 and kept.append(b'x' * (50 << 20)); time.sleep(0.05)"
    job = ["sh", "-c", f'"$@"; exec python -c "{hog}"', "sh", *TRAINING, "--iterations=40"]
    size = ["--mem=800M", "--account=def-x", "--time=10"]
    submit = ["submit", "-o", run, "--json", *size, *RECORDED, "--", *job]
    cluster.wait(json.loads(ringtap(cluster, *submit).stdout)["job"], "FAILED", "OUT_OF_MEMORY", "CANCELLED")
    until(lambda: status(cluster, run)["status"] != "running", "the end of the recording")
    told = status(cluster, run)
    # Slurm's daemon kills the supervisor with the job, so the node does not know the exit code
    assert (told["status"], told["nodes"][0]["status"]) == ("failed", "partial")
    assert "exit code 137 (128 + SIGKILL)" in told["why"]
    assert re.search(r"Slurm's daemon says: StepId=[\d.]+ exceeded memory limit \(\d+ > 838860800\)", told["why"])
    assert sum(steps(run).values()) == 40
    check_recording(next((run / "nodes").iterdir()))


def check_recording(folder: Path) -> None:
    """Whole records of counters and steps, without a gap."""
    nic = open_records(folder / "nic" / "nic.rec")
    times = [row[0] for row in nic.walk()]
    assert len(times) > 20
    assert times == sorted(times)
    (path,) = [path for path in (folder / "steps").glob("rank*.rec") if path.suffixes == [".rec"]]
    numbers = [row[0] for row in open_records(path).walk()]
    assert numbers == list(range(len(numbers)))
