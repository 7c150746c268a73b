"""One sweep at a time: the lock of its run directory, and the leases of its hosts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.agents.sweep.sweep_lock import LOCK_FILE, holder, lease_problem, locked
from ringtap.core.errors import UsageError

pytestmark = pytest.mark.shares

HOLD = """
import sys, time
from pathlib import Path
from ringtap.agents.sweep.sweep_lock import holder, locked
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


LEASED = """
import json, threading, time
from ringtap.agents.testbed import namespaces
namespaces.isolate(namespaces.NEWNET)
from ringtap.agents.sweep.host_facts import host_facts
from ringtap.agents.hosts.link_lease import Lease
found, lease = [host_facts()["lease"]], Lease()
lease.take({"id": "1", "user": "eve", "pid": 7, "host": "desk"})
asking = threading.Thread(target=lambda: found.append(host_facts()["lease"]))
asking.start()
while asking.is_alive():
    lease.answer()
    time.sleep(0.01)
print(json.dumps(found))
"""


def test_a_host_says_whose_sweep_measures_on_it_without_being_taken() -> None:
    done = subprocess.run([sys.executable, "-c", LEASED], capture_output=True, text=True, check=False)
    if "may make no network namespaces" in done.stderr:
        pytest.skip("this user may make no network namespaces here")
    free, taken = json.loads(done.stdout)
    assert free == {}
    assert lease_problem({"a": free, "b": {}}) == ""
    words = lease_problem({"a": free, "b": taken, "c": taken})
    assert words.startswith("another sweep measures on these hosts (b, c in use by eve's sweep, process 7 on desk)")
