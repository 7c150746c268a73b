"""The step recorder in interpreters with a stand-in for torch: start-up, chaining, and what may go wrong."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
import zlib
from itertools import pairwise
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from ringtap.core.append_only_logs import Field, RecordFile, open_records

pytestmark = pytest.mark.shares

HOOK = Path(__file__).resolve().parents[4] / "agents" / "hook"

# As torch.optim.optimizer calls its global hooks: from the wrapper around step, straight.
FAKE_OPTIMIZER = """
PRE, POST = [], []
register_optimizer_step_pre_hook = PRE.append
register_optimizer_step_post_hook = POST.append

class Optimizer:
    def step(self, inner=None):
        args = (self, inner) if inner else (self,)
        for hook in PRE:
            args, _ = hook(self, args, {}) or (args, {})
        for closure in args[1:]:
            closure()
        for hook in POST:
            hook(self, args, {})
"""

FAKE_OLD_OPTIMIZER = """
class Optimizer:
    def __init__(self):
        self.done = 0
    def step(self):
        self.done += 1
        return self.done
"""


def fake_torch(folder: Path, optimizer: str = FAKE_OPTIMIZER) -> Path:
    package = folder / "torch"
    (package / "optim").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.fake'\nimport torch.optim\n")
    (package / "optim" / "__init__.py").write_text("from torch.optim.optimizer import Optimizer\n")
    (package / "optim" / "optimizer.py").write_text(optimizer)
    return folder


def run_python(
    code: str, *path: Path, cwd: Path | None = None, check: bool = True, **env: object
) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter with the given PYTHONPATH and nothing of this one's rank variables."""
    names = ("PATH", "HOME", "LANG")
    clean = {name: os.environ[name] for name in names if name in os.environ}
    clean |= {"PYTHONPATH": os.pathsep.join(map(str, path))} | {name: str(value) for name, value in env.items()}
    command = [sys.executable, "-c", dedent(code)]
    result = subprocess.run(command, env=clean, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
    if check:
        assert result.returncode == 0, result.stderr
    return result


def recording(folder: Path) -> dict[str, str]:
    """What the agent sets so that a job is recorded."""
    return {"RINGTAP_RUN": str(folder / "run"), "RINGTAP_NODE": "node", "RINGTAP_HOST": os.uname().nodename}


def steps_of(folder: Path) -> Path:
    return folder / "run" / "nodes" / "node" / "steps"


def only_file(steps: Path) -> RecordFile:
    assert [path.name for path in steps.glob("hook-*.log")] == []
    (path,) = steps.glob("*.rec")
    return open_records(path)


def test_source_is_valid_for_python_3_8() -> None:
    paths = [HOOK / "sitecustomize.py", *(HOOK / "ringtap_hook").glob("*.py")]
    assert len(paths) > 8
    for path in paths:
        ast.parse(path.read_text(), filename=str(path), feature_version=(3, 8))


def test_an_older_python_of_the_job_can_start_beside_the_hook() -> None:
    """Python 3.6 would print an error at each start if the module that it imports then could not be compiled."""
    text = (HOOK / "sitecustomize.py").read_text()
    ast.parse(text, feature_version=(3, 6))
    assert "from __future__ import annotations" not in text


def test_only_the_standard_library_is_imported() -> None:
    for path in (HOOK / "ringtap_hook").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names, path


def test_records_are_what_the_reader_expects(tmp_path: Path) -> None:
    steps = steps_of(tmp_path)
    code = """
        import os, time, torch
        one, two = torch.optim.Optimizer(), torch.optim.Optimizer()
        for _ in range(3):
            one.step(lambda: time.sleep(0.002))
        two.step()
        print(os.getpid(), time.time_ns(), time.monotonic_ns())
        one.step()
        print(time.time_ns(), time.monotonic_ns())
    """
    result = run_python(
        code, HOOK, fake_torch(tmp_path), **recording(tmp_path), RANK=3, WORLD_SIZE=4, LOCAL_RANK=1, SLURM_PROCID=0
    )
    pid, real_ns, mono_ns, until_ns, until_mono_ns = map(int, result.stdout.split())
    file = only_file(steps)
    assert file.path.name == f"rank3-{pid}.rec"
    assert file.offset % 64 == 0
    times = [Field(name, "<i8", "ns", "time") for name in ("start_ns", "end_ns", "start_mono_ns", "end_mono_ns")]
    assert file.fields == (
        Field("step", "<i8", "", "index"),
        Field("optimizer", "<i8", "", "index"),
        *times,
        Field("kind", "<i8", "", "index"),
        Field("backwards", "<i8", "passes", "gauge"),
        Field("pause_ns", "<i8", "ns", "gauge"),
        Field("passes_ns", "<i8", "ns", "gauge"),
    )
    about = {"collector": "steps", "rank": 3, "pid": pid, "world_size": 4, "local_rank": 1, "torch": "0.fake"}
    about |= {"hostname": os.uname().nodename, "source": "optimizer steps", "age_ns": file.about["age_ns"]}
    about |= {"group": "", "address": "", "command": zlib.crc32(f"-c\0{dedent(code)}".encode())}
    assert file.about == about
    assert 0 <= file.about["age_ns"] < 60e9
    records = file.tail()
    assert [record[:2] for record in records] == [(0, 0), (1, 0), (2, 0), (0, 1), (3, 0)]
    assert {record[6:9] for record in records} == {(0, 0, 0)}
    # a closure is no part of the step
    assert all(2_000_000 <= record[9] <= record[5] - record[4] for record in records[:3])
    assert [record[9] for record in records[3:]] == [0, 0]
    lines = (steps / f"rank3-{pid}.optimizers.jsonl").read_text().splitlines()
    described = [(item["optimizer"], item["class"]) for item in map(json.loads, lines)]
    assert described == [(0, "Optimizer"), (1, "Optimizer")]
    assert all(record[3] - record[2] >= 2_000_000 for record in records[:3])
    assert all(record[5] >= record[4] for record in records)
    assert all(left[5] <= right[4] for left, right in pairwise(records))
    assert mono_ns <= records[-1][5] <= until_mono_ns
    assert real_ns <= records[-1][3] <= until_ns


@pytest.mark.parametrize(
    ("variables", "rank", "world_size"),
    [
        ({}, 0, 1),
        ({"SLURM_PROCID": 5, "SLURM_NTASKS": 8}, 5, 8),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 1, "OMPI_COMM_WORLD_RANK": 2, "OMPI_COMM_WORLD_SIZE": 3}, 2, 3),
        ({"HOROVOD_RANK": 1, "HOROVOD_SIZE": 2, "PMI_RANK": 0}, 1, 2),
        ({"RANK": "none of these", "PMI_RANK": 4}, 4, 1),
    ],
)
def test_rank_comes_from_the_most_specific_variable(
    tmp_path: Path, variables: dict[str, Any], rank: int, world_size: int
) -> None:
    steps = steps_of(tmp_path)
    run_python(
        "import torch; torch.optim.Optimizer().step()", HOOK, fake_torch(tmp_path), **recording(tmp_path), **variables
    )
    assert (only_file(steps).about["rank"], only_file(steps).about["world_size"]) == (rank, world_size)


