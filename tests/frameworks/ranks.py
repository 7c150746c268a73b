"""Ranks of a job without a launcher, whose imports take seconds; and ranks forked from an interpreter that has torch.

Run as a program, it reads jobs, one JSON object per line, and answers each with the exit codes of its ranks.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

HOOK = Path(__file__).resolve().parents[2] / "agents" / "hook"
NODE = "here"
# a folder on the PYTHONPATH of a job, for interpreters that start and end sooner
QUICK = str(Path(__file__).with_name("quick"))
# a command under ringtap run: it says what it was given to record, and ends when it is told so
_WAITS = "env | grep -E '^(RINGTAP_|PYTHONPATH=|KINETO_)'; echo; read -r _"
RANKS = """
for rank in $(seq 0 $((WORLD_SIZE - 1))); do RANK=$rank LOCAL_RANK=$rank "$@" & pids="$pids $!"; done
for pid in $pids; do wait $pid || exit; done
"""


def quick(*folders: str) -> dict[str, str]:
    """PYTHONPATH with these folders, those of this process, and `QUICK`."""
    own = filter(None, [os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join([*folders, *own, QUICK])}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def variables(count: int) -> dict[str, str]:
    """The environment that ranks on this host have in common, as torchrun sets it."""
    sizes = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    return sizes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def launch(count: int, *command: str) -> list[str]:
    """Return the command that starts ranks on this host, and ends with the first of them that fails."""
    return ["env", *map("=".join, variables(count).items()), "bash", "-c", RANKS, "ranks", *command]


@dataclass
class WarmInterpreter:
    """An interpreter that has imported torch, and forks the ranks of jobs."""

    requests: IO[str]
    answers: IO[str]

    def run(
        self, script: list[str], folder: Path, env: dict[str, str], ranks: int, imports: str = "torch"
    ) -> tuple[str, str]:
        """Run a script with arguments in a folder, and return its output and errors.

        Args:
            script: its path and arguments.
            folder: where it runs; made if it is missing.
            env: its environment.
            ranks: number of ranks; with 0, the script runs once and has no rank.
            imports: a package to import before the fork.
        """
        folder.mkdir(exist_ok=True)
        if ranks:
            env = variables(ranks) | env
        own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)] or [{}]
        job = {"script": script, "folder": str(folder), "envs": [env | each for each in own], "imports": imports}
        print(json.dumps(job), file=self.requests, flush=True)
        codes = json.loads(self.answers.readline())
        output, errors = ((folder / name).read_text() for name in ("output", "errors"))
        assert codes == [0] * len(own), output + errors
        return output, errors


@contextmanager
def warm_interpreter(**variables: str) -> Iterator[WarmInterpreter]:
    # read when packages are imported, and when torch first computes
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"} | variables
    env["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"  # longer than what they save for the few kernels of tests
    command = [sys.executable, __file__]
    with subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdin
        assert process.stdout
        try:
            yield WarmInterpreter(process.stdin, process.stdout)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # with ranks of a job that did not end


@dataclass
class RecordedInterpreter:
    """An interpreter that loaded the hook before it imported torch, as a job's does, and forks the ranks of jobs.

    The hook reads once where to record, so that this is a link, which leads to the run of each job in turn.
    """

    interpreter: WarmInterpreter
    link: Path

    def record_into(self, run: Path) -> None:
        self.link.unlink(missing_ok=True)
        self.link.symlink_to(run)

    def run(
        self, options: list[str], script: list[str], run: Path, env: dict[str, str], ranks: int
    ) -> tuple[str, str, str]:
        """Run a script with arguments in the run's parent folder, under ``ringtap run``.

        Args:
            options: of ``ringtap run``.
            script: its path and arguments.
            run: its run directory.
            env: its environment.
            ranks: number of ranks; with 0, the script runs once and has no rank.

        Returns:
            Output and errors of the script, and errors of ``ringtap run``.
        """
        self.record_into(run)
        words = [sys.executable, "-m", "ringtap", "run", *options, "--node", NODE, "-o", str(run), "--"]
        with subprocess.Popen(
            [*words, "sh", "-c", _WAITS], cwd=run.parent, env=env, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as supervisor:  # fmt: skip
            try:
                assert supervisor.stdout
                given = dict(line.rstrip("\n").split("=", 1) for line in iter(supervisor.stdout.readline, "\n"))
                output, errors = self.interpreter.run(script, run.parent, env | given, ranks)
                said = supervisor.communicate("\n", timeout=60)[1]
            finally:
                if supervisor.poll() is None:
                    os.killpg(supervisor.pid, signal.SIGKILL)
        assert supervisor.returncode == 0, said
        return output, errors, said


def recording(run: Path, hook: Path = HOOK, *packages: str) -> dict[str, str]:
    """The variables by which an agent makes a job record into ``run``."""
    env = {"RINGTAP_RUN": str(run), "RINGTAP_NODE": NODE, "RINGTAP_HOST": os.uname().nodename}
    return env | {"RINGTAP_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join([str(hook), *packages, QUICK])}


@contextmanager
def recorded_interpreter(folder: Path, collect: str | None = None) -> Iterator[RecordedInterpreter]:
    """An interpreter whose hook records all but profiles, or what is named."""
    link = folder / "run"
    with warm_interpreter(**recording(link) | ({"RINGTAP_COLLECT": collect} if collect else {})) as interpreter:
        yield RecordedInterpreter(interpreter, link)


def fork(job: dict[str, Any], env: dict[str, str]) -> int:
    """Start a rank; return its process."""
    pid = os.fork()
    if pid:
        return pid
    for name, number in (("output", 1), ("errors", 2)):
        os.dup2(os.open(Path(job["folder"]) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    profiler = sys.modules.get("ringtap_hook.layer_profiler")
    if profiler:  # it leaves alone what a job forks, but the job begins here
        profiler._PROFILER._is_over = False
    atexit._clear()
    os.environ.clear()
    os.environ.update(env)
    os.chdir(job["folder"])
    sys.argv = job["script"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    code = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)  # at once: to take torch's modules down takes a second


def main() -> None:
    import_module("torch._dynamo")  # which the first optimizer imports

    for line in sys.stdin:
        job = json.loads(line)
        import_module(job["imports"])
        gc.freeze()  # a job's collections need not look at what was imported
        pids = [fork(job, env) for env in job["envs"]]
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)


if __name__ == "__main__":
    main()
