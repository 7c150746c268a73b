"""Unedited training scripts with the real frameworks, with and without the hook: what is counted, what comes out.

Each script in jobs/ prints a digest of its final parameters. It is run with nothing but a bare environment, and again
as the agent would run it; the digests must be the same, and the records must be what the script's loop does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ringtap.core.append_only_logs import RecordFile, open_records, read_json_lines
from tests.frameworks.ranks import HOOK, QUICK, RecordedInterpreter, WarmInterpreter, launch, recording

pytestmark = [pytest.mark.shares, pytest.mark.together("frameworks")]

JOBS = Path(__file__).resolve().parent / "jobs"
ROOT = Path(__file__).resolve().parents[2]
SITE = sysconfig.get_path("purelib")
LIMIT_S = 200
STEP, SKIPPED, MARK = 0, 1, 2


@dataclass
class Job:
    """A script as it is started.

    Attributes:
        script: its path.
        arguments: words after it.
        ranks: processes; 0: the script alone.
        torchrun: True if it starts them.
        imports: a package to import before the script is forked.
        env: variables beside the bare ones.
        prefix: words before the interpreter.
        interpreter: another one that may not know this one's packages.
    """

    script: Path
    arguments: list[str] = field(default_factory=list)
    ranks: int = 0
    torchrun: bool = False
    imports: str = "torch"
    env: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)
    interpreter: str = sys.executable

    def bare(self, folder: Path) -> dict[str, str]:
        """Nothing of this process's environment but where programs are."""
        env = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return env | {"HF_HUB_OFFLINE": "1", "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": QUICK} | self.env

    def run(self, folder: Path, run: Path | None, hook: Path = HOOK) -> list[str]:
        """Start it in a folder of its own, recorded into ``run``; return its result."""
        folder.mkdir(exist_ok=True)
        env = self.bare(folder)
        packages = [] if self.interpreter == sys.executable else [SITE]
        if run is not None:
            env |= recording(run, hook, *packages)
        command = [self.interpreter, str(self.script), *self.arguments]
        if self.torchrun:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
            command[1:1] = [*launcher, "--nproc-per-node", str(self.ranks)]
        elif self.ranks:
            command = launch(self.ranks, *command)
        done = subprocess.run(
            [*self.prefix, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return lines(done.stdout, done.stderr)


def lines(output: str, errors: str) -> list[str]:
    """What a job says of its result."""
    # frameworks print paths of the environment, which may lie in a folder of that name
    assert "ringtap" not in errors.replace(str(ROOT), "").replace(sys.prefix, ""), errors
    return [line for line in output.splitlines() if line.startswith(("parameters", "graphs", "evaluations"))]


def files(run: Path, suffix: str = ".rec") -> dict[int, RecordFile]:
    """The record files of a run by rank; none may be missing, and nothing may have gone wrong."""
    steps = run / "nodes" / "here" / "steps"
    assert [path.read_text() for path in steps.glob("hook-*.log")] == []
    paths = [path for path in steps.glob("*.rec") if "".join(path.suffixes) == suffix]
    found = {file.about["rank"]: file for file in map(open_records, paths)}
    assert found, "no rank has a file"
    assert len(found) == len(paths), "a rank has two files"
    assert all(file.torn_bytes == 0 for file in found.values())
    return found


@dataclass
class Both:
    """Interpreters that have imported torch: a bare one, and one that loaded the hook before, as a job's does."""

    plain: WarmInterpreter
    recorded: RecordedInterpreter


@pytest.fixture
def both(warm: WarmInterpreter, hooked: RecordedInterpreter) -> Both:
    return Both(warm, hooked)


def record_pair(job: Job, folder: Path, both: Both | None) -> list[str]:
    """Run a job without and with the hook; returns what it said, both times the same."""
    plain, with_hook, run = folder / "plain", folder / "recorded", folder / "run"
    script = [str(job.script), *job.arguments]
    if both:
        expected = lines(*both.plain.run(script, plain, job.bare(plain), job.ranks, job.imports))
    else:
        expected = job.run(plain, None)
    if both and not job.torchrun:
        run.mkdir()
        both.recorded.record_into(run)
        env = job.bare(with_hook) | recording(run)
        recorded = lines(*both.recorded.interpreter.run(script, with_hook, env, job.ranks, job.imports))
    else:
        recorded = job.run(with_hook, run)
    assert expected, "the job says nothing of its result"
    assert recorded == expected
    return recorded


def what(file: RecordFile) -> list[tuple[int, ...]]:
    """Step, optimizer, kind and backward passes of each record; its times are checked."""
    records = file.tail()
    for record in records:
        assert record[2] <= record[3]
        assert record[4] <= record[5]
    assert all(left[5] <= right[5] for left, right in pairwise(records)), "records are in the order of their ends"
    return [(*record[:2], *record[6:8]) for record in records]


def steps(count: int, optimizer: int = 0, backwards: int = 1) -> list[tuple[int, ...]]:
    """Records of ordinary steps."""
    return [(step, optimizer, STEP, backwards) for step in range(count)]


def check_ddp(
    run: Path, rank: int, iterations: int, model_bytes: int, unsynchronised: int = 0
) -> list[tuple[Any, ...]]:
    """Check that times of a rank's passes are whole and in order, and its buckets the model; returns the records."""
    file = files(run, ".ddp.rec")[rank]
    names = [column.name for column in file.fields]
    records = file.tail()
    assert [record[:2] for record in records if record[0] >= 0] == [(number, 0) for number in range(iterations)]
    assert sum(record[0] == -1 for record in records) == unsynchronised
    for record in records:
        row = dict(zip(names, record, strict=True))
        if row["iteration"] < 0:
            assert 0 < row["forward_start_ns"] <= row["backward_start_ns"] < row["backward_end_ns"]
            assert 0 < row["forward_ns"] <= row["backward_start_ns"] - row["forward_start_ns"]
            assert row["comm_start_ns"] == row["comm_end_ns"] == row["comm_ns"] == row["overlap_ns"] == 0
            continue
        assert 0 < row["forward_start_ns"] <= row["backward_start_ns"] <= row["backward_end_ns"]
        assert row["backward_start_ns"] <= row["comm_start_ns"] <= row["comm_end_ns"]
        assert row["comm_ns"] == row["comm_end_ns"] - row["comm_start_ns"]
        assert 0 < row["forward_ns"] <= row["backward_start_ns"] - row["forward_start_ns"]
        assert row["backward_ns"] == row["backward_end_ns"] - row["backward_start_ns"]
        # Communication may begin at the very end of the backward pass: then nothing overlaps.
        assert row["overlap_ns"] == max(0, row["backward_end_ns"] - row["comm_start_ns"])
    pid = file.about["pid"]
    buckets, torn = read_json_lines(file.path.with_name(f"rank{rank}-{pid}.buckets.jsonl"))
    assert torn == 0
    assert buckets
    assert all(row["module"] == 0 and sum(row["bucket_bytes"]) == model_bytes for row in buckets)
    return records


# ---- PyTorch itself


def test_plain_ddp_loop_under_torchrun(tmp_path: Path, both: Both) -> None:
    record_pair(Job(JOBS / "plain_ddp.py", ranks=2, torchrun=True), tmp_path, both)
    found = files(tmp_path / "run")
    assert sorted(found) == [0, 1], "the launcher steps nothing and leaves nothing"
    model_bytes = 4 * (20 * 300 + 300 + 300 * 4 + 4)
    for rank, file in found.items():
        assert what(file) == steps(8)
        assert (file.about["world_size"], file.about["local_rank"]) == (2, rank)
        own = file.tail()
        ddp = check_ddp(tmp_path / "run", rank, 8, model_bytes)
        # One clock: an iteration's communication is over before its step begins, and begins after the step before it.
        assert all(times[6] <= step[2] for times, step in zip(ddp, own, strict=True))
        assert all(step[3] <= times[2] for step, times in zip(own, ddp[1:], strict=False))


def test_gradient_accumulation_with_no_sync_and_uneven_inputs(tmp_path: Path, both: Both) -> None:
    record_pair(Job(JOBS / "accumulate_ddp.py", ranks=2), tmp_path, both)
    for rank, file in files(tmp_path / "run").items():
        assert what(file) == [*steps(4, backwards=3), *[(4 + more, 0, STEP, 1) for more in range(2 + rank)]]
        # A pass under no_sync is not an iteration of DDP's.
        check_ddp(tmp_path / "run", rank, 4 + 2 + rank, 4 * (16 * 32 + 32 + 32 + 1), unsynchronised=8)


def test_steps_that_mixed_precision_skips(tmp_path: Path, both: Both) -> None:
    said = record_pair(Job(JOBS / "amp.py"), tmp_path, both)
    assert [line.split()[-1] for line in said] == ["64.0", "64.0"], "256, halved at each of two skipped steps"
    expected = [(step, optimizer, SKIPPED if step in (2, 5) else STEP, 1) for optimizer in (0, 1) for step in range(8)]
    assert what(files(tmp_path / "run")[0]) == expected + steps(2, optimizer=2)


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(
            "inductor",
            marks=pytest.mark.skipif(" " in sys.prefix, reason="PyTorch's inductor compiles nothing below 'a space'"),
        ),
        "aot_eager",
    ],
)
def test_compiled_model_and_compiled_step(tmp_path: Path, both: Both, backend: str) -> None:
    # The second run takes the first one's compiled kernels from the cache, which is also where it would not find them
    # had the hook changed the graphs.
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels")}
    record_pair(Job(JOBS / "compiled.py", [backend], env=env), tmp_path, both)
    assert what(files(tmp_path / "run")[0]) == steps(10)


