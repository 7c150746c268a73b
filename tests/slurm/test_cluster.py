"""The test cluster is what the tests of this folder take it for."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.slurm.cluster import ROOT, USERS, SlurmCluster

ACCOUNT = "--account=def-x"
pytestmark = [pytest.mark.shares, pytest.mark.together("Slurm"), pytest.mark.usefixtures("unchanged_machine")]


def test_nodes_are_machines_of_their_own(cluster: SlurmCluster, tmp_path: Path) -> None:
    inquiry = "echo $(hostname) $(ls -m /sys/class/net | tr -d ' ') $(hostname -I) $(ls /tmp/mine* 2>/dev/null)"
    words = f"touch /tmp/mine-$(hostname) /dev/shm/mine; ls {tmp_path}; {inquiry}"
    (tmp_path / "seen").touch()
    done = cluster.run(["srun", ACCOUNT, "--nodes=4", "bash", "-c", words])
    expected = [line for n in range(4) for line in (f"n{n} eth0,lo 10.77.0.{10 + n} /tmp/mine-n{n}", "seen")]
    assert sorted(done.stdout.splitlines()) == sorted(expected), done.stderr
    assert cluster.run(["hostname"]).stdout == "login\n"
    assert not Path("/dev/shm/mine").exists()


def test_users_are_not_root_and_name_an_account(cluster: SlurmCluster) -> None:
    refused = cluster.run(["srun", "id", "-un"], user="alice")
    assert refused.returncode == 1
    assert "--account" in refused.stderr
    for user in USERS:
        assert cluster.run(["srun", ACCOUNT, "id", "-un"], user=user).stdout.strip() == user
    assert cluster.run(["ls", cluster.home("bob")], user="alice").returncode == 2


def test_a_job_has_a_folder_on_the_node_and_leaves_nothing(cluster: SlurmCluster) -> None:
    begin = 'echo $SLURM_TMPDIR; touch "$SLURM_TMPDIR/x"; setsid --fork sleep 1234 >/dev/null 2>&1 </dev/null'
    done = cluster.run(["srun", ACCOUNT, "--nodelist=n1", "bash", "-c", begin], user="alice")
    folder = done.stdout.strip()
    assert folder.startswith("/tmp/localscratch/alice."), done.stderr
    cluster.mend()  # the node cleans up after srun has ended
    look = f"ls -d {folder} 2>&1; pgrep -f '[s]leep 1234' || echo none left"
    done = cluster.run(["srun", ACCOUNT, "--nodelist=n1", "bash", "-c", look])
    assert done.stdout.splitlines()[1:] == ["none left"]
    assert "No such file" in done.stdout


def test_links_can_be_limited(cluster: SlurmCluster) -> None:
    cluster.limit("40mbit")
    # the server may be late
    again = 'said=$(iperf3 -c n0 -t 1 --json); grep -q "unable to connect" <<<"$said"'
    client = f'while {again}; do sleep 0.1; done; echo "$said"'
    words = f"if [ $SLURM_PROCID = 0 ]; then iperf3 -s -1 >/dev/null; else {client}; fi"
    done = cluster.run(["srun", ACCOUNT, "--nodes=2", "--nodelist=n[0-1]", "bash", "-c", words])
    received = json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]
    # 40 Mbit/s of frames carry 38 of payload; the bucket adds half a megabit, a busy machine takes away
    assert 15e6 < received < 40e6


def test_nodes_lose_their_power_and_get_it_back(cluster: SlurmCluster) -> None:
    where = [ACCOUNT, "--nodelist=n3"]
    assert cluster.run(["srun", *where, "touch", "/tmp/before"]).returncode == 0
    cluster.kill(3)
    assert cluster.run(["ip", "link", "show", "to-n3"]).returncode == 1
    cluster.up(3)
    assert cluster.run(["srun", *where, "bash", "-c", "hostname; ls /tmp/before"]).stdout == "n3\n"


MAKER = """\
import sys, time
from pathlib import Path
from tests.slurm.cluster import SlurmCluster
with SlurmCluster(Path(sys.argv[1]), nodes=1) as cluster:
    print(cluster.run(["hostname"]).stdout, cluster._keeper.pid, flush=True)
    time.sleep(60)
"""


@pytest.mark.needs_root("start a Slurm of its own")
def test_it_ends_with_its_maker_even_if_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MAKER, str(tmp_path / "second")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == "login\n"
        keeper = psutil.Process(int(maker.stdout.readline()))
        lived = [keeper, *keeper.children(recursive=True)]
        names = {process.name() for process in lived}
        maker.kill()
    assert {"munged", "slurmctld", "slurmd"} <= names
    assert not psutil.wait_procs(lived, timeout=10)[1]
