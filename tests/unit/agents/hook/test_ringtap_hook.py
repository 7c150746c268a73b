"""What the hook does beside steps: marks, what was asked for, other nodes, NCCL, DDP's log, mixed precision."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import ClassVar

import pytest

import ringtap
from ringtap.agents.hook.ringtap_hook import ddp_logging_data, steps
from ringtap.agents.hook.ringtap_hook.settings import Settings
from ringtap.core.append_only_logs import open_records, read_json_lines
from ringtap.core.isolated_python import RUN_MODULE
from ringtap.core.run_directory import RunDirectory, read_json
from tests.frameworks.ranks import NODE, QUICK, RecordedInterpreter, recorded_interpreter

pytestmark = [pytest.mark.shares, pytest.mark.together]

HOOK = Path(__file__).resolve().parents[4] / "agents" / "hook"
HOST = os.uname().nodename


def run_python(code: str, *path: Path | str, **env: object) -> str:
    """Run code in a fresh interpreter, recorded if RINGTAP_RUN is among the variables; returns its output."""
    clean = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(map(str, [HOOK, *path]))}
    clean |= {name: str(value) for name, value in env.items()}
    command = [sys.executable, "-c", dedent(code)]
    result = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=200, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@pytest.fixture(scope="module")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedInterpreter]:
    with recorded_interpreter(tmp_path_factory.mktemp("warm")) as found:
        yield found


def run_recorded(hooked: RecordedInterpreter, folder: Path, code: str, **env: str) -> tuple[Path, str]:
    """Run code in a process that need not import torch; returns the folder of its steps, and its output."""
    (folder / "job.py").write_text(dedent(code))
    run = folder / "run"
    run.mkdir()
    hooked.record_into(run)
    output, errors = hooked.interpreter.run(["job.py"], folder, {"PATH": os.environ["PATH"]} | env, 0)
    assert errors == ""
    return run / "nodes" / NODE / "steps", output


def rows(steps: Path) -> list[tuple[int, ...]]:
    assert list(steps.glob("hook-*.log")) == []
    (path,) = steps.glob("*.rec")
    return [(*record[:2], *record[6:8]) for record in open_records(path).tail()]


def wait_for(path: Path, word: str, limit_s: float = 30) -> str:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        if path.exists() and word in path.read_text():
            return path.read_text()
        time.sleep(0.05)
    raise AssertionError(f"{path} has no {word!r}")


# ---- marks and what was asked for


def test_marks_of_a_loop_without_torch(tmp_path: Path) -> None:
    code = """
        import os, ringtap, sys, time
        for _ in range(3):
            ringtap.step()
            time.sleep(0.01)
        if os.fork() == 0:
            ringtap.step()
            os._exit(0)
        os.wait()
        assert "torch" not in sys.modules
        print(os.getpid())
    """
    pid = int(run_python(code, RINGTAP_RUN=tmp_path, RINGTAP_NODE="n", RANK=2))
    files = {path.name: open_records(path) for path in (tmp_path / "nodes" / "n" / "steps").iterdir()}
    assert len(files) == 2, "the child has a file of its own"
    records = files[f"rank2-{pid}.rec"].tail()
    assert [(*record[:2], *record[6:8]) for record in records] == [(mark, -1, 2, 0) for mark in range(3)]
    assert all(record[2] == record[3] and record[4] == record[5] for record in records)
    assert all(right[4] - left[4] >= 10_000_000 for left, right in pairwise(records))


def test_a_mark_without_the_hook_does_nothing(tmp_path: Path) -> None:
    assert ringtap.step() is None
    run_python("import ringtap; ringtap.step()")
    run_python("import ringtap; ringtap.step()", RINGTAP_RUN=tmp_path, RINGTAP_COLLECT="ddp,nccl")
    assert list(tmp_path.iterdir()) == []


def test_a_pause_before_the_log_is_made_does_not_make_the_process_older(tmp_path: Path) -> None:
    """Else a process that began after another one's end seems to have run beside it."""
    code = """
        import time
        import ringtap
        import ringtap_hook.record_files as files

        identity = files.identity

        def slow(*arguments):
            time.sleep(0.2)
            return identity(*arguments)

        files.identity = slow
        ringtap.step()
    """
    before_ns = time.monotonic_ns()
    run_python(code, RINGTAP_RUN=tmp_path, RINGTAP_NODE="n")
    (path,) = (tmp_path / "nodes" / "n" / "steps").iterdir()
    file = open_records(path)
    (mark,) = file.tail()
    end_mono_ns = mark[[field.name for field in file.fields].index("end_mono_ns")]
    assert before_ns <= end_mono_ns - file.about["age_ns"] <= end_mono_ns
    assert file.about["age_ns"] > 0


