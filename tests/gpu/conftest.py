"""Tests that ``make test-gpu`` runs on a machine with a GPU. Their jobs can be tried on a CPU.

TEST_DEVICE is ``cuda`` (all tests) or ``cpu`` (all that need no GPU). Without it, as in the whole suite, the tests that
are marked ``on_cpu`` run on the CPU, and the others are left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import ringtap
from ringtap.analysis.job.run import Job
from ringtap.core.append_only_logs import open_records
from tests.frameworks.ranks import QUICK, launch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
JOB = HERE / "job.py"
DEVICE = os.environ.get("TEST_DEVICE", "")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def is_wanted(item: pytest.Item) -> bool:
        if DEVICE == "cuda" or item.path.parent != HERE:
            return True
        return item.get_closest_marker("on_cpu") is not None or (
            DEVICE == "cpu" and item.get_closest_marker("needs_gpu") is None
        )

    config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
    items[:] = filter(is_wanted, items)


@pytest.fixture(scope="session")
def device() -> str:
    if DEVICE == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.fail(f"TEST_DEVICE=cuda, but torch {torch.__version__} finds no CUDA device")
    return DEVICE or "cpu"


@dataclass(frozen=True)
class Recorded:
    """A job that was recorded: what it printed, its run, and the rows of its ranks' logs."""

    output: str
    path: Path

    @property
    def printed(self) -> dict[str, Any]:
        """The JSON object that rank 0 printed."""
        return dict(json.loads(next(line for line in self.output.splitlines() if line.startswith("{"))))

    @property
    def job(self) -> Job:
        return ringtap.open_job(self.path)

    def rows(self, rank: int = 0, suffix: str = ".rec") -> list[dict[str, int]]:
        """The records of a rank: its steps, or what DDP logged (``.ddp.rec``)."""
        (path,) = [
            path
            for path in self.path.glob(f"nodes/*/steps/rank{rank}-*{suffix}")
            if path.name.count(".") == suffix.count(".")
        ]
        log = open_records(path)
        return [dict(zip((field.name for field in log.fields), row, strict=True)) for row in log.tail()]


@pytest.fixture
def record(tmp_path: Path, device: str) -> Callable[..., Recorded]:
    """Run ranks under ``ringtap run``."""

    def run(*command: str, ranks: int = 1, collect: str = "default", **more: str) -> Recorded:
        own = [sys.executable, "-m", "ringtap", "run", "--collect", collect, "-o", str(tmp_path / "run"), "--"]
        output = run_ranks([*own, *launch(ranks, sys.executable, *command)], **more)
        return Recorded(output, tmp_path / "run")

    return run


def run_ranks(command: list[str], **more: str) -> str:
    """Run a command, and return its output."""
    folders = filter(None, [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH"), QUICK])
    env = {name: value for name, value in os.environ.items() if not name.startswith("RINGTAP_")}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(folders), "RINGTAP_DDP_EVERY": "1"} | more
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
