"""Sweeps over ssh that are not alone: other sweeps on the same servers, other people's traffic, a link that is cut."""

import signal
from collections.abc import Iterator
from getpass import getuser
from pathlib import Path

import pytest

from ringtap.agents.lab.up import Lab
from tests.testbed.sshd import SshServers
from tests.testbed.sweeps import one_sentence, status, wait_for
from tests.testbed.test_ssh_sweep import SPEC, Desk

pytestmark = pytest.mark.usefixtures("unchanged_machine")
SHORT = {"loads = [0, 0.7]": "loads = [0]", 'min_time = "2500ms"': 'min_time = "500ms"'}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("desk")
    with Lab(SPEC, verify=False), SshServers(folder / "servers", SPEC) as servers:
        yield Desk(folder, servers)


def test_two_sweeps_at_once_are_refused_and_a_killed_ones_hosts_are_free(desk: Desk, tmp_path: Path) -> None:
    plan, out = desk.plan("endless", {'min_time = "2500ms"': 'min_time = "90s"', '"10s"': '"90s"'}), tmp_path / "first"
    first = desk.start("sweep", plan, "-o", out)
    try:
        wait_for((out / "run.json").exists, first)
        second = desk.run("sweep", plan, "-o", tmp_path / "second")
        assert second.returncode == 2
        words = one_sentence(second.stderr)
        assert f"S0, S1, S2, S3 in use by {getuser()}'s sweep, process {first.pid} on " in words
        assert ", since 2" in words
        assert ", expected to end at 2" in words
        assert not (tmp_path / "second").exists()
        again = desk.run("sweep", plan, "-o", out, "--resume")
        assert again.returncode == 2
        assert f"{out} is being measured by {getuser()}'s sweep, process {first.pid} on " in one_sentence(again.stderr)
        assert status(out) == ("running", "")
        assert first.poll() is None
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    done = desk.run("sweep", desk.plan("short", SHORT), "-o", tmp_path / "third")
    assert done.returncode == 0, done.stderr
