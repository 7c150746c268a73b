"""``ringtap submit`` before Slurm is asked: where a run may lie, what must be there, what sbatch is not to see."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.core.errors import UsageError
from ringtap.slurm.site_profiles import Site, load_site
from ringtap.slurm.submit import check_place, clean_environment, file_system, read_only_place

pytestmark = pytest.mark.shares

GENERIC, TRILLIUM = load_site("generic", {}), load_site("trillium", {})


def submit(folder: Path, *options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Where there is no sbatch, and no profile of whoever runs the tests."""
    environment = {"PATH": str(folder), "HOME": str(folder), "PYTHONPATH": os.environ.get("PYTHONPATH", "")} | variables
    words = [sys.executable, "-m", "ringtap.cli", "submit", *options]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "nothing to submit: ringtap submit -- COMMAND, or ringtap submit PLAN.toml"),
        (("--", "true"), "there is no sbatch here: submit from a login node"),
        (("--site", "narvl", "--", "true"), "there is no site 'narvl': did you mean narval?"),
        (("--site", "narval", "--", "true"), "narval wants a job to have --account: add it"),
        (("--time", "soon", "--", "true"), "--time 'soon' is not a time"),
        (("--stop-before", "soon", "--", "true"), "--stop-before 'soon' is not understood"),
        (("--python", "/nowhere/python", "--", "true"), "--python /nowhere/python is not an interpreter"),
        (("--python", "x", "--wheels", "y", "--", "true"), "give one of them"),
        (("--requirement", "needs.txt", "--", "true"), "needs ringtap's own wheel too: ringtap bundle, --wheels DIR"),
        (("--requirement", "needs.txt", "--wheels", ".", "--", "true"), "needs.txt is not a file"),
        (("--wheels", ".", "--", "true"), "has no wheel of ringtap: make one with ringtap bundle"),
        (("--keep", "/etc/passwd", "--", "true"), "--keep '/etc/passwd' is not below $SLURM_TMPDIR"),
        (("--keep", "../*", "--", "true"), "--keep '../*' is not below"),
        (("--collect", "nick", "--", "true"), "nick"),
        (("--every", "1h", "--", "true"), "--every 1h is outside 1ms to 60s"),
        (("--disk-limit", "1kB", "--", "true"), "that the first minute needs: give more"),
        (("--packets-around-slow", "p99:5s", "--", "true"), "add --collect default,packets"),
        (("--packets-around-slow", "9:5s", "--collect", "default,packets", "--", "true"), "'9:5s' is not understood"),
        (("--nodes", "two", "--", "true"), "argument --nodes: invalid int value: 'two'"),
        (("missing.toml",), "missing.toml"),
    ],
)
def test_what_is_wrong_is_one_sentence(options: tuple[str, ...], words: str, tmp_path: Path) -> None:
    done = submit(tmp_path, *options)
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("ringtap: ")
    assert words in lines[0]
    assert not list(tmp_path.iterdir())


def test_printing_needs_no_slurm_and_writes_nothing(tmp_path: Path) -> None:
    done = submit(tmp_path, "--print", "--account", "a b", "--", "sh", "-c", "echo $x", "--", "-o", CC_CLUSTER="none")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n")
    assert '#SBATCH --account="a b"\n' in done.stdout
    assert done.stdout.endswith(" -- sh -c $'echo $x' -- -o\n")
    assert not list(tmp_path.iterdir())


def test_the_site_is_the_cluster_one_is_on(tmp_path: Path) -> None:
    done = submit(tmp_path, "--print", "--account", "a", "--time", "60", "--", "true", CC_CLUSTER="rorqual")
    assert "for the site rorqual." in done.stdout
    assert "module load StdEnv/2023 python/3.11" in done.stdout


def test_a_run_where_jobs_cannot_write_is_refused(tmp_path: Path) -> None:
    home, scratch = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    scratch.mkdir()
    (home / "link").symlink_to(scratch)
    variables = {"HOME": str(home), "PROJECT": "", "SCRATCH": str(scratch)}
    site = Site("s", read_only=("$HOME", "$PROJECT/x", "/project"))
    with pytest.raises(
        UsageError, match=r"jobs cannot write to .*: \$HOME is read-only on the nodes of s; use -o \$SCRATCH"
    ):
        check_place(home / "runs" / "a", site, variables)
    assert check_place(home / "link" / "runs" / "a", site, variables) == []
    assert read_only_place(Path("/project/def-x/me"), site, variables) == "/project"
    assert read_only_place(scratch, site, variables) == ""
    assert read_only_place(Path("/"), site, variables) == ""


def test_a_job_that_runs_in_a_folder_it_cannot_write_to_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    site = tmp_path / "away.toml"
    site.write_text('read_only = ["$HOME"]\n')
    done = submit(tmp_path / "home", "--site", str(site), "-o", str(tmp_path / "run"), "--", "true")
    assert f"ringtap: the job runs in {tmp_path / 'home'}, which is read-only on the nodes of away" in done.stderr
    done = submit(tmp_path / "home", "--site", str(site), "--", "true")
    assert "is read-only on the nodes of away; use -o $SCRATCH/" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_run_on_a_machines_own_disk_is_refused_where_shared_ones_are_known() -> None:
    memory = Path("/dev/shm/no/such/folder")
    if file_system(memory) != "tmpfs":
        memory = Path("/run/no/such/folder")
    assert file_system(memory) == "tmpfs"
    assert "(tmpfs): do the nodes see it?" in check_place(memory, GENERIC, {})[0]
    with pytest.raises(UsageError, match=r"own disk \(tmpfs\), which the nodes do not see: name a shared one, -o DIR"):
        check_place(memory, TRILLIUM, {})
    assert file_system(Path("/proc/self")) == "proc"


def test_sbatch_sees_the_script_and_not_what_would_overrule_it() -> None:
    script = "#!/bin/bash\n#SBATCH --account=x\n#SBATCH --time=5\n#SBATCH --mem=1G\n#SBATCH --no-requeue\n"
    kept = {"SBATCH_PARTITION": "p", "SBATCH_GPUS_PER_NODE": "1", "SLURM_CONF": "/c", "A": "b"}
    variables = {"ACCOUNT": "y", "TIMELIMIT": "1", "MEM_PER_NODE": "2", "REQUEUE": "1", "OUTPUT": "/tmp/x"}
    variables = {f"SBATCH_{name}": text for name, text in variables.items()}
    assert clean_environment(kept | variables, script) == kept
    inside = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "4"}
    assert clean_environment(kept | variables | inside, script) == kept