def test_a_mark_that_cannot_be_written_costs_the_job_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code = "import ringtap; ringtap.step(); ringtap.step(); print('done')"
    assert run_python(code, RINGTAP_RUN=tmp_path / "file") == "done\n"


TORCH_JOB = """
    import torch
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(2):
        weight.sum().backward()
        optimizer.step()
"""


def test_only_what_was_asked_for_is_recorded(tmp_path: Path) -> None:
    steps = tmp_path / "nodes" / HOST / "steps"
    untouched = """
        assert not hasattr(torch.autograd.backward, "__wrapped__")
        assert not hasattr(torch.amp.GradScaler.step, "__wrapped__")
        from torch.optim import optimizer
        assert not any("ringtap" in hook.__module__ for hook in optimizer._global_optimizer_pre_hooks.values())
    """
    run_python(dedent(TORCH_JOB) + dedent(untouched), QUICK, RINGTAP_RUN=tmp_path, RINGTAP_COLLECT="")
    assert list(tmp_path.iterdir()) == []
    run_python(TORCH_JOB, QUICK, RINGTAP_RUN=tmp_path, RINGTAP_COLLECT="steps")
    assert rows(steps) == [(0, 0, 0, 1), (1, 0, 0, 1)]


# ---- mixed precision and DDP where they are odd


def test_what_an_optimizer_calls_found_inf_may_be_anything(hooked: RecordedInterpreter, tmp_path: Path) -> None:
    code = """
        import torch
        class Own(torch.optim.Optimizer):
            def step(self, closure=None):
                pass
        optimizer = Own([torch.nn.Parameter(torch.ones(2))], {})
        for odd in (None, 1.0, "yes", torch.ones(2), torch.zeros(()), torch.ones(())):
            optimizer.found_inf = odd
            optimizer.step()
    """
    steps, _ = run_recorded(hooked, tmp_path, code)
    assert [row[2] for row in rows(steps)] == [0, 0, 0, 0, 0, 1]


def test_the_step_that_a_checkpoint_makes_to_get_a_state_is_none_of_the_training(
    hooked: RecordedInterpreter, tmp_path: Path
) -> None:
    code = """
        import torch
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.Adam(model.parameters())
        assert get_optimizer_state_dict(model, optimizer)["state"]
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    """
    steps, _ = run_recorded(hooked, tmp_path, code)
    assert rows(steps) == [(0, 0, 0, 1), (1, 0, 0, 1)]


def test_a_ddp_log_that_is_gone_ends_that_recorder_alone(hooked: RecordedInterpreter, tmp_path: Path) -> None:
    code = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(4):
            if number == 2:
                del model.logger.__class__._get_ddp_logging_data
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
        print("done")
        del model
        import gc
        gc.collect()  # the model before the group, whose threads may else outlive the interpreter and abort
        dist.destroy_process_group()
    """
    steps, output = run_recorded(hooked, tmp_path, code)
    assert output == "done\n"
    (log,) = steps.glob("hook-*.log")
    assert log.read_text().count("Traceback") == 1
    assert "DDP's communication stopped" in log.read_text()
    counts = {".ddp" in path.name: open_records(path).count for path in steps.glob("*.rec")}
    assert counts == {True: 2, False: 4}


def test_two_ddp_modules_in_turn_and_one_that_goes(hooked: RecordedInterpreter, tmp_path: Path) -> None:
    code = """
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        one, two = DDP(torch.nn.Linear(3, 1)), DDP(torch.nn.Linear(5, 1))
        for _ in range(3):
            # Both forward passes come before both backward passes.
            first, second = one(torch.ones(2, 3)), two(torch.ones(2, 5))
            first.sum().backward()
            second.sum().backward()
        del one, first
        for _ in range(2):
            two(torch.ones(2, 5)).sum().backward()
        del two, second
        import gc
        gc.collect()  # the model before the group, whose threads may else outlive the interpreter and abort
        dist.destroy_process_group()
    """
    steps, _ = run_recorded(hooked, tmp_path, code)
    (path,) = steps.glob("*.ddp.rec")
    records = open_records(path).tail()
    assert [record[:2] for record in records] == [(i, m) for i in range(3) for m in (0, 1)] + [(3, 1), (4, 1)]
    assert all(record[2] < record[3] <= record[5] <= record[6] for record in records)
    (buckets,) = steps.glob("*.buckets.jsonl")
    found = [(row["module"], row["bucket_bytes"]) for row in read_json_lines(buckets)[0]]
    assert found == [(0, [16]), (1, [24])]


@pytest.mark.parametrize(("every", "iterations"), [("", list(range(23))), ("5", [*range(10), 14, 19])])
def test_ddp_is_sampled_as_often_as_asked_for(
    hooked: RecordedInterpreter, tmp_path: Path, every: str, iterations: list[int]
) -> None:
    code = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
        for _ in range(23):
            model(torch.ones(2, 3)).sum().backward()
        del model
        import gc
        gc.collect()  # the model before the group, whose threads may else outlive the interpreter and abort
        dist.destroy_process_group()
    """
    steps, _ = run_recorded(hooked, tmp_path, code, RINGTAP_DDP_EVERY=every)
    (path,) = steps.glob("*.ddp.rec")
    assert [record[0] for record in open_records(path).tail()] == iterations


