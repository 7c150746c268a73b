"""Two users train on the same nodes at once: neither sees nor disturbs the other."""

import json
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import open_records, read_json_lines
from tests.slurm import cluster_keeper
from tests.slurm.cluster import USERS, SlurmCluster
from tests.slurm.there import ringtap, said, status, steps, until

pytestmark = [pytest.mark.shares, pytest.mark.together("Slurm"), pytest.mark.usefixtures("unchanged_machine")]
TRAINING = ["python", "-m", "ringtap.examples.scale_model", "--parameters=100000", "--layers=2", "--compute-s=0.05"]
SIZE = ["--nodes=2", "--mem=1500M", "--account=def-x", "--time=10", "--sbatch=nodelist=n[0-1]"]
RECORDED = ["--collect=nic,sockets,steps", "--every=50ms"]
ITERATIONS = 100
# after its training a job waits until both have been seen to run
UNTIL_SEEN = ["sh", "-c", '"$@" || exit; until [ -e "both were seen" ]; do sleep 0.1; done', "sh"]


def test_two_runs_on_the_same_nodes(cluster: SlurmCluster) -> None:
    runs = {user: cluster.home(user) / "runs" / "mine" for user in USERS}
    before = left_behind(cluster)  # by tests that kill agents
    jobs = {}
    for user in USERS:  # the same names, as seen from their homes
        job = [*UNTIL_SEEN, *TRAINING, f"--iterations={ITERATIONS}"]
        words = ["submit", "-o", "runs/mine", "--json", *SIZE, *RECORDED, "--", *job]
        jobs[user] = json.loads(ringtap(cluster, *words, user=user).stdout)["job"]
    until(lambda: all(len(steps(run)) == 2 for run in runs.values()), "the training of both")
    both = [cluster.job(job) for job in jobs.values()]
    assert {(job["JobState"], job["NodeList"]) for job in both} == {("RUNNING", "n[0-1]")}
    for user in USERS:
        (cluster.home(user) / "both were seen").touch()

    for verb in ("status", "analyze"):
        refused = ringtap(cluster, verb, runs["bob"], user="alice", code=2)
        assert "may not be read by this user" in refused.stderr
        assert refused.stderr.count("\n") == 1
    sockets = []
    for user, job in jobs.items():
        assert cluster.wait(job)["JobState"] == "COMPLETED", said(runs[user])
        told = status(cluster, runs[user], user)
        assert (told["status"], told["why"]) == ("complete", "")
        sockets.append(check_run(runs[user], user))
    assert not sockets[0] & sockets[1]

    left = left_behind(cluster)
    places = [line.split() for line in left if "ringtap-6" in line and line.startswith("d")]
    assert sorted((mode, uid, name) for mode, _, uid, *_, name in places) == [
        ("drwx------", uid, f"ringtap-{uid}") for uid in ("60001", "60001", "60002", "60002")
    ]
    # and nothing in them
    assert not [line for line in left if line.endswith((".lock", ".sock")) and line not in before]


def left_behind(cluster: SlurmCluster) -> list[str]:
    """What is in the nodes' own /tmp, and where agents and supervisors meet."""
    command = ["srun", "--account=def-x", "--nodelist=n[0-1]", "sh", "-c", "ls -ln /tmp; ls /tmp/ringtap-*"]
    # ls pads its columns to the widest entry
    return [" ".join(line.split()) for line in cluster.run(command).stdout.splitlines()]


def check_run(run: Path, user: str) -> set[tuple[str, int]]:
    """All of it and nothing else is there; returns the sockets, by node and inode, that its ranks had."""
    assert steps(run) == {"n0": ITERATIONS, "n1": ITERATIONS}
    sockets = set()
    for folder in (run / "nodes").iterdir():
        item = json.loads((folder / "node.json").read_text())
        assert [job["exit_code"] for job in item["jobs"]] == [0]
        assert open_records(folder / "nic" / "nic.rec").count > 20
        sockets |= {(folder.name, owner["inode"]) for owner in read_json_lines(folder / "sockets" / "owners.jsonl")[0]}
    assert sockets
    assert {path.stat().st_uid for path in run.rglob("*")} == {cluster_keeper.USERS[user]}
    return sockets
