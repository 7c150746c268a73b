"""``--metrics``: a process beside the job that serves its metrics; its end does not affect the job or the recording."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

from ringtap.core.python_command import python_command


class MetricsServer:
    """The process that serves the metrics of this node.

    Args:
        run: the run directory.
        node: this node's name in it.
        listener: the listening socket, which the process takes over.

    Attributes:
        pid: its pid; 0 if it could not be started.
    """

    def __init__(self, run: Path, node: str, listener: socket.socket) -> None:
        self.pid = 0
        with listener:
            listener.set_inheritable(True)
            words = [str(run), node, str(listener.fileno()), str(os.getpid())]
            command = python_command(sys.executable, "ringtap.analysis.live.metrics", *words)
            # in a process group of its own and deaf to Ctrl-C: no signal to the job must end it before the job
            with contextlib.suppress(OSError):
                self.pid = os.posix_spawn(
                    sys.executable,
                    command,
                    os.environ,
                    setpgroup=0,
                    setsigmask=(signal.SIGINT,),
                    setsigdef=(signal.SIGPIPE,),
                )

    def end(self) -> None:
        """End it; it holds nothing that could be lost."""
        if self.pid:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGTERM)