def test_two_optimizers_closures_and_checkpoints(tmp_path: Path, both: Both) -> None:
    said = record_pair(Job(JOBS / "gan.py"), tmp_path, both)
    critic, generator = iter(steps(6, 0, backwards=2)), iter(steps(3, 1))
    adversarial = [next(generator) if turn == "g" else next(critic) for turn in "ccgccgccg"]
    records = what(files(tmp_path / "run")[0])
    assert records[:9] == adversarial
    # LBFGS evaluates its closure, and with it a backward pass, several times a step.
    assert [record[:3] for record in records[9:12]] == [(step, 2, STEP) for step in range(3)]
    assert sum(record[3] for record in records[9:12]) == int(said[1].split()[1])
    assert records[12:] == steps(2, 3)


def test_forked_loader_workers_schedulers_and_marks(tmp_path: Path, both: Both) -> None:
    record_pair(Job(JOBS / "loaders.py"), tmp_path, both)
    (file,) = files(tmp_path / "run").values()
    assert what(file) == steps(15) + [(mark, -1, MARK, 0) for mark in range(4)]
    assert all(record[2] == record[3] for record in file.tail(15))


# ---- frameworks


def test_lightning_alone(tmp_path: Path, both: Both) -> None:
    (said,) = record_pair(Job(JOBS / "lightning_fit.py", ["1"], imports="lightning"), tmp_path, both)
    assert said.endswith("steps 12")
    assert what(files(tmp_path / "run")[0]) == steps(12, backwards=2)


