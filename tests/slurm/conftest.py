"""One Slurm for all tests of this folder; each finds it idle."""

import os
import shutil
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import PATH, SlurmCluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A Slurm of four nodes; the folders of all tests are on its shared file system."""
    if os.geteuid():
        pytest.skip("needs root: only root can start a Slurm of its own")
    missing = [tool for tool in ("slurmctld", "slurmd", "munged") if not shutil.which(tool, path=PATH)]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here: install slurmctld, slurmd, slurm-client and munge")
    with SlurmCluster(tmp_path_factory.getbasetemp() / "slurm") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def mended(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leaves the next test a cluster at rest."""
    if "unchanged_machine" in request.fixturenames:  # compared after the mending
        request.getfixturevalue("unchanged_machine")
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").mend()
