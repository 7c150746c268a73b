"""The virtual testbed on the real kernel: rates, isolation, clean-up, with and without privilege."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ringtap.agents.testbed import registry
from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.core.errors import UsageError
from tests.testbed.test_doctor_plan import in_testbed
from tests.unit.agent_processes import ended, wait_for

pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]
RINGTAP = [sys.executable, "-m", "ringtap.cli"]
HOSTS = ("S0", "S1", "S2", "S3")
# what an ordinary user lacks; CAP_SETFCAP stays, which root needs to map itself into a user namespace
UNPRIVILEGED = [
    "setpriv",
    "--inh-caps=-all",
    "--bounding-set=-sys_admin,-net_admin,-net_raw,-sys_ptrace,-dac_override,-sys_chroot",
]


def ringtap(*arguments: str, prefix: list[str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(prefix or []), *RINGTAP, *arguments], capture_output=True, text=True, check=False, timeout=120
    )


def spec(name: str, **changes: object) -> TestbedSpec:
    settings: dict[str, object] = {"name": name, "hosts": HOSTS, "rate_bps": 100_000_000} | changes
    return TestbedSpec(**settings)  # type: ignore[arg-type]


@pytest.mark.alone(1)
def test_every_link_gives_its_rate_in_both_directions() -> None:
    """Within 5 %: a token bucket loses what it may not keep while a busy machine does not serve its timer."""
    with RunningTestbed(spec("rates")) as lab:
        links = lab.state.links
    assert [(link["host"], link["direction"]) for link in links] == [
        (host, way) for host in HOSTS for way in ("down", "up")
    ]
    for link in links:
        assert link["measured_bps"] == pytest.approx(100e6, rel=0.05), link
        assert link["congestion_control"] == "cubic"


def test_commands_pass_through() -> None:
    with RunningTestbed(spec("through"), verify=False):
        script = "read line; echo got $line on $(hostname); echo oops >&2; pwd; getent hosts S1 S1-cross; exit 7"
        done = subprocess.run(
            [*RINGTAP, "testbed", "exec", "--testbed", "through", "S0", "--", "sh", "-c", script],
            input="hello\n",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 7
        lines = done.stdout.splitlines()
        assert lines[:2] == ["got hello on S0", str(Path.cwd())]
        assert [line.split()[0] for line in lines[2:]] == ["10.77.0.2", "10.78.0.2"]
        assert done.stderr == "oops\n"
        assert ringtap("testbed", "exec", "--testbed", "through", "S9", "--", "true").returncode == 2
        assert ringtap("testbed", "exec", "--testbed", "through", "S0").returncode == 2
        assert ringtap("testbed", "exec", "--testbed", "through", "S0", "--", "no-such-program").returncode == 127


def test_a_signal_reaches_the_command_and_its_end_comes_back() -> None:
    with RunningTestbed(spec("signals"), verify=False):
        script = (
            "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(9)); "
            "print('up', flush=True); time.sleep(60)"
        )
        command = [*RINGTAP, "testbed", "exec", "--testbed", "signals", "S0", "--", sys.executable, "-c", script]
        with ended(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.terminate()
            assert process.wait(10) == 9


def test_two_testbeds_stand_at_once_and_know_nothing_of_each_other() -> None:
    with RunningTestbed(spec("one"), verify=False), RunningTestbed(spec("two", rate_bps=50_000_000), verify=False):
        for name in ("one", "two"):
            command = [*RINGTAP, "testbed", "exec", "--testbed", name, "S0", "--", "tc", "qdisc", "show", "dev", "eth0"]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            assert {"one": "rate 100Mbit", "two": "rate 50Mbit"}[name] in shown
        assert ringtap("testbed", "exec", "S0", "--", "true").returncode == 2  # which one?
        listed = json.loads(ringtap("testbed", "status", "--json").stdout)
        assert {lab["name"] for lab in listed if lab["standing"]} >= {"one", "two"}
        with pytest.raises(UsageError, match="is up already"):
            RunningTestbed(spec("one"), verify=False)


def test_what_was_asked_is_what_is_built() -> None:
    """MTU, queue, congestion control, offload and port range, read back from the kernel."""
    wanted = spec(
        "asked", hosts=("a", "b"), mtu=1400, queue_bytes=123_000, congestion_control="reno", offload_segments=1
    )
    with RunningTestbed(wanted, verify=False):
        script = "ip -d link show eth0; ip route; cat /proc/sys/net/ipv4/ip_local_port_range; tc -r qdisc show dev eth0"
        shown = ringtap("testbed", "exec", "--testbed", "asked", "b", "--", "sh", "-c", script).stdout
    for words in ("mtu 1400", "congctl reno", "gso_max_segs 1 ", "10000\t65000"):
        assert words in shown
    assert "lat" in shown or "limit 123000b" in shown


def test_a_congestion_control_the_kernel_lacks_is_named() -> None:
    with pytest.raises(UsageError, match="no congestion control 'warp'"):
        RunningTestbed(spec("warp", congestion_control="warp"), verify=False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--hosts", "1"],
        ["--hosts", "a,a"],
        ["--hosts", "a,switch"],
        ["--hosts", "a,b c"],
        ["--capacity", "fast"],
        ["--capacity", "1bit"],
        ["--queue", "10B"],
        ["--mtu", "20"],
        ["--offload-segments", "0"],
        ["--name", "../x"],
    ],
)
def test_a_testbed_that_cannot_be_is_refused_in_one_sentence(arguments: list[str]) -> None:
    done = ringtap("testbed", "up", *arguments)
    assert done.returncode == 2
    assert len([line for line in done.stderr.splitlines() if line.startswith("ringtap:")]) == 1
    assert "Traceback" not in done.stderr


def test_up_and_down_from_the_command_line() -> None:
    up = ringtap("testbed", "up", "--name", "cli", "--capacity", "100mbit", "--hosts", "2", "--json")
    try:
        assert up.returncode == 0, up.stderr
        lab = json.loads(up.stdout)
        assert lab["standing"]
        assert [host["host"] for host in lab["hosts"]] == ["S0", "S1"]
    finally:
        down = ringtap("testbed", "down", "cli")
    assert (down.returncode, down.stdout) == (0, "cli: removed\n")
    assert ringtap("testbed", "down", "cli").returncode == 2


def test_without_privilege_it_works_in_a_user_namespace() -> None:
    up = ringtap("testbed", "up", "--name", "rootless", "--capacity", "100mbit", prefix=UNPRIVILEGED)
    try:
        assert up.returncode == 0, up.stderr
        refused = subprocess.run([*UNPRIVILEGED, "ip", "link", "add", "type", "veth"], capture_output=True, check=False)
        assert refused.returncode != 0, "the test itself must run without privilege"
        who = ringtap(
            "testbed", "exec", "--testbed", "rootless", "S1", "--", "ip", "-brief", "addr", prefix=UNPRIVILEGED
        )
        assert "10.77.0.2" in who.stdout
    finally:
        down = ringtap("testbed", "down", "rootless", prefix=UNPRIVILEGED)
    assert down.returncode == 0


@pytest.mark.needs_root("give up what namespaces take")
def test_where_namespaces_are_refused_one_sentence_says_what_to_ask_for() -> None:
    nothing = ["setpriv", "--inh-caps=-all", "--bounding-set=-all"]
    done = ringtap("testbed", "up", "--name", "none", prefix=nothing)
    assert done.returncode == 2
    assert "user namespaces" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_killed_maker_takes_its_testbed_along_and_its_record_is_cleared() -> None:
    code = (
        "import subprocess, sys, time\n"
        "from ringtap.agents.testbed.start_testbed import RunningTestbed\n"
        "from ringtap.agents.testbed.topology import TestbedSpec\n"
        "lab = RunningTestbed(TestbedSpec('orphan', ('a', 'b'), 100_000_000), verify=False)\n"
        "enter = [sys.executable, '-m', 'ringtap.agents.testbed.run_on_host', 'orphan', 'a', 'sleep', '1000']\n"
        "entered = [subprocess.Popen(enter, start_new_session=True) for _ in range(2)]\n"
        "time.sleep(1)\nentered[0].kill()\nprint(lab.state.pid, flush=True)\ntime.sleep(1000)\n"
    )
    with ended(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        keeper = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while registry.start_ticks(keeper) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert registry.start_ticks(keeper) is None
    (orphan,) = [lab for lab in registry.all_testbeds() if lab.spec.name == "orphan"]
    assert not registry.remove(orphan)  # it was gone
    assert "orphan" not in {lab.spec.name for lab in registry.all_testbeds()}
    wait_for(lambda: not in_testbed("orphan"))  # the entering process outside sees its command's end


def test_removing_never_ends_a_process_that_took_a_dead_keepers_pid() -> None:
    with RunningTestbed(spec("mine"), verify=False) as lab:
        stranger = subprocess.Popen(["sleep", "60"])
        forged = registry.TestbedState(spec("forged"), stranger.pid, lab.state.start_ticks, 0, [])
        forged.save()
        try:
            assert not registry.remove(forged)
            assert stranger.poll() is None
        finally:
            stranger.kill()
            stranger.wait()
            forged.path.unlink(missing_ok=True)


def test_a_standing_testbed_outlives_its_maker_and_goes_down() -> None:
    assert ringtap("testbed", "up", "--name", "stays", "--capacity", "100mbit", "--hosts", "2").returncode == 0
    command = [*RINGTAP, "testbed", "exec", "--testbed", "stays", "S0", "--", "sleep", "1000"]
    with ended(subprocess.Popen(command)) as inside:
        wait_for(lambda: ["sleep", "1000"] in [one.cmdline() for one in psutil.Process(inside.pid).children()])
        assert "stays: removed" in ringtap("testbed", "down", "stays").stdout
        assert inside.wait(10) == 128 + signal.SIGKILL


def test_a_host_that_cannot_be_reached_is_named() -> None:
    tool = shutil.which("ip", path=os.environ["PATH"] + ":/usr/sbin:/sbin")
    assert tool
    with RunningTestbed(spec("cut"), verify=False):
        cut = ringtap("testbed", "exec", "--testbed", "cut", "switch", "--", tool, "link", "set", "to-S2", "down")
        assert cut.returncode == 0
        code = (
            "from ringtap.agents.testbed import build\nfrom ringtap.agents.testbed.topology import TestbedSpec\n"
            "from ringtap.core.errors import MeasurementError\n"
            "try:\n    build.measure_links(TestbedSpec('cut', ('S0', 'S1', 'S2', 'S3'), 100_000_000))\n"
            "except MeasurementError as error:\n    print(error)\n"
        )
        said = ringtap("testbed", "exec", "--testbed", "cut", "switch", "--", sys.executable, "-c", code).stdout
    assert "S2 cannot be reached from S1" in said
