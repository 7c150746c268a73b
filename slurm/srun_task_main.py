"""Runs the tasks of a submitted job's steps: the ranks of the job, and beside them one recorder per node.

``python -m ringtap.slurm.srun_task_main rank RUN OPTIONS -- COMMAND`` and ``… recorder RUN OPTIONS -- PATTERNS``, both
with the options of `ringtap.slurm.submission_request.Recording`.
"""

from __future__ import annotations

import glob
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ringtap.agents.job.environment import slurm_tasks
from ringtap.agents.job.foreground_command import GroupWatch
from ringtap.core.isolated_python import python_command
from ringtap.core.parent_death import die_with_parent
from ringtap.core.run_directory_schema import NODE_JSON
from ringtap.core.terminal_escaping import as_command
from ringtap.slurm.job_state_file import announce_step, variable
from ringtap.slurm.submission_file_names import SubmitPaths

_BEGIN_S = 20.0  # longest time until a recording begins
_DONE_S = 10.0  # longest time until a recording is complete after its process has ended
# cp is fast for large files, and handles links, sparse files and time stamps correctly
_COPY = ["cp", "--recursive", "--parents", "--preserve=timestamps", "--"]
_AT_ONCE = 200  # paths per command line


def rank(run: str, arguments: list[str]) -> int:
    """Run and record a command as ``ringtap run --join`` does, with the variables of torch.distributed.

    Args:
        run: the run directory.
        arguments: options of ringtap run, ``--``, and the command.
    """
    announce_step(SubmitPaths(Path(run)), "job")
    os.environ |= {
        "RANK": variable("SLURM_PROCID"),
        "WORLD_SIZE": variable("SLURM_STEP_NUM_TASKS"),
        "LOCAL_RANK": variable("SLURM_LOCALID"),
        "LOCAL_WORLD_SIZE": str(slurm_tasks(variable("SLURM_STEP_TASKS_PER_NODE"))[int(variable("SLURM_NODEID"))]),
    }
    # as python -m ringtap.cli, but without a second interpreter, whose start would delay the job
    sys.argv = ["ringtap", "run", "--join", run, *arguments]
    runpy.run_module("ringtap.cli", run_name="__main__", alter_sys=True)
    return 0


def recorder(run: str, arguments: list[str]) -> int:
    """Record this node until SIGTERM, then copy the files to keep; a failed recording does not end the job.

    Slurm's proctrack/cgroup sends SIGTERM to the task of a step alone, other plug-ins also to the processes below it.
    At the end of a step Slurm ends all its processes, so this one waits until the node's recording is complete. It
    copies the files itself because no further step starts in a cancelled job. It prints ``yes`` if the node is being
    recorded, otherwise ``no``.

    Args:
        run: the run directory.
        arguments: options of ringtap record, ``--``, and patterns below $SLURM_TMPDIR.
    """
    received: list[int] = []
    paths, node = SubmitPaths(Path(run)), os.uname().nodename
    cut = arguments.index("--")
    folder = paths.run / "nodes" / node
    command = python_command(sys.executable, "ringtap.cli", "record", "--join", run, *arguments[:cut])
    watch = GroupWatch()
    capture = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=2,
        preexec_fn=die_with_parent(signal.SIGTERM),  # noqa: PLW1509
    )

    def stop(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if not watch.reached_group(number):
            capture.terminate()

    signal.signal(signal.SIGTERM, stop)
    announce_step(paths, "agents")
    deadline_s = time.monotonic() + _BEGIN_S
    while not (begun := (folder / NODE_JSON).exists()) and capture.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.05)
    print("yes" if begun else "no", flush=True)
    if int(variable("SLURM_JOB_NUM_NODES")) > 1:
        from ringtap.agents.doctor.node_checks import gloo_on_loopback  # not needed by ranks

        if words := gloo_on_loopback(os.environ):
            print(f"ringtap: {words}: set GLOO_SOCKET_IFNAME, or interface in the site's profile", file=sys.stderr)
    if capture.wait() and not received:
        print(f"ringtap: the recording of {node} failed; the job goes on", file=sys.stderr)
    while not received:
        time.sleep(1)
    deadline_s = time.monotonic() + _DONE_S
    while begun and not (folder / "DONE").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)
    patterns, disk = arguments[cut + 1 :], os.environ.get("SLURM_TMPDIR")
    if patterns and disk:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would end the copies
        keep(Path(disk), patterns, paths.results / node)
    elif patterns:
        print(f"ringtap: $SLURM_TMPDIR is not set on {node}: nothing can be kept", file=sys.stderr)
    return 0


def keep(folder: Path, patterns: Sequence[str], to: Path) -> None:
    """Copy the files and folders that match patterns, with their parents and time stamps.

    Files that cannot be copied are reported on standard error.

    Args:
        folder: folder to which the patterns are relative.
        patterns: patterns of `matching`.
        to: folder to copy to; it is created if missing.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        paths = matching(folder, pattern)
        if not paths and not glob.has_magic(pattern):
            print(f"ringtap: there is no {folder / pattern} to keep", file=sys.stderr)
        found |= {path.rstrip("/"): path for path in paths}
    # a folder is copied with all its content, so paths below it are dropped
    paths = [path for name, path in found.items() if not any(str(above) in found for above in Path(name).parents)]
    # one cp per folder, as a single cp skips a folder that it finds twice, also by a link
    folders = {path for path in paths if (folder / path).is_dir()}
    files = [path for path in paths if path not in folders]
    try:
        to.mkdir(parents=True, exist_ok=True)
        for some in (*([path] for path in folders), *(files[n : n + _AT_ONCE] for n in range(0, len(files), _AT_ONCE))):
            subprocess.run([*_COPY, *some, to], cwd=folder, check=False)
    except OSError as error:
        print(f"ringtap: {to} cannot be written: {error.strerror}", file=sys.stderr)


def matching(folder: Path, pattern: str) -> list[str]:
    """Return the paths below a folder that match a pattern, as in bash with the option ``globstar``.

    ``**`` matches any number of folders except hidden ones and links; at the end of a pattern, it matches the folder
    itself.
    """
    part = re.sub(r"(/\*\*)+/?$", "/", f"/{pattern}")[1:].replace("[^", "[!") or "*"
    first, globstar, rest = f"/{part}".partition("/**/")
    if not globstar:
        found = sorted(glob.glob(part, root_dir=folder))  # noqa: PTH207 (keeps a slash, with which cp follows a link)
        return [path.rstrip("/") for path in found] if glob.has_magic(part) and part[-1] != pattern[-1] else found
    found = []
    for above in matching(folder, f"{first[1:]}/") if first else [""]:
        for path, names, _ in os.walk(folder / above):
            names[:] = sorted(name for name in names if not name.startswith("."))
            here = "" if Path(path) == folder else os.path.relpath(path, folder)
            found += [os.path.join(here, match) for match in matching(Path(path), rest)]  # noqa: PTH118 (keeps a slash)
    return found


def main() -> int:
    """Run the task that the first argument names; return its exit code."""
    role, run, *arguments = sys.argv[1:]
    return {"rank": rank, "recorder": recorder}[role](run, arguments)


if __name__ == "__main__":
    sys.exit(as_command(main))
