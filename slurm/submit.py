"""Submits jobs: checks them, makes the run directory with its first files, and calls sbatch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringtap.agents.node.recording_settings import check_disk_limit
from ringtap.core.errors import UsageError
from ringtap.core.parent_death import run_helper
from ringtap.core.run_directory import RunDirectory, write_json
from ringtap.core.run_directory_schema import RUN_JSON
from ringtap.slurm.batch_script import command_script
from ringtap.slurm.bundle import check_wheels
from ringtap.slurm.site_profiles import Site
from ringtap.slurm.status import NOT_BEGUN
from ringtap.slurm.submission_file_names import SubmitPaths
from ringtap.slurm.submission_request import Request

# file systems that are local to one machine
_LOCAL = ("btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
# variables of sbatch that are not named like their option
_VARIABLES = {"time": "TIMELIMIT", "mem": "MEM_PER_NODE", "array": "ARRAY_INX"}
# variables that would move the output elsewhere, or make an array of one job
_UNWANTED_VARIABLES = {"SBATCH_OUTPUT", "SBATCH_ERROR", "SBATCH_ARRAY_INX"}
_SBATCH_TIMEOUT_S = 120.0


def check_place(path: Path, site: Site, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Check that all nodes can write to a folder; return one sentence for each doubt.

    Args:
        path: the folder, which need not exist.
        site: the site.
        environment: the user's environment.

    Raises:
        UsageError: the nodes certainly cannot write there.
    """
    blocked = read_only_place(path, site, environment)
    if blocked:
        raise UsageError(
            f"jobs cannot write to {path}: {blocked} is read-only on the nodes of {site.name}; use -o $SCRATCH/…"
        )
    kind = file_system(path)
    if site.shared_file_systems and kind not in site.shared_file_systems and kind in _LOCAL:
        raise UsageError(
            f"{path} is on this machine's own disk ({kind}), which the nodes do not see: name a shared one, -o DIR"
        )
    if not site.shared_file_systems and kind in ("tmpfs", "ramfs"):
        return [f"{path} is in this machine's memory ({kind}): do the nodes see it?"]
    return []


def read_only_place(path: Path, site: Site, environment: Mapping[str, str]) -> str:
    """Return the read-only folder of a site that contains a path; empty if none does."""
    real = Path(os.path.realpath(path))
    for entry in site.read_only:
        folder = expand(entry, environment)
        if folder.startswith("/") and real.is_relative_to(os.path.realpath(folder)):
            return entry
    return ""


def expand(entry: str, environment: Mapping[str, str]) -> str:
    """Return an entry of ``read_only`` with its variable replaced; not absolute if the variable is not set."""
    name, _, rest = entry.removeprefix("$").partition("/")
    return entry if entry.startswith("/") else environment.get(name, "") + ("/" + rest if rest else "")


def file_system(path: Path) -> str:
    """Return the type of the file system of a path, which need not exist; empty if unknown."""
    existing = Path(os.path.realpath(path))
    while not existing.exists():
        existing = existing.parent
    device = existing.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    for line in lines:
        fields, _, kind = line.partition(" - ")
        if fields.split()[2] == wanted:
            return kind.split()[0]
    return ""


def check_files(request: Request) -> None:
    """Check that the files that the job needs exist, and that its options are valid.

    Raises:
        UsageError: a file is missing or an option is not valid; the message names it.
    """
    environment = request.environment
    check_disk_limit(request.recording.settings())
    python = environment.python
    if python is not None and not (Path(python).is_file() and os.access(python, os.X_OK)):
        raise UsageError(f"--python {python} is not an interpreter")
    if environment.requirement is not None and not environment.requirement.is_file():
        raise UsageError(f"--requirement {environment.requirement} is not a file")
    if environment.wheels is not None:
        check_wheels(environment.wheels)
    for pattern in request.keep:
        if not pattern or pattern.startswith("/") or ".." in Path(pattern).parts:
            raise UsageError(f"--keep {pattern!r} is not below $SLURM_TMPDIR: write it relative to that, as '*.pt'")


