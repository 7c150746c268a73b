"""Captures read by Dask's workers in jobs of a real Slurm, as a user of a cluster has them read."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringtap.analysis.pcap.kernels import compile
from tests.slurm.cluster import SlurmCluster
from tests.slurm.there import ODD, RINGTAP
from tests.unit import capture_makers as makers

pytestmark = [pytest.mark.shares, pytest.mark.together("Slurm"), pytest.mark.usefixtures("unchanged_machine")]
JOB = {"CORES": "1", "MEMORY": "1GB", "WALLTIME": "00:05:00", "ACCOUNT": "def-alice"}


@pytest.fixture
def place(cluster: SlurmCluster) -> Iterator[Path]:
    """A user's folder with captures in it."""
    place = cluster.home("alice") / ODD
    assert cluster.run(["mkdir", place], user="alice").returncode == 0
    cached = cluster.home("alice") / ".cache" / "ringtap"
    assert cluster.run(["mkdir", "-p", cached], user="alice").returncode == 0
    compile.entries()  # so that the user finds the reader compiled
    for path in compile.cache_folder().glob("kernels-*.o"):
        shutil.copyfile(path, cached / path.name)
    (place / "captures").mkdir()  # Slurm writes its own files beside it
    for number in range(3):
        frames = [(number * makers.MS, packet) for _, packet in makers.usual()]
        (place / "captures" / f"part{number}.pcap").write_bytes(makers.classic(makers.frames(frames)))
    yield place
    cluster.run(["rm", "-rf", place])


def test_jobs_find_what_one_process_finds(cluster: SlurmCluster, place: Path) -> None:
    command = [*RINGTAP, "flows", "captures", "--json", "--no-cache"]
    alone = cluster.run(command, user="alice", cwd=place)
    assert alone.returncode == 0, alone.stderr
    asked = {f"DASK_JOBQUEUE__SLURM__{name}": value for name, value in JOB.items()}
    found = cluster.run([*command, "--dask", "slurm:2"], user="alice", cwd=place, env=asked, timeout=100)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout) == json.loads(alone.stdout)
    assert "waiting for a worker in a job of Slurm" in found.stderr
    assert "Traceback" not in found.stderr
    assert list((cluster.home("alice") / ".cache" / "ringtap").glob(".dask-*")) == []


def test_what_slurm_refuses_is_one_sentence(cluster: SlurmCluster, place: Path) -> None:
    """This one demands an account, as many do."""
    asked = {f"DASK_JOBQUEUE__SLURM__{name}": value for name, value in JOB.items() if name != "ACCOUNT"}
    command = [*RINGTAP, "flows", "captures", "--dask", "slurm"]
    done = cluster.run(command, user="alice", cwd=place, env=asked, timeout=100)
    assert done.returncode == 1, done.stderr
    why = "You are associated with no default account: please specify one with --account"
    assert done.stderr == f"ringtap: Slurm takes no job of Dask: {why}\n"
