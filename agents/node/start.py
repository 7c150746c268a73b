"""Starting a node's agent: at most one a run and node, and nobody's child."""

from __future__ import annotations

import os

from ringtap.agents.node.rendezvous import Rendezvous
from ringtap.agents.node.settings import Settings
from ringtap.rundir import RunDirectory

# Exit statuses of the process between: below them an errno
RECORDED = 200
_BROKEN = 199


def start_agent(run: RunDirectory, node: str, settings: Settings) -> int:
    """Start the agent unless there is one; returns the exit status of the process between, at once.

    With status 0 the agent, this one or another, can be connected to or is about to be. Otherwise the status is an
    errno, or RECORDED: an earlier agent has recorded this node.

    Raises:
        OSError: there can be no further process.
    """
    pid = os.fork()
    if pid == 0:
        code = _BROKEN
        try:
            code = _between(run, node, settings)
        except OSError as error:
            code = min(error.errno or _BROKEN, _BROKEN)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _between(run: RunDirectory, node: str, settings: Settings) -> int:
    """In the process between: leave the session, take the lock, fork the agent."""
    os.setsid()
    rendezvous = Rendezvous(run.path, node)
    lock = rendezvous.take()
    if lock is None:
        return 0
    if (run.node(node) / "node.json").exists():
        rendezvous.clear()
        return RECORDED
    listener = rendezvous.listen()
    if os.fork() == 0:
        from ringtap.agents.node.agent import run_agent

        run_agent(run, node, settings, rendezvous, listener, lock)
    return 0
