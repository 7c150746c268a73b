"""What needs no privilege of the packet collector: the tools' words, counts that wrap, the interface, the command."""

import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from ringtap.collectors import capture_program
from ringtap.collectors import packets as place
from ringtap.collectors.capture_program import Counts, Tool
from ringtap.collectors.collector_interface import Context
from ringtap.collectors.packets import PacketsCollector

pytestmark = pytest.mark.shares

WANTED = {"interface": "eth0", "snap_bytes": 128, "buffer_bytes": 64 << 20, "file_bytes": 0, "filter": ""}


SAY = """
import signal, sys, time
def say(text):
    sys.stderr.write(text)
    sys.stderr.flush()
"""


def script(tmp_path: Path, text: str) -> Tool:
    path = tmp_path / "pretender"
    # the kernel's first line has no room for a path with spaces: sh reads it, and Python a string
    path.write_text(f"#!/bin/sh\n'''exec' '{sys.executable}' \"$0\" \"$@\"\n' '''\n{SAY}{text}")
    path.chmod(0o755)
    return Tool([str(path)])


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, what runs at a low priority begins and ends late."""
    for name in ("_START_S", "END_S"):
        monkeypatch.setattr(f"ringtap.collectors.capture_program.{name}", 60.0)


@pytest.fixture
def tools() -> Iterator[list[Tool]]:
    made: list[Tool] = []
    yield made
    for tool in made:
        tool.kill()


# tcpdump 4.99's lines in its own pieces: the line of SIGUSR1 comes in several writes, the last words in lines
TALK = """
def counts(number, _):
    for piece in ("tcpdump: 4294967290 packets captured", ", ", "4294967295 packets received by filter", ", ",
                  "1 packet dropped by kernel", "\\n"):
        say(piece)
        time.sleep(0.02)
def end(number, _):
    say("3 packets captured\\n14 packets received by filter\\n")
    say("2 packets dropped by kernel\\n5 packets dropped by interface\\n")
    sys.exit(0)
signal.signal(signal.SIGUSR1, counts)
signal.signal(signal.SIGINT, end)
say("tcpdump: listening on eth0, link-type EN10MB (Ethernet), snapshot length 128 bytes\\n")
while True:
    time.sleep(1)
"""


def test_counts_are_read_in_pieces_and_go_on_beyond_32_bit(
    tmp_path: Path, tools: list[Tool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringtap.collectors.capture_program._ANSWER_S", 60.0)
    tool = script(tmp_path, TALK)
    tools.append(tool)
    tool.start()
    assert tool.ask()
    assert tool.counts == Counts(4294967290, 4294967295, 1, 0)
    tool.stop()
    assert tool.ended == "ended"
    assert tool.counts == Counts(2**32 + 3, 2**32 + 14, 2, 5)


def test_a_tool_that_has_written_or_dropped_all_that_it_received_has_settled(
    tmp_path: Path, tools: list[Tool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ringtap.collectors.capture_program._ANSWER_S", 60.0)
    tool = script(tmp_path, TALK.replace("4294967290 packets captured", "4294967294 packets captured"))
    tools.append(tool)
    tool.start()
    begin_s = time.monotonic()
    tool.settle(sees_twice=False, limit_s=60.0)
    assert time.monotonic() - begin_s < 60
    assert tool.counts == Counts(4294967294, 4294967295, 1, 0)


def test_a_tool_that_ends_by_itself_at_the_last_moment_has_its_last_counts(
    tmp_path: Path, tools: list[Tool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends when nobody waits any longer, and before it would be killed."""
    send = Tool.signal

    def late(tool: Tool, word: str) -> None:
        if word == "KILL" and not tool.ended:
            closed = select.poll()
            closed.register(tool._process.stderr, 0)  # type: ignore[arg-type]
            assert closed.poll(60_000)
            monkeypatch.setattr("ringtap.collectors.capture_program.END_S", 60.0)
        send(tool, word)

    tool = script(tmp_path, TALK.replace('    say("3 packets', '    time.sleep(1)\n    say("3 packets'))
    tools.append(tool)
    tool.start()
    monkeypatch.setattr(Tool, "signal", late)
    monkeypatch.setattr("ringtap.collectors.capture_program.END_S", 0.5)
    assert tool.stop()
    assert tool.ended == "ended"
    assert tool.counts == Counts(3, 14, 2, 5)


