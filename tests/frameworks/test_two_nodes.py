"""An unedited job under torchrun on two hosts of the testbed, two ranks each, recorded by `ringtap run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.core.append_only_logs import RecordFile, open_records
from tests.frameworks.ranks import QUICK
from tests.unit.agent_processes import ended

pytestmark = [pytest.mark.shares, pytest.mark.together("frameworks"), pytest.mark.usefixtures("unchanged_machine")]
SCRIPT = Path(__file__).resolve().parent / "jobs" / "plain_ddp.py"
HOSTS = ("S0", "S1")
PORT = "29517"


def start(host: str, folder: Path, *settings: str) -> subprocess.Popen[str]:
    """One host's half of the job: the user's own launch line with ringtap before it, in a bare environment."""
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    env |= {"TESTED_BY": os.environ["TESTED_BY"], "PYTHONPATH": QUICK}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    launcher += ["--node-rank", host[1:], "--master-addr", "S0", "--master-port", PORT]
    command = [sys.executable, "-m", "ringtap.cli", "testbed", "exec", "--testbed", "pairs", host, "--"]
    command += [sys.executable, "-m", "ringtap.cli", "run", *settings, "--node", host, "--", *launcher, str(SCRIPT)]
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def by_rank(run: Path, host: str, suffix: str) -> dict[int, RecordFile]:
    paths = [p for p in (run / "nodes" / host / "steps").glob("*.rec") if "".join(p.suffixes) == suffix]
    return {file.about["rank"]: file for file in map(open_records, paths)}


def test_two_nodes_with_two_ranks_each(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with (
        RunningTestbed(TestbedSpec(name="pairs", hosts=HOSTS, rate_bps=500_000_000), verify=False),
        ended(start("S0", tmp_path, "--join", str(run))) as first,
        ended(start("S1", tmp_path, "--join", str(run))) as second,
    ):
        jobs = [first, second]
        said = [job.communicate(timeout=200) for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], said
    assert sum("parameters" in output for output, _ in said) == 1
    for place, host in enumerate(HOSTS):
        node = json.loads((run / "nodes" / host / "node.json").read_text())
        assert node["status"] == "complete", node["why"]
        ranks = {2 * place, 2 * place + 1}
        steps, ddp = by_rank(run, host, ".rec"), by_rank(run, host, ".ddp.rec")
        assert set(steps) == set(ddp) == ranks
        for rank in ranks:
            records = [(*record[:2], *record[6:8]) for record in steps[rank].tail()]
            assert records == [(step, 0, 0, 1) for step in range(4)]  # 64 samples, 4 ranks, batches of 8, 2 epochs
            assert [record[0] for record in ddp[rank].tail()] == list(range(4))
            assert (steps[rank].about["world_size"], steps[rank].about["local_rank"]) == (4, rank % 2)
