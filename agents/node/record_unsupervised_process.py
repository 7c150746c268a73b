"""Records a process that no supervisor started.

``python -m ringtap.agents.node.record_unsupervised_process RUN NODE PID`` records ranks on nodes where ``ringtap run``
itself does not run, as in ``ringtap run -- srun python train.py``. It starts or joins the node's agent, with the
settings of the run, and exits. The agent stays until the attached processes have ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from ringtap.agents.job.agent_client import AgentClient
from ringtap.agents.job.environment import local_size
from ringtap.agents.node.job_processes import start_time
from ringtap.agents.node.recording_settings import RunSettings
from ringtap.collectors.process_facts import rank_in
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.core.run_directory import RunDirectory
from ringtap.core.terminal_escaping import as_command, readable

_CONNECT_S = 10.0


def attach(path: Path, node: str, pid: int) -> None:
    """Register a process with its node's agent.

    Raises:
        UsageError: there is no such run or process.
        MeasurementError: the agent could not be started or reached.
    """
    run = RunDirectory.open(path.absolute())
    if not start_time(pid):
        raise UsageError(f"there is no process {pid} to record")
    command: list[str] = []
    with contextlib.suppress(OSError):
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        command = [readable(word.decode(errors="surrogateescape")) for word in arguments]
    client = AgentClient(run, node, RunSettings.from_json(run.info.get("settings") or {}))
    greeting = {"pid": pid, "command": command, "rank": rank_in(os.environ), "began_ns": time.time_ns()}
    client.start(greeting | {"attached": True, "expected": local_size(os.environ)})
    deadline_s = time.monotonic() + _CONNECT_S
    while not client.is_settled and time.monotonic() < deadline_s:
        time.sleep(0.02)
        client.tick()
    if not client.is_up:
        raise MeasurementError(client.why or "the agent did not come up")


def main() -> int:
    """Run the module as a command with the arguments RUN NODE PID."""
    if len(sys.argv) != 4 or not sys.argv[3].isdigit():
        raise UsageError("usage: python -m ringtap.agents.node.record_unsupervised_process RUN NODE PID")
    attach(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    return 0


if __name__ == "__main__":
    sys.exit(as_command(main))
