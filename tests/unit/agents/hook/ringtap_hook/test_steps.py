"""The step recorder with the real torch: the same job with and without it, and the ways in which optimizers step."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ringtap.core.append_only_logs import open_records
from tests.frameworks.ranks import QUICK

pytestmark = [pytest.mark.shares, pytest.mark.together]

HOOK = Path(__file__).resolve().parents[5] / "agents" / "hook"

# Seeded training with loader workers that step too, Horovod's way of wrapping an optimizer (a class of the same name
# whose step calls the one above it), a second optimizer and a step that fails. Prints what came out, and its pid.
JOB = """
import hashlib, os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)
torch.set_num_threads(1)

def worker(number):
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.SGD([weight], lr=0.1).step()

class Wrapping:
    def step(self, closure=None):
        return super(self.__class__, self).step(closure)

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
wrapped = type("SGD", (torch.optim.SGD,), {"step": Wrapping.step})(model.parameters(), lr=0.05, momentum=0.9)
adam = torch.optim.Adam(model.parameters(), lr=0.01)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
loader = DataLoader(data, 16, shuffle=True, num_workers=1, worker_init_fn=worker, multiprocessing_context="fork")
for optimizer in (plain, wrapped, adam):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()

def closure():
    raise KeyError("the job's own")

try:
    plain.step(closure)
except KeyError as error:
    print(repr(error))
plain.step()
values = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
print(hashlib.sha256(values).hexdigest())
print(os.getpid(), flush=True)
if len(sys.argv) > 1:
    os.kill(os.getpid(), 9)
"""


@dataclass(frozen=True)
class Outcome:
    """How a job ended and what it said; its last line of output is its pid."""

    code: int
    words: list[str]
    errors: str

    @property
    def pid(self) -> int:
        return int(self.words[-1])


def run_job(*arguments: str, **env: str) -> Outcome:
    clean = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", JOB, *arguments]
    result = subprocess.run(command, env=clean | env, capture_output=True, text=True, timeout=120, check=False)
    return Outcome(result.returncode, result.stdout.splitlines(), result.stderr)


@pytest.fixture(scope="module")
def plain() -> Outcome:
    return run_job(PYTHONPATH=QUICK)


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run") / "nodes" / "here" / "steps"


@pytest.fixture(scope="module")
def recorded(steps: Path) -> Outcome:
    """The same job, recorded, and killed at its end as a scheduler would."""
    path = f"{HOOK}{os.pathsep}{QUICK}"
    return run_job("killed", PYTHONPATH=path, RINGTAP_RUN=str(steps.parents[2]), RINGTAP_NODE="here", RANK="1")


def test_the_result_is_the_same_to_the_bit(plain: Outcome, recorded: Outcome) -> None:
    assert plain.code == 0, plain.errors
    assert recorded.code == -9, recorded.errors
    assert "the job's own" in plain.words[0]
    assert recorded.words[:-1] == plain.words[:-1]
    assert len(recorded.errors.splitlines()) == len(plain.errors.splitlines()), "the hook said something on stderr"


def test_every_outermost_step_is_recorded_once_and_survives_the_kill(recorded: Outcome, steps: Path) -> None:
    file = open_records(steps / f"rank1-{recorded.pid}.rec")
    # 4 batches each; the step with the failing closure leaves no record.
    expected = [(step, number) for number in range(3) for step in range(4)] + [(4, 0)]
    assert [record[:2] for record in file.tail()] == expected
    assert file.torn_bytes == 0
    assert file.about["torch"].startswith("2.")


def test_loader_workers_write_files_of_their_own(recorded: Outcome, steps: Path) -> None:
    assert list(steps.glob("hook-*.log")) == []
    files = [open_records(path) for path in steps.glob("*.rec")]
    assert [file.count for file in files if file.about["pid"] != recorded.pid] == [1, 1, 1]
