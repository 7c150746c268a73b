"""Damaged and foreign run directories: every reader ends with a documented exit code, soon, in bounded memory.

RINGTAP_FUZZ_RUNS=2000 makes it two thousand, from another seed with RINGTAP_FUZZ_SEED=N.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.property.rundir_mutants import MANY

pytestmark = [pytest.mark.computes, pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
RUNS = int(os.environ.get("RINGTAP_FUZZ_RUNS", "16"))
SEED = int(os.environ.get("RINGTAP_FUZZ_SEED", "1"))


@pytest.mark.timeout(0 if RUNS > 100 else 300)
def test_damaged_run_directories() -> None:
    """In a process of its own: a reader that takes too long is interrupted, and what it takes in all is measured."""
    command = [sys.executable, "-m", "tests.property.rundir_mutants", str(SEED), "0", str(RUNS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert not found["broken"], f"of seed {SEED}:\n" + "\n".join(found["broken"][:20])
    # mutants that are all refused would show nothing; of few mutants, a reader gets every other one
    for reader in ("analyze", "report", "live", "status", "merge", "table"):
        assert found["codes"].get(f"{reader} 0", 0) > RUNS // (16 if RUNS > MANY else 32)
