"""Files of the kernel that may be missing."""

import os
from pathlib import Path

import pytest

from ringtap.collectors.kernel_files import memory_groups, stat_of, text_of

pytestmark = pytest.mark.computes
NO_PID = 2**30


def test_what_cannot_be_read_is_empty(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b" 1 \xff\n")
    assert text_of(tmp_path / "file") == "1 \N{REPLACEMENT CHARACTER}"
    assert text_of(tmp_path / "none") == text_of(tmp_path) == ""
    assert stat_of(NO_PID) == []


def test_the_fields_of_a_process_begin_with_its_state() -> None:
    assert stat_of(os.getpid())[:2] == ["R", str(os.getppid())]


def test_files_of_memory_have_other_names_in_each_version(tmp_path: Path) -> None:
    root = tmp_path / "fs"
    (tmp_path / "cgroup").write_text("4:cpu,memory:/job\n3:cpuset:/job\n0::/slurm\n")
    assert memory_groups(tmp_path / "cgroup", root) == [
        (root / "cpu,memory" / "job", "memory.oom_control", "memory.limit_in_bytes"),
        (root / "cpu,memory", "memory.oom_control", "memory.limit_in_bytes"),
        (root / "slurm", "memory.events", "memory.max"),
        (root, "memory.events", "memory.max"),
    ]
    assert memory_groups(tmp_path / "none", root) == []
