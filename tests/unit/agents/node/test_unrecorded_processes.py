"""Which processes of a job missed the step recorder, and what is said of them."""

import os
import sys
from pathlib import Path

import pytest

from ringtap.agents.hook.ringtap_hook import settings
from ringtap.agents.node.unrecorded_processes import (
    UnrecordedProcesses,
    command_obstacle,
    describe,
    environment_obstacle,
    version_obstacle,
)
from ringtap.core import run_directory_schema
from tests.unit.agent_processes import ROOT, ended, node_item, run_item, wrapped
from tests.unit.agents.hook.test_sitecustomize import fake_torch

pytestmark = pytest.mark.shares

HOOK, RUN = "/opt/hook", "/runs/one"

# A file is mapped whose name is that of torch's library: importing the real one takes longer. The agent looks at what
# is mapped once a second, in processes that have used 0.5 s of a processor. Where it does, it names in its log another
# process, which was started after that time, and which is then noted as one that has loaded the recorder
TRAIN = """
import mmap, os, subprocess, time
import torch
with open(torch.__path__[0] + "/libtorch.so") as file:
    library = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
optimizer = torch.optim.Optimizer()
while time.process_time() < 0.6:
    optimizer.step()
if "ringtap_hook" not in sys.modules:
    other = subprocess.Popen([sys.executable, "-I", "-c", "input()"], stdin=subprocess.PIPE)
    end_s = time.monotonic() + 40
    while time.monotonic() < end_s:
        if os.path.exists(log) and f"process {other.pid} (" in open(log).read():
            break
        time.sleep(0.02)
    if os.path.exists(loaded):
        with open(loaded, "a") as file:
            file.write(f"{other.pid}\\n")
    other.communicate(b"\\n")
optimizer.step()
"""


def training(folder: Path) -> dict[str, str]:
    """Make a train.py and a torch for it; returns an environment for ``ringtap run``."""
    fake_torch(folder)
    (folder / "torch" / "libtorch.so").write_text("library")
    node = folder / "run" / "nodes" / "here"
    log, loaded = (str(node / name) for name in (run_directory_schema.AGENT_LOG, run_directory_schema.HOOK_LOADED))
    begin = f"import sys; sys.path.insert(0, {str(folder)!r})\nlog, loaded = {log!r}, {loaded!r}"
    (folder / "train.py").write_text(begin + TRAIN)
    names = ("PATH", "HOME", "LANG", "TESTED_BY")
    return {name: os.environ[name] for name in names if name in os.environ} | {"PYTHONPATH": str(ROOT)}


def run_script(folder: Path, script: str, environment: dict[str, str]) -> str:
    """Record a shell script, in which ``$python`` is this interpreter; returns what ringtap says."""
    (folder / "job.sh").write_text(f"python={sys.executable}\ncd {folder}\n{script}")
    with ended(wrapped(folder / "run", "sh", str(folder / "job.sh"), env=environment)) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return errors


def why_no_steps(folder: Path) -> str:
    (why,) = (item["why"] for item in run_item(folder / "run")["not_collected"] if item["what"] == "steps")
    return str(why)


@pytest.mark.parametrize(
    ("script", "why", "remedy"),
    [
        (
            "export PYTHONPATH=/somewhere\n$python train.py",
            "has a PYTHONPATH without the folder of ringtap's recorder: /somewhere",
            "export PYTHONPATH=/somewhere:$PYTHONPATH",
        ),
        ("unset PYTHONPATH\n$python train.py", "has no PYTHONPATH", "leave PYTHONPATH"),
        ("$python -I train.py", "was started with -I", "start Python without -I"),
        ("$python -E train.py", "was started with -E", "start Python without -I"),
        ("$python -S train.py", "was started with -S", "start Python without -I"),
        ("env -u RINGTAP_RUN $python train.py", "without RINGTAP_RUN", "leave PYTHONPATH and the variables"),
    ],
)
def test_the_process_that_trained_is_named_though_another_loaded_the_recorder(
    tmp_path: Path, script: str, why: str, remedy: str
) -> None:
    errors = run_script(tmp_path, "PORT=$($python -c 'print(1)')\n" + script, training(tmp_path))
    assert (tmp_path / "run" / "nodes" / "here" / run_directory_schema.HOOK_LOADED).exists()
    (line,) = (line for line in errors.splitlines() if "no steps were recorded" in line)
    assert "train.py) loaded torch and " in line
    for text in (line, why_no_steps(tmp_path)):
        assert why in text
        assert remedy in text


def test_the_remedy_for_a_replaced_path_works(tmp_path: Path) -> None:
    errors = run_script(tmp_path, "export PYTHONPATH=/somewhere:$PYTHONPATH\n$python train.py", training(tmp_path))
    assert "steps" not in errors
    assert node_item(tmp_path / "run")["collectors"]["steps"]["processes"] == 1


