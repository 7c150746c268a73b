"""`ringtap doctor --site` finds the facts of a real Slurm, on its login host and in a job."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import SlurmCluster

pytestmark = [pytest.mark.shares, pytest.mark.together("Slurm")]

_DOCTOR = (sys.executable, "-m", "ringtap.cli", "doctor", "--json", "--site")
_PROFILE = """\
longest_job = "{longest_job}"
internet = false
shared_file_systems = ["ext4", "overlay", "tmpfs", "xfs", "btrfs", "9p"]
requires = ["account"]
read_only = {read_only}
[[nodes]]
count = 4
cores = 8
memory = "{memory}"
gpu = "h100"
gpus = [1, 4]
"""


def _facts(cluster: SlurmCluster, profile: Path, *launcher: str) -> dict[str, dict[str, Any]]:
    """The checks of the site by name."""
    done = cluster.run([*launcher, *_DOCTOR, profile], user="alice", timeout=120)
    report = json.loads(done.stdout)
    assert report["site"] == profile.stem
    return {item["name"]: item for item in report["checks"] if item["group"] == "site"}


def test_a_profile_is_compared_with_the_cluster(cluster: SlurmCluster, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "right.toml").write_text(_PROFILE.format(longest_job="24:00:00", memory="4000M", read_only=["/usr"]))
    (tmp_path / "wrong.toml").write_text(_PROFILE.format(longest_job="3-0", memory="4G", read_only=["$HOME"]))
    right = _facts(cluster, tmp_path / "right.toml")
    version = cluster.run(["sinfo", "--version"]).stdout.strip()
    assert (right["slurm"]["state"], right["slurm"]["reason"]) == ("ok", version)
    assert right["longest job"]["state"] == "ok"
    assert right["nodes"]["reason"] == "4 × 8 cores, 4000M, h100:4, as in the profile"
    assert right["modules"]["reason"].startswith("none to load: Python 3.")
    assert right["containment"]["state"] == "degraded"  # the test cluster tracks processes by their parents
    assert "proctrack/linuxproc; task/none; " in right["containment"]["reason"]
    assert right["accounting"]["state"] == "unavailable"
    assert right["accounting"]["reason"].startswith("not known: sacct")
    assert right["in a job"]["remedy"] == f"srun --account=YOURS ringtap doctor --site {tmp_path}/right.toml"

    in_a_job = _facts(cluster, tmp_path / "wrong.toml", "srun", "--account=def-x", "--nodes=1")
    assert in_a_job["longest job"]["reason"] == "1-00:00:00; the profile says 3-0"
    assert in_a_job["longest job"]["remedy"] == 'in a profile of your own: longest_job = "1-00:00:00"'
    assert in_a_job["nodes"]["reason"].endswith("the profile says 8 cores, 4G, h100:4")
    assert in_a_job["internet"]["state"] == "ok"  # there is no way out of the test cluster
    assert in_a_job["architecture"]["state"] == "ok"
    assert in_a_job["read-only"]["state"] == "degraded"
    assert "$HOME is writable" in in_a_job["read-only"]["reason"]
    assert in_a_job["local disk"]["reason"].startswith("$SLURM_TMPDIR is on ")
    assert in_a_job["interface"]["reason"].startswith("n0 resolves to ")
    assert "in a job" not in in_a_job
