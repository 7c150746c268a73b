"""A real Slurm of some nodes on one machine, for tests: each node with its own address, name, processes and disk.

Needs root. Everything is in namespaces, and in one folder; it ends with whoever made it, also when that is killed.
`tests.slurm.cluster_keeper` builds it.

As on real clusters, the login host and the nodes share some folders (here: those of the tests, the checkout and the
Python environment) and have a /tmp of their own; users are not root, ``--account`` is demanded, a prolog sets
$SLURM_TMPDIR to a folder on the node's own disk, and nothing of a job outlives it on a node.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tests.slurm import cluster_keeper

ROOT = Path(__file__).resolve().parents[2]
USERS = tuple(cluster_keeper.USERS)
# the Slurm that PATH finds first, such as one that you built
_SLURM = {Path(found) for tool in ("sinfo", "slurmctld") if (found := shutil.which(tool))}
_FOLDERS = dict.fromkeys(map(str, (Path(sys.executable).parent, *sorted(path.parent for path in _SLURM))))
PATH = f"{':'.join(_FOLDERS)}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_APART = ("--net", "--uts", "--ipc", "--pid", "--mount", "--mount-proc", "--fork", "--kill-child")
_INTO = ("--net", "--uts", "--ipc", "--pid", "--mount")


class SlurmCluster:
    """A standing cluster; used as a context manager.

    Args:
        folder: a new folder for its files; the folder above it is what all machines share.
        nodes: their number; they are called n0, n1, ….
        rate: what each node's link gives in each direction (``250mbit``); None for no limit.
    """

    def __init__(self, folder: Path, nodes: int = 4, rate: str | None = None) -> None:
        self.folder = folder
        self.nodes = tuple(f"n{number}" for number in range(nodes))
        self._rate = rate
        self._off: set[int] = set()

    def __enter__(self) -> "SlurmCluster":
        self.folder.mkdir(exist_ok=True)
        for path in (self.folder.parent, self.folder):
            path.chmod(0o711)  # the cluster's users find their homes in it
        shared = {self.folder.parent, ROOT, Path(sys.prefix), Path(sys.base_prefix)}
        shared |= {path.resolve().parents[1] for path in _SLURM}
        item = {"folder": str(self.folder), "nodes": len(self.nodes), "shared": sorted(map(str, shared))}
        command = ["unshare", *_APART, "--", sys.executable, cluster_keeper.__file__, json.dumps(item)]
        # a session of its own: a Ctrl-C is for the tests, which end it in order
        self._keeper = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=dict(os.environ) | {"PATH": PATH},
        )
        try:
            self._hear()
            self._pid = int(Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children").read_text())
            if self._rate:
                self.limit(self._rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the cluster with everything in it."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.stdout.read()
        self._keeper.stdout.close()
        self._keeper.wait()

    def _hear(self) -> None:
        assert self._keeper.stdout is not None
        words = self._keeper.stdout.readline().strip()
        if words != "done":
            raise RuntimeError(f"the test cluster failed: {words or 'it ended'} (logs in {self.folder / 'log'})")

    def _tell(self, words: str) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(words + "\n")
        self._keeper.stdin.flush()
        self._hear()

    def home(self, user: str | None = None) -> Path:
        """A user's home, on all machines and outside; root's for None."""
        return self.folder / "home" / (user or "root")

    def command(
        self,
        command: Sequence[str | Path],
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 60.0,
    ) -> list[str]:
        """The command line that runs a command on the login host, for at most so many seconds."""
        home = self.home(user)
        variables = {
            "PATH": PATH,
            "HOME": str(home),
            "USER": user or "root",
            "LOGNAME": user or "root",
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TESTED_BY": os.environ["TESTED_BY"],
            "SLURM_CONF": f"{cluster_keeper.HOME}/slurm.conf",
            # the nodes run the code that is tested
            **({"PYTHONPATH": os.environ["PYTHONPATH"]} if os.environ.get("PYTHONPATH") else {}),
            **(env or {}),
        }
        words = ["nsenter", "--target", str(self._pid), *_INTO, "--"]
        words += ["timeout", "--kill-after=2", str(timeout)]
        if user:
            words += ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        words += ["env", "--ignore-environment", f"--chdir={cwd or home}"]
        return [*words, *(f"{name}={value}" for name, value in variables.items()), *map(str, command)]

    def run(
        self,
        command: Sequence[str | Path],
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 60.0,
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the login host.

        Args:
            command: the command.
            user: alice or bob; None: root.
            env: beside the usual variables.
            cwd: working directory; the user's home if None.
            timeout: seconds after which it is ended (exit code 124).
        """
        words = self.command(command, user, env, cwd, timeout)
        return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)

    def kill(self, number: int) -> None:
        """Take a node's power away; Slurm notices after about 20 s, or at once if `scontrol update` tells it."""
        self._tell(f"kill {number}")
        self._off.add(number)

    def up(self, number: int) -> None:
        """Switch a node on again; returns when Slurm uses it."""
        # or it would go on asking the node to end jobs that the node knows nothing of
        self.run(["scontrol", "update", f"NodeName=n{number}", "State=DOWN", "Reason=off"])
        self._tell(f"up {number}")
        self._off.discard(number)

    def limit(self, rate: str | None) -> None:
        """Give every link so much in each direction; None: no limit."""
        self._tell(f"limit {rate or 'none'}")
        self._rate = rate

    def job(self, number: int | str) -> dict[str, str]:
        """What the controller says of a job; of an array, of one of its tasks: ``7_2``."""
        done = self.run(["scontrol", "--oneliner", "show", "job", str(number)])
        if done.returncode:
            raise LookupError(done.stderr.strip())
        words = [word.partition("=") for word in done.stdout.splitlines()[0].split()]
        return {name: value for name, _, value in words}

    def wait(self, number: int | str, *states: str, timeout: float = 60.0) -> dict[str, str]:
        """Wait until a job is in one of these states (default: at its end); returns what the controller says of it."""
        final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL")
        deadline = time.monotonic() + timeout
        while (job := self.job(number))["JobState"] not in (states or final):
            if time.monotonic() > deadline or job["JobState"] in final:
                raise TimeoutError(f"job {number} is {job['JobState']} ({job.get('Reason')}), not {states or final}")
            time.sleep(0.3)
        return job

    def mend(self) -> None:
        """Make it as it was at the beginning: no jobs, all nodes idle, no limits on links."""
        jobs = self.run(["squeue", "--noheader", "--format=%A"]).stdout.split()
        if jobs:
            self.run(["scancel", *set(jobs)])
        for number in sorted(self._off):
            self.up(number)
        if self._rate:
            self.limit(None)
        deadline = time.monotonic() + 60
        while self._busy():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the test cluster does not come to rest:\n{self.run(['squeue']).stdout}")
            time.sleep(0.3)

    def _busy(self) -> bool:
        states = self.run(["sinfo", "--noheader", "--format=%T %D"]).stdout.split()
        return states != ["idle", str(len(self.nodes))] or bool(self.run(["squeue", "--noheader"]).stdout.strip())