def test_ddp_is_not_made_to_sample_where_the_job_would_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    # torch 2.13 without a GPU cannot run a job of either kind (with DETAIL it crashes, without ringtap too).
    assert ddp_logging_data._is_free(torch.nn.Linear(2, 2))
    assert not ddp_logging_data._is_free(torch.nn.Linear(2, 2, device="meta"))
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "detail")
    assert not ddp_logging_data._is_free(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(("device", "end_ns"), [("cpu", 3), ("meta", 0)])
def test_an_accelerator_does_not_say_when_gradients_were_ready(tmp_path: Path, device: str, end_ns: int) -> None:
    import torch

    class Logged(torch.nn.Linear):
        """A model with DDP's log of an iteration, on a device that needs none."""

        def __init__(self) -> None:
            super().__init__(2, 2, device=device)
            self.logger = self

        def set_runtime_stats_and_log(self) -> None:
            pass

        def _get_ddp_logging_data(self) -> SimpleNamespace:
            times = {name: number for number, name in enumerate(ddp_logging_data._SOURCE.values(), 1)}
            return SimpleNamespace(ints_map=times | {"iteration": 1}, strs_map={"bucket_sizes": "8, 16"})

    watcher, model = ddp_logging_data.Watcher(Settings(str(tmp_path), "n", None)), Logged()
    watcher.add(model)
    watcher.look()
    (path,) = (tmp_path / "nodes" / "n" / "steps").glob("*.ddp.rec")
    ((*numbers, _, _),) = open_records(path).tail()
    assert numbers == [0, 0, 1, 2, end_ns, 4, 5, 6, 7, 8, 9]


def test_a_rank_names_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA and NVML count GPUs differently, and see different ones; they agree on UUIDs."""

    import torch

    class Optimizer:
        param_groups: ClassVar = [{"params": []}, {"params": [SimpleNamespace(device=torch.device("cuda", 1))]}]

    asked = {torch.device("cuda", 1): SimpleNamespace(uuid="5c89f3a2-0b5e-4e62-9f3a-0f8d1c6f7a01")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", asked.__getitem__)
    settings = Settings(str(tmp_path), "n", None)
    recorder = steps.Recorder(settings)
    recorder._record(Optimizer(), steps.STEP, 0, 1, 2, 3, 4)
    (path,) = Path(settings.steps_folder).glob("*.rec")
    assert open_records(path).about["gpu"] == "5c89f3a2-0b5e-4e62-9f3a-0f8d1c6f7a01"


# ---- nodes without a supervisor

# Stands where the agent's interpreter does, and tells what it was given.
PROBE = """#!/bin/sh
{ echo "arguments: $*"; echo "here: $(pwd)"; echo "open: $(ls -x /proc/self/fd)"; env | sort; echo end; } >>"$PROBE_OUT"
"""


def foreign_environment(folder: Path) -> dict[str, object]:
    probe = folder / "probe"
    probe.write_text(PROBE)
    probe.chmod(0o755)
    there = {"RINGTAP_HOST": "elsewhere", "RINGTAP_NODE": "elsewhere-node", "RINGTAP_PYTHON": probe}
    return there | {"RINGTAP_RUN": folder / "run", "PROBE_OUT": folder / "said", "RANK": 1}


def test_an_agent_is_started_once_on_a_node_without_supervisor(tmp_path: Path) -> None:
    code = """
        import os, subprocess, sys, ringtap
        ours, theirs = os.pipe()
        os.set_inheritable(theirs, True)
        ringtap.step()
        ringtap.step()
        os.set_inheritable(theirs, False)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print("no child")
        subprocess.run([sys.executable, "-c", "import ringtap; ringtap.step()"], check=True)
        os.close(theirs)
        os.read(ours, 1)  # comes back at once: nobody else holds the other end
        print(os.getpid())
    """
    extra = tmp_path / "of the job"
    extra.mkdir()
    words = run_python(code, extra, **foreign_environment(tmp_path)).split()
    assert words[:2] == ["no", "child"]
    said = wait_for(tmp_path / "said", "end\n")
    assert said.count("arguments:") == 1, "the child of a process that has an agent asks for none"
    recorder = "ringtap.agents.node.record_unsupervised_process"
    assert f"arguments: -c {RUN_MODULE} {recorder} {tmp_path / 'run'} {HOST} {words[2]}\n" in said
    assert "here: /\n" in said
    assert "RINGTAP" not in said.replace(str(tmp_path), "")
    assert f"PYTHONPATH={extra}\n" in said
    assert "RANK=1\n" in said
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "run" / "nodes" / HOST / "steps").iterdir())
    assert names == ["rank1", "rank1"], "records go under the name of the host"


def test_a_missing_interpreter_is_no_harm(tmp_path: Path) -> None:
    env = foreign_environment(tmp_path) | {"RINGTAP_PYTHON": "/nowhere/python"}
    assert run_python("import ringtap; ringtap.step(); print('done')", **env) == "done\n"
    node = tmp_path / "run" / "nodes" / HOST
    wait_for(node / "log" / "agent.log", "/nowhere/python")
    assert rows(node / "steps") == [(0, -1, 2, 0)]


def test_the_real_agent_comes_and_goes_with_the_job(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", "job", ["test"], 1)
    code = """
        import time, ringtap
        until = time.monotonic() + 20
        while time.monotonic() < until:
            ringtap.step()
            time.sleep(0.05)
            try:
                if '"running"' in open(NODE).read():
                    break
            except OSError:
                pass
    """
    node = tmp_path / "run" / "nodes" / HOST
    env = foreign_environment(tmp_path) | {"RINGTAP_PYTHON": sys.executable}
    run_python(dedent(code).replace("NODE", repr(str(node / "node.json"))), **env)
    wait_for(node / "DONE", "")
    (job,) = read_json(node / "node.json")["jobs"]
    assert job["rank"] == 1
    assert job["ended_ns"] is not None


# ---- NCCL


def fake_nccl(folder: Path, available: bool = True) -> Path:
    """A torch of which only the module that NCCL is asked for matters."""
    package = folder / "torch" / "distributed"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("from .distributed_c10d import *\n")
    (package / "distributed_c10d.py").write_text(
        f"def is_nccl_available():\n    return {available}\ndef init_process_group(backend):\n    return backend\n"
    )
    return folder


SHOW = "import os, torch.distributed; print({k: v for k, v in os.environ.items() if k.startswith('NCCL')})"


def test_a_rank_has_nccl_log_into_the_run(tmp_path: Path) -> None:
    run = {"RINGTAP_RUN": tmp_path / "run", "RINGTAP_NODE": "n"}
    said = run_python(SHOW, fake_nccl(tmp_path), RANK=0, **run)
    folder = tmp_path / "run" / "nodes" / "n" / "nccl"
    expected = {"NCCL_DEBUG_FILE": f"{folder}/%h.%p.log", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG": "INFO"}
    assert said == f"{expected}\n"
    assert folder.is_dir()


def test_a_process_becomes_a_rank_when_it_joins_a_group(tmp_path: Path) -> None:
    code = """
        import os, torch.distributed
        assert "NCCL_DEBUG" not in os.environ
        assert torch.distributed.init_process_group("nccl") == "nccl"
        print(os.environ["NCCL_DEBUG"])
    """
    run = {"RINGTAP_RUN": tmp_path / "run", "RINGTAP_NODE": "n"}
    assert run_python(code, fake_nccl(tmp_path), **run) == "INFO\n"
    assert (tmp_path / "run" / "nodes" / "n" / "nccl").is_dir()


def test_nccl_is_left_alone_where_it_must_be(tmp_path: Path) -> None:
    run = {"RINGTAP_RUN": tmp_path / "run", "RINGTAP_NODE": "n"}
    with_nccl, without = fake_nccl(tmp_path / "with"), fake_nccl(tmp_path / "without", available=False)
    assert run_python(SHOW, with_nccl, **run) == "{}\n", "a launcher"
    assert run_python(SHOW, without, RANK=0, **run) == "{}\n"
    assert run_python(SHOW, with_nccl, RANK=0, RINGTAP_COLLECT="steps", **run) == "{}\n"
    assert run_python(SHOW, with_nccl, RANK=0, NCCL_DEBUG="WARN", **run) == "{'NCCL_DEBUG': 'WARN'}\n"
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").touch()
    assert run_python(SHOW, with_nccl, RANK=0, RINGTAP_RUN=tmp_path / "file", RINGTAP_NODE="n") == "{}\n"
