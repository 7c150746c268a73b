"""Jobs that share links in an allocation of a real Slurm."""

import json
import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import ROOT, SlurmCluster

# on a busy machine, what a job sends within an iteration of 80 ms is not known
pytestmark = [pytest.mark.alone(1), pytest.mark.usefixtures("unchanged_machine")]
RINGTAP = (sys.executable, "-m", "ringtap.cli")
# of four ports, each job's rank 0 takes two, although none has taken its own when the next one is asked for
PLAN = """\
[sweep]
capacity = "1gbit"
offsets = ["0ms"]
[window]
warmup_iterations = 2
settle = "100ms"
min_time = "1s"
min_iterations = 15
[cluster]
reach = "slurm"
ports = "20000-20003"
"""
HOST = '[[hosts]]\nname = "{}"\ninterface = "eth0"\n'
JOB = '[[jobs]]\nname = "{}"\nmodel = "own"\nparameters = 1\ncommand = ["{{python}}", "{}"]\nworkers = ["S0", "S1"]\n'


def test_jobs_share_the_links_of_their_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    script = ROOT / "tests" / "testbed" / "sharing_rank.py"
    tables = [*(HOST.format(name) for name in ("S0", "S1")), *(JOB.format(name, script) for name in "ab")]
    (tmp_path / "plan.toml").write_text(PLAN + "".join(tables))
    command = ["salloc", "--account=def-x", "--nodes=2", "--quiet", *RINGTAP, "sweep", "plan.toml", "-o", "out"]
    done = cluster.run(command, user="alice", cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "3 points" in done.stdout
    # it was looked for the traffic of others before
    assert json.loads((tmp_path / "out" / "run.json").read_text())["idle"]["words"] == []
    lines = [json.loads(line) for line in (tmp_path / "out" / "shared.jsonl").read_text().splitlines()]
    assert [line["offset"] for line in lines] == ["alone", "alone", "0ms"]
    ports = [{"node": node, "nic": "eth0", "direction": way} for node in ("S0", "S1") for way in ("rx", "tx")]
    assert lines[2]["ports"] == ports
    for node in ("S0", "S1"):  # of the first job, which has the counters of both
        assert (tmp_path / "out" / lines[2]["jobs"][0]["directory"] / "nodes" / node / "nic" / "nic.rec").is_file()
    report = cluster.run([*RINGTAP, "report", "out"], user="alice", cwd=tmp_path, timeout=120)
    assert report.returncode == 0, report.stderr
    assert "0ms, score" in report.stdout