def test_a_tool_that_refuses_is_quoted(tmp_path: Path, tools: list[Tool]) -> None:
    tool = script(
        tmp_path, "say('tcpdump: eth0: You have no permission\\n(socket: Operation not permitted)\\n')\nsys.exit(1)"
    )
    tools.append(tool)
    with pytest.raises(OSError, match=r"no permission .socket: Operation not permitted") as caught:
        tool.start()
    assert caught.value.strerror.startswith("pretender did not start: ")  # type: ignore[union-attr]


def test_a_tool_that_does_not_answer_holds_nobody_up(tmp_path: Path, tools: list[Tool]) -> None:
    tool = script(tmp_path, "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\nsay('listening on x\\n')\ntime.sleep(60)")
    tools.append(tool)
    tool.start()
    begin_s = time.monotonic()
    assert not tool.ask()
    tool.settle(sees_twice=False)
    assert time.monotonic() - begin_s < 5


def test_a_tool_that_ignores_its_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringtap.collectors.capture_program.END_S", 0.5)
    tool = script(tmp_path, "signal.signal(signal.SIGINT, signal.SIG_IGN)\nsay('listening on x\\n')\ntime.sleep(60)")
    before = psutil.Process().children(recursive=True)  # of other tests
    tool.start()
    family = [child for child in psutil.Process().children(recursive=True) if child not in before]
    assert not tool.stop()
    assert family
    assert tool.ended.startswith("signal SIGKILL")
    assert not psutil.wait_procs(family, timeout=5)[1]


def test_a_tool_whose_shell_does_nothing_is_killed_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringtap.collectors.capture_program.END_S", 0.5)
    tool = script(tmp_path, "signal.signal(signal.SIGINT, signal.SIG_IGN)\nsay('listening on x\\n')\ntime.sleep(60)")
    tool.start()
    shell = psutil.Process(tool._process.pid)
    family = [shell, *shell.children(recursive=True)]
    assert len(family) == 2
    shell.suspend()
    assert not tool.stop()
    assert tool.ended.startswith("signal SIGKILL")
    assert not psutil.wait_procs(family, timeout=5)[1]


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "eth0-0.pcap"
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    ordinary = capture_program.command("/usr/bin/tcpdump", WANTED, file)
    assert ordinary == [
        *("/usr/bin/tcpdump", "-n", "-i", "eth0", "-s", "128", "-B", "65536"),
        *("--time-stamp-precision=nano", "-w", str(file)),
    ]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    rotated = capture_program.command(
        "/usr/bin/tcpdump", WANTED | {"file_bytes": 5_000_000, "filter": "tcp port 80"}, file
    )
    assert rotated == [*ordinary, "-Z", "root", "-C", "5", "tcp port 80"]


HEAD = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"


def test_interfaces_that_there_are() -> None:
    assert place.exists("lo")
    assert place.exists("any")
    assert not place.exists("no-such-nic")
    assert place.is_loopback("lo")


def test_the_default_interface(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    there = {name: psutil.net_if_stats()["lo"]._replace(flags="up", isup=True) for name in ("ib0", "eno1", "eno2")}
    there["lo"] = psutil.net_if_stats()["lo"]
    there["down0"] = there["eno1"]._replace(isup=False)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: there)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker,lo0")
    monkeypatch.setattr(place, "ROUTES", tmp_path / "route")
    monkeypatch.setattr(place, "ROUTES6", tmp_path / "ipv6_route")
    assert place.default_interface() == "eno1"  # no route known: the first that is up
    network = "eno2\t0002000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n"
    (tmp_path / "route").write_text(HEAD + network)
    zeros = "0" * 32
    rejected = f"{zeros} 00 {zeros} 00 {zeros} ffffffff 00000001 00000000 00200200       lo\n"
    (tmp_path / "ipv6_route").write_text(
        f"{rejected}{zeros} 00 {zeros} 00 fd{zeros[2:]} 00000400 2 0 00000003     ib0\n"
    )
    assert place.default_interface() == "ib0"
    (tmp_path / "route").write_text(HEAD + network + "eno2\t00000000\t0102000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n")
    assert place.default_interface() == "eno2"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "=ib0")
    assert place.default_interface() == "ib0"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0,eno1")
    assert place.default_interface() == "eno1"


def test_a_snap_length_without_headers_is_refused(tmp_path: Path) -> None:
    options = {"interface": "lo", "snap_bytes": "40"}
    check = PacketsCollector(Context(tmp_path, 1.0, options=options)).check()
    assert check.state == "unavailable"
    assert check.remedy


def test_to_stop_what_never_started_is_nothing(tmp_path: Path) -> None:
    assert PacketsCollector(Context(tmp_path, 1.0)).stop() == {}
    assert not any(tmp_path.iterdir())
