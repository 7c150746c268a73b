"""The lock of a run directory: one sweep at a time measures into it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.agents.lease import LOCK_FILE, holder, locked
from ringtap.errors import UsageError

HOLD = """
import sys, time
from pathlib import Path
from ringtap.agents.lease import holder, locked
with locked(Path(sys.argv[1]), holder(Path(sys.argv[1]), 60.0), print):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_sweep_is_told_who_measures_there(tmp_path: Path) -> None:
    me = holder(tmp_path, 90.0)
    with locked(tmp_path, me, print):
        with pytest.raises(UsageError) as refusal, locked(tmp_path, holder(tmp_path, 1.0), print):
            raise AssertionError("both have it")
        words = str(refusal.value)
        assert f"{tmp_path} is being measured by {me['user']}'s sweep, process {os.getpid()} on {me['host']}" in words
        assert ", since 2" in words
        assert ", expected to end at 2" in words
        assert words.count("UTC") == 2
    assert not (tmp_path / LOCK_FILE).exists()
    with locked(tmp_path, me, print):
        pass


def test_the_lock_ends_with_its_holder_however_that_ends(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"process {process.pid} on "), locked(tmp_path, {}, print):
            raise AssertionError("both have it")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (tmp_path / LOCK_FILE).exists()
    with locked(tmp_path, {}, print):
        pass
    assert not (tmp_path / LOCK_FILE).exists()


def test_what_a_lock_file_says_reaches_the_terminal_as_plain_text(tmp_path: Path) -> None:
    with locked(tmp_path, {"user": "\x1b[2Jeve", "pid": [1], "since_s": 1e300, "until_s": None}, print):
        with pytest.raises(UsageError) as refusal, locked(tmp_path, {}, print):
            raise AssertionError("both have it")
        assert "by [2Jeve's sweep, process [1] on None: wait" in str(refusal.value)