def test_rank_of_torch_distributed_wins(tmp_path: Path) -> None:
    code = """
        import sys, types, torch
        sys.modules["torch.distributed"] = types.SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 6, get_world_size=lambda: 7)
        torch.optim.Optimizer().step()
    """
    run_python(code, HOOK, fake_torch(tmp_path), **recording(tmp_path), RANK=1)
    about = only_file(steps_of(tmp_path)).about
    assert (about["rank"], about["world_size"]) == (6, 7)


def test_no_file_before_the_first_step_nor_without_the_variable(tmp_path: Path) -> None:
    fake_torch(tmp_path)
    run_python("import torch", HOOK, tmp_path, **recording(tmp_path), RANK=0)
    run_python("import torch; torch.optim.Optimizer().step()", HOOK, tmp_path, cwd=tmp_path, RANK=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["torch"]


def test_the_module_keeps_its_own_loader_and_is_attached_to_once(tmp_path: Path) -> None:
    code = """
        import sys, importlib, torch.optim.optimizer as module
        (finder,) = [finder for finder in sys.meta_path if type(finder).__name__ == "_Finder"]
        assert "torch.optim.optimizer" not in finder.pending and "torch.autograd" in finder.pending
        assert type(module.__loader__).__name__ == "SourceFileLoader" and "exec_module" not in vars(module.__loader__)
        before = len(module.PRE)
        importlib.reload(module)
        print(before, module.__file__)
    """
    result = run_python(code, HOOK, fake_torch(tmp_path), **recording(tmp_path))
    assert result.stdout.split() == ["1", str(tmp_path / "torch" / "optim" / "optimizer.py")]


def test_folder_is_meant_from_where_the_job_started(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    code = "import os, torch; os.chdir('elsewhere'); torch.optim.Optimizer().step()"
    run_python(code, HOOK, fake_torch(tmp_path), cwd=tmp_path, RINGTAP_RUN="run", RINGTAP_NODE="node")
    assert only_file(steps_of(tmp_path)).count == 1


def test_older_torch_without_global_hooks(tmp_path: Path) -> None:
    code = """
        import torch
        class Own(torch.optim.Optimizer):
            def step(self):
                return 10 * super().step()
        plain, own = torch.optim.Optimizer(), Own()
        print([plain.step(), plain.step(), own.step()])
    """
    result = run_python(code, HOOK, fake_torch(tmp_path, FAKE_OLD_OPTIMIZER), **recording(tmp_path))
    assert result.stdout == "[1, 2, 10]\n"
    assert [record[:2] for record in only_file(steps_of(tmp_path)).tail()] == [(0, 0), (1, 0), (0, 1)]


# ---- the sitecustomize that was there before


def test_next_sitecustomize_runs_under_its_own_name(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import sys\nsys.path.append('/added')\nVALUE = __name__\n")
    code = "import sys, sitecustomize as s; print(s.VALUE, s.__file__, '/added' in sys.path)"
    # Twice on the path, and once more by another spelling: a wrapped job may wrap another one.
    result = run_python(code, HOOK, HOOK / ".." / "hook", HOOK, site, **recording(tmp_path))
    assert result.stdout.split() == ["sitecustomize", str(site / "sitecustomize.py"), "True"]
    assert result.stderr == ""


def test_next_sitecustomize_runs_without_recording_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    assert run_python("", HOOK, tmp_path).stdout == "mine\n"


def test_one_that_chains_itself_does_not_go_round(tmp_path: Path) -> None:
    first, last = tmp_path / "first", tmp_path / "last"
    first.mkdir()
    last.mkdir()
    (first / "sitecustomize.py").write_text(
        "import runpy, sys\nprint('first')\nrunpy.run_path(sys.path[2] + '/sitecustomize.py', run_name=__name__)\n"
    )
    (last / "sitecustomize.py").write_text("print('last')\n")
    assert run_python("import sys; sys.path", first, HOOK, last).stdout == "first\nlast\n"


def test_an_error_in_the_next_one_is_reported_as_without_this_one(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("raise ValueError('broken site')\n")
    plain = run_python("print('ran')", site)
    steps = steps_of(tmp_path)
    code = "import torch; torch.optim.Optimizer().step(); print('ran')"
    hooked = run_python(code, HOOK, site, fake_torch(tmp_path), **recording(tmp_path))
    assert "broken site" in plain.stderr
    assert (hooked.stdout, hooked.stderr) == (plain.stdout, plain.stderr)
    assert only_file(steps).count == 1


# ---- steps that nest, fail, fork


def test_only_the_outermost_of_nested_steps_counts(tmp_path: Path) -> None:
    code = """
        import torch
        outer, inner = torch.optim.Optimizer(), torch.optim.Optimizer()
        outer.step(inner.step)
        outer.step(outer.step)
        outer.step(lambda: outer.step(inner.step))
        inner.step()
    """
    run_python(code, HOOK, fake_torch(tmp_path), **recording(tmp_path))
    assert [record[:2] for record in only_file(steps_of(tmp_path)).tail()] == [(0, 0), (1, 0), (2, 0), (0, 1)]


def test_a_step_ended_by_an_exception_is_not_recorded_and_hides_no_other(tmp_path: Path) -> None:
    code = """
        import torch
        optimizer = torch.optim.Optimizer()
        for inner in (None, lambda: 1 / 0, lambda: optimizer.step(lambda: 1 / 0), None, None):
            try:
                optimizer.step(inner)
            except ZeroDivisionError:
                pass
    """
    run_python(code, HOOK, fake_torch(tmp_path), **recording(tmp_path))
    assert [record[0] for record in only_file(steps_of(tmp_path)).tail()] == [0, 1, 2]


def test_steps_of_two_threads_do_not_nest(tmp_path: Path) -> None:
    code = """
        import threading, torch
        both = threading.Barrier(2, timeout=20)
        def work():
            torch.optim.Optimizer().step(both.wait)
        threads = [threading.Thread(target=work) for _ in range(2)]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
    """
    run_python(code, HOOK, fake_torch(tmp_path), **recording(tmp_path))
    assert sorted(record[:2] for record in only_file(steps_of(tmp_path)).tail()) == [(0, 0), (0, 1)]


def test_a_forked_child_writes_a_file_of_its_own(tmp_path: Path) -> None:
    code = """
        import os, torch
        optimizer = torch.optim.Optimizer()
        optimizer.step(), optimizer.step()
        if os.fork() == 0:
            optimizer.step()
            os._exit(0)
        os.wait()
        if os.fork() == 0:
            os._exit(0)
        os.wait()
        optimizer.step()
        print(os.getpid())
    """
    steps = steps_of(tmp_path)
    parent = int(run_python(code, HOOK, fake_torch(tmp_path), **recording(tmp_path)).stdout)
    counts = {open_records(path).about["pid"] == parent: open_records(path).count for path in steps.glob("*.rec")}
    assert counts == {True: 3, False: 1}
    assert len(list(steps.glob("*.optimizers.jsonl"))) == 2


# ---- what may go wrong


def log_of(steps: Path) -> str:
    (path,) = steps.glob("hook-*.log")
    return path.read_text()


def test_a_folder_that_cannot_be_made_costs_the_job_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code = "import torch; o = torch.optim.Optimizer(); o.step(); o.step(); print('done')"
    result = run_python(code, HOOK, fake_torch(tmp_path), **recording(tmp_path / "file"))
    assert (result.stdout, result.stderr) == ("done\n", "")


def test_an_exception_in_the_hook_is_logged_once_and_ends_the_recording(tmp_path: Path) -> None:
    code = """
        import torch
        class Odd(torch.optim.Optimizer):
            __hash__ = None
        good, odd = torch.optim.Optimizer(), Odd()
        for optimizer in (good, odd, odd, good):
            optimizer.step()
        print('done')
    """
    steps = steps_of(tmp_path)
    result = run_python(code, HOOK, fake_torch(tmp_path), **recording(tmp_path))
    assert (result.stdout, result.stderr) == ("done\n", "")
    assert log_of(steps).count("Traceback") == 1
    assert "unhashable" in log_of(steps)
    (path,) = steps.glob("*.rec")
    assert open_records(path).count == 1


def test_a_full_disk_leaves_whole_records_alone(tmp_path: Path) -> None:
    # A limit on file sizes fails a write as a full disk does: part of it is written, then nothing.
    code = """
        import glob, os, resource, torch
        optimizer = torch.optim.Optimizer()
        optimizer.step()
        (path,) = glob.glob("run/nodes/node/steps/*.rec")
        size = os.path.getsize(path) + 80 + 20
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        for _ in range(4):
            optimizer.step()
        print('done')
    """
    steps = steps_of(tmp_path)
    result = run_python(code, HOOK, fake_torch(tmp_path), cwd=tmp_path, **recording(tmp_path))
    assert (result.stdout, result.stderr) == ("done\n", "")
    (path,) = steps.glob("*.rec")
    assert (open_records(path).count, open_records(path).torn_bytes) == (2, 0)
    assert "File too large" in log_of(steps)


def test_a_record_file_that_is_deleted_ends_its_recorder_with_the_reason(tmp_path: Path) -> None:
    code = """
        import glob, os, torch
        optimizer = torch.optim.Optimizer()
        optimizer.step()
        (path,) = glob.glob("run/nodes/node/steps/*.rec")
        os.unlink(path)
        optimizer.step()
        print('done')
    """
    steps = steps_of(tmp_path)
    result = run_python(code, HOOK, fake_torch(tmp_path), cwd=tmp_path, **recording(tmp_path))
    assert (result.stdout, result.stderr) == ("done\n", "")
    assert "the record file was deleted" in log_of(steps)


def test_a_disk_full_from_the_start_leaves_no_half_header(tmp_path: Path) -> None:
    code = """
        import resource, torch
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        torch.optim.Optimizer().step()
        print('done')
    """
    steps = steps_of(tmp_path)
    result = run_python(code, HOOK, fake_torch(tmp_path), **recording(tmp_path))
    assert (result.stdout, result.stderr) == ("done\n", "")
    assert list(steps.glob("*.rec")) == []


def test_a_job_that_closes_every_file_gets_no_records_in_its_own(tmp_path: Path) -> None:
    code = """
        import os, torch
        optimizer = torch.optim.Optimizer()
        optimizer.step()
        os.closerange(3, 100)
        own = [open("own.txt", "w") for _ in range(20)]
        optimizer.step()
        print(sum(os.path.getsize(file.name) for file in own))
    """
    steps = steps_of(tmp_path)
    result = run_python(code, HOOK, fake_torch(tmp_path), cwd=tmp_path, **recording(tmp_path))
    assert result.stdout == "0\n"
    assert "closed by the job" in log_of(steps)
    (path,) = steps.glob("*.rec")
    assert open_records(path).count == 1


def test_a_second_process_of_the_same_pid_takes_another_name(tmp_path: Path) -> None:
    code = """
        import os, torch
        name = "rank0-{}.rec".format(os.getpid())
        os.makedirs("run/nodes/node/steps")
        open("run/nodes/node/steps/" + name, "w").close()
        torch.optim.Optimizer().step()
        print(name)
    """
    name = run_python(
        code, HOOK, fake_torch(tmp_path), cwd=tmp_path, RINGTAP_RUN="run", RINGTAP_NODE="node"
    ).stdout.strip()
    assert (steps_of(tmp_path) / name).read_text() == ""
    assert open_records(steps_of(tmp_path) / name.replace(".rec", "-2.rec")).count == 1


def test_a_torch_that_fails_to_import_fails_as_it_would(tmp_path: Path) -> None:
    fake_torch(tmp_path, "raise RuntimeError('no such device')\n")
    plain = run_python("import torch", tmp_path, check=False)
    hooked = run_python("import torch", HOOK, tmp_path, **recording(tmp_path), check=False)
    assert plain.returncode == hooked.returncode == 1
    assert plain.stderr.splitlines()[-1] == hooked.stderr.splitlines()[-1] == "RuntimeError: no such device"


def test_iterations_are_kept_on_a_grid(tmp_path: Path) -> None:
    steps = steps_of(tmp_path)
    period_ns = 40_000_000
    code = """
        import time, torch
        one, two = torch.optim.Optimizer(), torch.optim.Optimizer()
        for _ in range(8):
            time.sleep(0.005)
            one.step(), two.step()
    """
    # with a comma in its name, and there only after the iterations
    variable = {"RINGTAP_ITERATION_GRID": f"1000,{period_ns},{tmp_path / 'no, not yet'}"}
    run_python(code, HOOK, fake_torch(tmp_path), **recording(tmp_path), **variable)
    names = [field.name for field in only_file(steps).fields]
    records = [dict(zip(names, row, strict=True)) for row in only_file(steps).tail()]
    first, second = ([row for row in records if row["optimizer"] == number] for number in (0, 1))
    # the work takes 5 ms, so that each iteration waits for the next point
    points_ns = set()
    for row, after in zip(first[:5], second[:5], strict=True):
        points_ns.add((row["end_mono_ns"] + row["pause_ns"]) % period_ns)
        assert after["start_ns"] >= row["end_ns"] + row["pause_ns"], "the pause comes before all that follows"
    (point_ns,) = points_ns
    apart_ns = (point_ns + time.time_ns() - time.monotonic_ns() - 1000) % period_ns
    assert min(apart_ns, period_ns - apart_ns) < period_ns / 8, "by CLOCK_REALTIME, but for pauses of a busy machine"
    assert all(row["pause_ns"] == 0 for row in second), "one pause in an iteration"


def test_a_wrong_grid_leaves_the_job_free(tmp_path: Path) -> None:
    code = "import torch; torch.optim.Optimizer().step(); print('done')"
    variable = {"RINGTAP_ITERATION_GRID": "now,0"}
    assert run_python(code, HOOK, fake_torch(tmp_path), **recording(tmp_path), **variable).stdout == "done\n"
    (log,) = steps_of(tmp_path).glob("hook-*.log")
    assert "RINGTAP_ITERATION_GRID" in log.read_text()