def submit_command(request: Request, site: Site, path: Path, access: str = "private") -> str:
    """Create the run directory and submit the job; return the job's id.

    Args:
        request: the checked request.
        site: the site.
        path: the run directory to create.
        access: access rights of the run directory.

    Raises:
        UsageError: the folder is in use, there is no sbatch, or sbatch refuses; nothing is left behind.
    """
    sbatch = find_sbatch()
    paths = SubmitPaths(path)
    settings = request.recording.settings()
    run = RunDirectory.create(paths.run, "job", sys.argv, 0, access=access, settings=settings.to_json(), reference="")
    try:
        run.info["why"] = NOT_BEGUN
        run.save()
        job = hand_over(sbatch, paths, command_script(request, site, paths), {"site": site.name, **request.to_json()})
    except (UsageError, OSError):
        shutil.rmtree(paths.folder, ignore_errors=True)
        (paths.run / RUN_JSON).unlink(missing_ok=True)
        paths.run.rmdir()
        raise
    return job


def find_sbatch() -> str:
    """Return the path of sbatch.

    Raises:
        UsageError: there is no sbatch.
    """
    found = shutil.which("sbatch")
    if found is None:
        raise UsageError(
            "there is no sbatch here: submit from a login node of the cluster, or look at the script with --print"
        )
    return found


def hand_over(sbatch: str, paths: SubmitPaths, script: str, request: dict[str, Any]) -> str:
    """Write and submit the script, and write request.json; return the id of the job or array.

    Args:
        sbatch: path of sbatch.
        paths: file names of the run.
        script: the batch script.
        request: content of request.json; the new id is appended to ``jobs``, the ids of all submissions so far.

    Raises:
        UsageError: sbatch refuses, which the message explains, or does not answer.
    """
    paths.states.mkdir(parents=True, exist_ok=True)
    with paths.script.open("w", encoding="utf-8", errors="surrogateescape", newline="\n") as file:
        paths.script.chmod(0o600)  # the command may contain secrets
        file.write(script)
    # called in the script's folder, where Slurm then writes the output; the bare name needs no quoting
    command, environment = [sbatch, "--parsable", paths.script.name], clean_environment(os.environ, script)
    try:
        done = run_helper(command, _SBATCH_TIMEOUT_S, cwd=paths.folder, env=environment)
    except subprocess.TimeoutExpired as error:
        raise UsageError(
            f"sbatch did not answer within {_SBATCH_TIMEOUT_S:.0f} s: is Slurm's controller up?"
        ) from error
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    messages = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in lines]
    if done.returncode != 0:
        raise UsageError(f"sbatch refuses: {'; '.join(messages) or f'exit code {done.returncode}'}")
    for line in messages:
        print(f"sbatch: {line}", file=sys.stderr)
    job = done.stdout.strip().partition(";")[0]
    jobs = [*request.get("jobs", ()), {"id": job, "submitted_ns": time.time_ns()}]
    write_json(paths.request, request | {"jobs": jobs})
    return job


def clean_environment(environment: Mapping[str, str], script: str) -> dict[str, str]:
    """Return the environment for sbatch and the job, without variables that would override the script."""
    names = re.findall(r"^#SBATCH --([a-z-]+)", script, re.MULTILINE)
    dropped = {f"SBATCH_{_VARIABLES.get(name, name.upper().replace('-', '_'))}" for name in names} | _UNWANTED_VARIABLES
    dropped |= {f"SBATCH_{name}REQUEUE" for name in ("", "NO_") if {"requeue", "no-requeue"} & set(names)}
    if "SLURM_JOB_ID" in environment:  # submitted from within a job, whose sizes do not apply
        dropped |= {name for name in environment if name.startswith("SLURM_") and name != "SLURM_CONF"}
    return {name: value for name, value in environment.items() if name not in dropped}