def test_a_process_without_the_recorder_is_named_beside_one_with_it(tmp_path: Path) -> None:
    errors = run_script(tmp_path, "$python train.py & $python -I train.py & wait", training(tmp_path))
    (line,) = (line for line in errors.splitlines() if "some steps may be missing" in line)
    assert "1 process recorded steps; process " in line
    assert "-I train.py) loaded torch and was started with -I" in line
    entry = node_item(tmp_path / "run")["collectors"]["steps"]
    assert (entry["state"], entry["processes"]) == ("degraded", 1)
    assert run_item(tmp_path / "run")["status"] == "complete"


def test_what_used_no_processor_is_not_blamed_for_missing_steps(tmp_path: Path) -> None:
    """A helper with -I is not the reason if another process, which could have stepped, worked longer."""
    helper = "{ $python -Ic 'import time; time.sleep(2)'; touch slept; } &"
    worker = 'import os, time\nwhile time.process_time() < 2 or not os.path.exists("slept"): pass'
    errors = run_script(tmp_path, f"{helper} $python -c '{worker}'\nwait", training(tmp_path))
    assert "no steps" not in errors
    assert "no process of the job stepped an optimizer" in why_no_steps(tmp_path)


def test_steps_that_an_inner_run_recorded_are_named_with_their_place(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    run_inner = f"$python -m ringtap.cli run -o inner --node here --collect {{}} -- $python {tmp_path}/train.py"
    errors = run_script(tmp_path, run_inner.format("nic,steps"), training(tmp_path))
    assert node_item(inner)["collectors"]["steps"]["processes"] == 1
    why = f"another ringtap run within the job recorded its processes, in {inner}"
    assert f"ringtap: no steps were recorded: {why}; analyze {inner}, or leave out" in errors
    assert why_no_steps(tmp_path).startswith(why)


def test_an_inner_run_that_records_no_steps_leaves_them_to_the_outer_one(tmp_path: Path) -> None:
    inner = "$python -m ringtap.cli run -o inner --node here --collect nic -- $python train.py"
    errors = run_script(tmp_path, inner, training(tmp_path))
    assert "no steps" not in errors
    assert node_item(tmp_path / "run")["collectors"]["steps"]["processes"] == 1


class Proc:
    """A /proc with processes of this user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, pid: int, cpu_s: float, parent: int = 1, maps: str = "", **variables: str) -> None:
        folder = self.folder / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        ticks = int(cpu_s * os.sysconf("SC_CLK_TCK"))
        words = ["R", str(parent), *["0"] * 9, str(ticks), "0", *["0"] * 6, "77"]
        (folder / "stat").write_text(f"{pid} (python) {' '.join(words)}")
        (folder / "cmdline").write_bytes(b"python\0train.py\0")
        (folder / "environ").write_text("\0".join(f"{name}={value}" for name, value in variables.items()))
        (folder / "maps").write_text(maps)
        if not (folder / "exe").is_symlink():
            (folder / "exe").symlink_to("/usr/bin/python3.11")
            (folder / "root").symlink_to("/")


TORCH = "7f00 r-xp /usr/lib/python3.11/site-packages/torch/lib/libtorch_cpu.so"
RECORDED = {"RINGTAP_RUN": RUN, "PYTHONPATH": HOOK}


def test_a_worker_that_a_recorded_process_forks_has_not_missed_the_recorder(tmp_path: Path) -> None:
    proc = Proc(tmp_path / "proc")
    folder = tmp_path / "node"
    folder.mkdir()
    (folder / run_directory_schema.HOOK_LOADED).write_text("10\n")
    processes = UnrecordedProcesses(folder, Path(RUN), Path(HOOK))
    proc.add(10, 9.0, maps=TORCH, **RECORDED)
    proc.add(11, 5.0, parent=10, maps=TORCH, **RECORDED)
    proc.add(12, 5.0, parent=10, maps=TORCH, RINGTAP_RUN=RUN, PYTHONPATH="/mine")
    assert [each.pid for each in processes.look([10, 11, 12], proc.folder)] == [12]
    assert [(each.pid, each.has_torch) for each in processes.report([])] == [(12, True)]


def test_a_process_whose_recorder_is_in_another_folder_of_a_container(tmp_path: Path) -> None:
    proc = Proc(tmp_path / "proc")
    processes = UnrecordedProcesses(tmp_path, Path(RUN), Path("/nowhere/hook"))
    proc.add(10, 9.0, maps=TORCH, RINGTAP_RUN=RUN, PYTHONPATH="/nowhere/hook")
    processes.look([10], proc.folder)
    (found,) = processes.report([])
    assert found.obstacle
    assert "does not see the folder of ringtap's recorder, /nowhere/hook" in found.obstacle.why


def test_a_process_that_knows_another_number_of_itself_is_found_among_the_noted(tmp_path: Path) -> None:
    proc = Proc(tmp_path / "proc")
    (tmp_path / run_directory_schema.HOOK_LOADED).write_text("3\n")
    processes = UnrecordedProcesses(tmp_path, Path(RUN), Path("/nowhere/hook"))
    proc.add(10, 9.0, maps=TORCH, RINGTAP_RUN=RUN, PYTHONPATH="/nowhere/hook")
    (proc.folder / "10" / "status").write_text("Name:\tpython\nNSpid:\t10\t3\n")
    processes.look([10], proc.folder)
    assert processes.report([]) == []


def test_nothing_is_said_of_a_process_whose_program_is_still_loaded(tmp_path: Path) -> None:
    # execve links the program first: until it has set the command line and the environment, both are empty
    proc = Proc(tmp_path / "proc")
    processes = UnrecordedProcesses(tmp_path, Path(RUN), Path(HOOK))
    proc.add(10, 0.0)
    (proc.folder / "10" / "cmdline").write_bytes(b"")
    assert processes.look([10], proc.folder) == []
    proc.add(10, 0.0, RINGTAP_RUN=RUN, PYTHONPATH="/mine")
    (found,) = processes.look([10], proc.folder)
    assert found.obstacle
    assert "PYTHONPATH without the folder" in found.obstacle.why


def test_maps_are_read_only_when_the_cpu_time_has_doubled(tmp_path: Path) -> None:
    proc = Proc(tmp_path / "proc")
    processes = UnrecordedProcesses(tmp_path, Path(RUN), Path(HOOK))
    seen = []
    for cpu_s in (0.1, 0.6, 1.1, 1.3):
        proc.add(10, cpu_s, maps=TORCH if cpu_s > 0.6 else "", RINGTAP_RUN=RUN, PYTHONPATH="/mine")
        processes.look([10], proc.folder)
        row = processes._rows[10].missed
        assert row
        seen.append(row.has_torch)
    assert seen == [False, False, False, True]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_of_another_users_process_only_its_name_is_read(tmp_path: Path) -> None:
    proc = Proc(tmp_path / "proc")
    proc.add(10, 9.0, maps=TORCH, PYTHONPATH="/mine")
    os.chown(proc.folder / "10", 65534, -1)
    for name in ("cmdline", "environ", "maps"):
        (proc.folder / "10" / name).unlink()
    processes = UnrecordedProcesses(tmp_path, Path(RUN), Path(HOOK))
    processes.look([10], proc.folder)
    (found,) = processes.report([])
    assert (found.command, found.obstacle, found.has_torch) == ("python", None, False)
    assert "belongs to user" in describe([found])[0]
    assert "sudo ringtap run" in describe([found])[1]


def test_processes_with_one_obstacle_are_one_sentence(tmp_path: Path) -> None:
    proc = Proc(tmp_path / "proc")
    processes = UnrecordedProcesses(tmp_path, Path(RUN), Path(HOOK))
    for pid in range(10, 14):
        proc.add(pid, 9.0, maps=TORCH, RINGTAP_RUN=RUN, PYTHONPATH="/mine")
    processes.look(range(10, 14), proc.folder)
    why, remedy = describe(processes.report([]))
    assert "process 10 (python train.py), like 3 others, loaded torch and has a PYTHONPATH without" in why
    assert remedy == "extend PYTHONPATH instead of replacing it: export PYTHONPATH=/mine:$PYTHONPATH"


def test_versions_that_are_too_old() -> None:
    assert [version_obstacle(version) is None for version in ((2,), (2, 7), (3, 6), (3,), (3, 7), (3, 13), ())] == [
        *(False, False, False),
        *(True, True, True, True),
    ]


def test_a_path_that_is_too_long_to_repeat() -> None:
    found = environment_obstacle({"RINGTAP_RUN": RUN, "PYTHONPATH": "/mine" * 200}, HOOK, RUN)
    assert found
    assert found.remedy.endswith("export PYTHONPATH=FOLDERS:$PYTHONPATH")


def test_command_lines_without_an_obstacle() -> None:
    for words in (["python", "-c", "pass", "-I"], ["python", "-X", "I", "train.py"], ["train", "-I"], []):
        assert command_obstacle(words) is None


def test_the_hook_names_the_file_as_the_schema_does() -> None:
    assert settings.HOOK_LOADED == run_directory_schema.HOOK_LOADED
