"""Starts an agent on a node without a supervisor, where a launcher within the job (srun, mpirun) starts ranks."""

from __future__ import annotations

import os
from contextlib import suppress

from . import error_log
from .settings import is_unsupervised, note_loaded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

    from .settings import Settings

# as python -m, but without the current folder on the path
RUN_MODULE = (
    "import sys; sys.path[:] = sys.path[not sys.path[0]:]; import runpy; "
    'runpy.run_module(sys.argv.pop(1), None, "__main__", True)'
)
# The shell starts the agent in the background and ends, so that the job gets no unknown child.
_SCRIPT = 'cd / && log=$1 && shift && "$@" </dev/null >>"$log" 2>&1 &'


def attach(_module: ModuleType | None, settings: Settings) -> None:
    """Note this process for the node's agent, and start an agent, detached, unless this node is recorded already."""
    python = os.environ.get("RINGTAP_PYTHON")
    if is_unsupervised() and python:
        _start(python, settings)
    note_loaded(settings, os.getpid())


def _start(python: str, settings: Settings) -> None:
    """Start the agent; a failure goes to the hook's log."""
    try:
        # The same agent records the children of this process, so they need not start it again.
        os.environ["RINGTAP_HOST"] = os.uname().nodename
        os.environ["RINGTAP_NODE"] = settings.node
        arguments = [settings.run, settings.node, str(os.getpid())]
        command = [python, "-c", RUN_MODULE, "ringtap.agents.node.record_unsupervised_process", *arguments]
        actions = [(os.POSIX_SPAWN_CLOSE, fd) for fd in _inherited()]
        shell = os.posix_spawn(
            "/bin/sh",
            ["sh", "-c", _SCRIPT, "sh", _log(settings), *command],
            _environment(),
            file_actions=actions,
            setpgroup=0,
        )
        with suppress(ChildProcessError):  # the job may have reaped it
            os.waitpid(shell, 0)  # 1 to 2 ms: the shell ends at once
    except Exception:
        error_log.note(settings, "start of an agent on this node")


def _log(settings: Settings) -> str:
    """Path of the agent's error log, for errors of its start; /dev/null if its folder cannot be made."""
    folder = os.path.join(settings.node_folder, "log")
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError:
        return "/dev/null"
    return os.path.join(folder, "agent.log")


def _inherited() -> list[int]:
    """Inheritable descriptors of the job and its launcher, which a child would hold open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if int(name) > 2 and os.get_inheritable(int(name)):
                found.append(int(name))
        except OSError:  # the descriptor of the listing itself
            continue
    return found


def _environment() -> dict[str, str]:
    """The job's environment, without the variables that would make the agent record itself."""
    here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RINGTAP_")}
    folders = environment.pop("PYTHONPATH", "").split(os.pathsep)
    kept = [folder for folder in folders if folder and os.path.realpath(folder) != here]
    if kept:
        environment["PYTHONPATH"] = os.pathsep.join(kept)
    return environment
