"""Writes batch scripts: directives, modules, environment, and the line that runs `ringtap.slurm.run_job_steps`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import ringtap
from ringtap.core.isolated_python import python_command
from ringtap.slurm.site_profiles import Site
from ringtap.slurm.submission_file_names import SubmitPaths
from ringtap.slurm.submission_request import Environment, Request, Resources

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_SPECIAL = re.compile(r"[\x00-\x1f\x7f$`]")  # control characters, and those that suggest a substitution by bash
_KILL_WAIT_S = 30  # Slurm's default, which a site may change
_ON_EVERY_NODE = 'srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1'


def quote(text: str | Path) -> str:
    """Quote any text as one word of bash on one line."""
    word = str(text)
    if not _SPECIAL.search(word):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda match: f"\\{ord(match.group()):03o}", escaped) + "'"


def print_script(text: str) -> None:
    """Print a script with its exact bytes; on a terminal, control and invisible characters are shown as escapes."""
    if sys.stdout.isatty():
        print(text, end="")
    else:
        sys.stdout.buffer.write(text.encode(errors="surrogateescape"))


def words(command: Iterable[str | Path]) -> str:
    """Quote a command line for bash."""
    return " ".join(map(quote, command))


def command_script(request: Request, site: Site, paths: SubmitPaths) -> str:
    """Return the batch script of a command."""
    resources = request.resources
    grace_s = max(resources.stop_before_s // 2, 1) if resources.stop_before_s else _KILL_WAIT_S
    job: list[str | Path] = [paths.run, *request.recording.words(), f"--grace={grace_s}"]
    job += [f"--keep={pattern}" for pattern in request.keep]
    job += ["--horovod"] if request.horovod else []
    variables = [f"{name}_SOCKET_IFNAME={quote(site.interface)}" for name in ("GLOO", "NCCL") if site.interface]
    return batch_script(
        resources,
        request.environment,
        site,
        request.folder,
        [*job, "--", *request.command],
        directives=["no-requeue"],
        setup=[f"export {' '.join(variables)}"] if variables else [],
    )


def batch_script(
    resources: Resources,
    environment: Environment,
    site: Site,
    folder: Path,
    job: Sequence[str | Path],
    *,
    directives: Iterable[str],
    setup: Iterable[str] = (),
) -> str:
    """Return a batch script.

    Args:
        resources: the requested resources.
        environment: the Python environment.
        site: the site.
        folder: the folder in which the job runs.
        job: arguments of `ringtap.slurm.run_job_steps`.
        directives: further directives, as after ``#SBATCH --``.
        setup: further lines before the job.
    """
    lines = [
        "#!/bin/bash",
        f"# Written by ringtap {ringtap.__version__} for the site {site.name}. You may change it and submit it again.",
        *header(resources, directives),
        "",
        f"cd -- {quote(folder)} || exit",
        *modules(site, environment),
        *python(site, environment),
        *setup,
        f"exec {words(python_command(environment.python or 'python', 'ringtap.slurm.run_job_steps'))} {words(job)}",
    ]
    return "".join(f"{line}\n" for line in lines)


def header(resources: Resources, directives: Iterable[str] = ()) -> list[str]:
    """Return the directives of sbatch.

    Output goes to Slurm's default, ``slurm-<job>.out`` in the folder from which the script is submitted. In any other
    name, Slurm would also expand ``%`` and ``\\`` in the path of the folder.

    Args:
        resources: the requested resources.
        directives: further directives, as after ``#SBATCH --``.
    """
    signal = f"B:USR1@{resources.stop_before_s}" if resources.stop_before_s else None
    values = {
        "job-name": resources.job_name,
        "account": resources.account,
        "time": resources.time,
        "nodes": resources.nodes,
        "ntasks-per-node": resources.tasks_per_node,
        "cpus-per-task": resources.cpus_per_task,
        "gpus-per-node": resources.gpus_per_node,
        "mem": resources.mem,
        "signal": signal,
    }
    given = {name: value for name, value in values.items() if value is not None and name not in resources.drop}
    lines = [f"#SBATCH --{name}={_directive(str(value))}" for name, value in given.items()]
    lines += [f"#SBATCH --{text}" for text in directives]
    return [*lines, *(f"#SBATCH {text if text.startswith('-') else '--' + text}" for text in resources.sbatch)]


def _directive(value: str) -> str:
    """Quote a value of a directive for sbatch."""
    if re.fullmatch(r"[\w.,:/@=+%-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def modules(site: Site, environment: Environment) -> list[str]:
    """Return the line that loads the modules, if there are any."""
    chosen = {name.partition("/")[0]: name for name in (*site.modules, *environment.modules)}
    return [f"module load {words(chosen.values())} || exit"] if chosen else []


def python(site: Site, environment: Environment) -> list[str]:
    """Return the lines that put Python first on PATH and, if requested, make its environment on every node."""
    if environment.python is not None:
        # not resolved, as the interpreter of an environment is a link to one outside
        return [f'export PATH={quote(Path(environment.python).parent)}:"$PATH"']
    given = {"--find-links": environment.wheels, "--requirement": environment.requirement}
    wanted = ["--no-index", "ringtap"]
    wanted += [word for option, path in given.items() if path is not None for word in (option, str(path))]
    folder = '"${SLURM_TMPDIR:?is not set: jobs have no folder of their own on this node, so use --python}/env"'
    return [
        f"{_ON_EVERY_NODE} {site.make_environment} {folder} >/dev/null || exit",
        'export VIRTUAL_ENV="$SLURM_TMPDIR/env" PATH="$SLURM_TMPDIR/env/bin:$PATH"',
        f"{_ON_EVERY_NODE} pip install --quiet --disable-pip-version-check {words(wanted)} || exit",
    ]