def test_lightning_with_ddp(tmp_path: Path, both: Both) -> None:
    (said,) = record_pair(Job(JOBS / "lightning_fit.py", ["2"], imports="lightning"), tmp_path, both)
    assert said.endswith("steps 6")
    found = files(tmp_path / "run")
    assert sorted(found) == [0, 1]
    for rank, file in found.items():
        assert what(file) == steps(6, backwards=2)
        assert file.about["world_size"] == 2
        check_ddp(tmp_path / "run", rank, 6, 4 * (8 * 16 + 16 + 16 + 1), unsynchronised=6)


def test_hugging_face_trainer_with_accumulation(tmp_path: Path, both: Both) -> None:
    (said,) = record_pair(Job(JOBS / "hugging_face.py", ["."], ranks=2, imports="transformers.trainer"), tmp_path, both)
    assert said.endswith("steps 8")
    found = files(tmp_path / "run")
    assert sorted(found) == [0, 1]
    for rank, file in found.items():
        assert what(file) == steps(8, backwards=3)
        assert files(tmp_path / "run", ".ddp.rec")[rank].count >= 8


# ---- whoever runs it

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all"]
NO_CAPABILITIES = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]


def ordinary_user() -> tuple[list[str], str]:
    """How to become one, and an interpreter of this version that it may run; torch is this one's.

    Where every such interpreter lies in a folder closed to others, root without any capability takes its place.
    """
    if os.getuid() != 0:
        return [], sys.executable
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    code = f"import sys; sys.path.append({SITE!r}); import numpy"
    for interpreter in filter(None, [os.path.realpath(sys.executable), shutil.which(version, path="/usr/bin")]):
        tried = subprocess.run([*NOBODY, "sh", "-c", 'exec "$@"', "sh", interpreter, "-c", code], check=False)
        if tried.returncode == 0:
            return NOBODY, interpreter
    return NO_CAPABILITIES, sys.executable


def test_an_ordinary_user_in_a_bare_environment() -> None:
    # The whole way to pytest's folders is its user's alone.
    folder = Path("/tmp") / f"ringtap-user-{os.getpid()}"
    folder.mkdir()
    try:
        shutil.copytree(HOOK, folder / "hook", ignore=shutil.ignore_patterns("__pycache__"))
        script = Path(shutil.copy(JOBS / "plain_ddp.py", folder))
        (folder / "home").mkdir()
        for path in (folder, folder / "home"):
            path.chmod(0o777)
        prefix, interpreter = ordinary_user()
        job = Job(script, ranks=2, prefix=prefix, interpreter=interpreter)
        assert job.run(folder / "home", folder / "run", folder / "hook")
        found = files(folder / "run")
        assert [what(found[rank]) for rank in (0, 1)] == [steps(8), steps(8)]
        uid = 65534 if prefix == NOBODY else os.getuid()
        assert {path.stat().st_uid for path in (folder / "run").rglob("*")} == {uid}
    finally:
        shutil.rmtree(folder)
