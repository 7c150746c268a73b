"""Why jobs ended: with evidence of the kernel's counters and of $PATH, or as one possible cause."""

from pathlib import Path

import pytest

from ringtap.agents.job.exit_cause import ExitCause, MemoryKills

pytestmark = pytest.mark.shares


class Kernel:
    """Files of the kernel about control groups and memory."""

    def __init__(self, folder: Path, version: int) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        top = self.cgroups if version == 2 else self.cgroups / "memory"
        self.group = top / "job" / "step"
        self._events = "memory.events" if version == 2 else "memory.oom_control"
        self.group.mkdir(parents=True)
        (self.proc / "self").mkdir(parents=True)
        lines = "0::/job/step\n" if version == 2 else "9:cpu,cpuacct:/other\n4:memory:/job/step\n"
        (self.proc / "self" / "cgroup").write_text(lines)
        limit = "memory.max" if version == 2 else "memory.limit_in_bytes"
        (self.group / limit).write_text("600000000\n")
        (self.group.parent / limit).write_text("max\n" if version == 2 else "9223372036854771712\n")
        self.kills(3, 3, 3)

    def kills(self, step: int, job: int, machine: int) -> None:
        """Set the counters of the group, of the one above, and of the machine."""
        for folder, count in ((self.group, step), (self.group.parent, job)):
            (folder / self._events).write_text(f"low 0\noom 9\noom_kill {count}\n")
        (self.proc / "vmstat").write_text(f"nr_free_pages 1\noom_kill {machine}\n")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((3, 3, 3), "out of memory is one possible cause"),
        (
            (4, 4, 4),
            "the kernel killed 1 process of its control group, which may use 600 MB, because memory ran out",
        ),
        ((3, 5, 5), "the kernel killed 2 processes of its control group because memory ran out"),
        ((3, 3, 4), "while it ran, the kernel killed 1 process on this machine because memory ran out"),
    ],
)
def test_a_killed_job(tmp_path: Path, version: int, counts: tuple[int, int, int], words: str) -> None:
    kernel = Kernel(tmp_path, version)
    cause = ExitCause(["true"], {}, MemoryKills(kernel.proc, kernel.cgroups))
    kernel.kills(*counts)
    assert cause.words(-9) == cause.words(137) == words
    assert cause.words(-15) == cause.words(1) == cause.words(0) == ""


def test_without_the_kernels_files_nothing_is_claimed(tmp_path: Path) -> None:
    assert MemoryKills(tmp_path, tmp_path).words() == ""


def test_a_command_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("1\n")
    kills, path = MemoryKills(tmp_path, tmp_path), {"PATH": str(tmp_path)}
    assert ExitCause(["no\nne"], path, kills).words(127) == "no\\nne was not found"
    assert ExitCause(["train.py"], path, kills).words(126) == "train.py is not executable (chmod +x)"
    (tmp_path / "train.py").chmod(0o755)
    text = "train.py is neither a program nor a script that begins with #!"
    assert ExitCause(["train.py"], path, kills).obstacle(126) == text
    (tmp_path / "train.py").write_text("#!/bin/sh\n")
    for code in (126, 127):  # of a shell that the command ran
        cause = ExitCause(["train.py"], path, kills)
        assert cause.words(code) == "a shell's exit code for a command that it cannot run"
        assert not cause.obstacle(code)
