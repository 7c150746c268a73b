"""iperf3's command lines, and its reports as real runs printed them (tests/gold/iperf3-*)."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from pathlib import Path

import pytest

from ringtap.core.errors import UsageError
from ringtap.trafficgen.iperf3 import client_argv, find_iperf3, report_error, server_argv

pytestmark = pytest.mark.shares

GOLD = Path(__file__).parents[2] / "gold"


def gold(name: str) -> str:
    return (GOLD / f"iperf3-3.12-{name}.json").read_text()


def test_a_whole_report_has_no_error() -> None:
    assert report_error(gold("whole")) == ""


def test_an_interrupted_client_and_a_refused_one_report_their_errors() -> None:
    assert "interrupt" in report_error(gold("interrupted"))
    assert "Connection refused" in report_error(gold("refused"))


@pytest.mark.parametrize("text", ["", "\n", "[]", "{}", "null", '{"end": []}', '{"start": 1, "end": {"sum_sent": 3}}'])
def test_anything_else_is_an_error_and_never_a_traceback(text: str) -> None:
    assert report_error(text)


def test_a_report_cut_anywhere_is_an_error() -> None:
    whole = gold("whole").rstrip()
    for length in range(0, len(whole), 97):
        assert report_error(whole[:length])


def test_the_load_is_split_over_the_streams() -> None:
    argv = client_argv("iperf3", "10.0.0.1", 5201, 50_000_000, 12.3, streams=2, bind="10.0.0.3", block_bytes=1000)
    assert argv[:3] == ["iperf3", "--client", "10.0.0.1"]
    assert argv[argv.index("--bitrate") + 1] == "25000000"
    assert argv[argv.index("--parallel") + 1] == "2"
    assert argv[argv.index("--time") + 1] == "13"
    assert argv[argv.index("--bind") + 1] == "10.0.0.3"
    assert argv[argv.index("--length") + 1] == "1000"


@pytest.mark.parametrize(
    ("load_bps", "duration_s", "streams"), [(0, 1, 2), (-5, 1, 2), (1e6, 0, 2), (1e6, 1e6, 2), (1e6, 1, 0)]
)
def test_what_iperf3_cannot_do_is_refused(load_bps: float, duration_s: float, streams: int) -> None:
    with pytest.raises(UsageError):
        client_argv("iperf3", "h", 5201, load_bps, duration_s, streams=streams, bind="c", block_bytes=1000)


def test_a_missing_iperf3_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="install iperf3"):
        find_iperf3()


@pytest.mark.alone(2)
def test_the_command_lines_work_on_loopback() -> None:
    try:
        program = find_iperf3()
    except UsageError as error:
        pytest.skip(str(error))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(server_argv(program, port, "127.0.0.1"), stdout=subprocess.DEVNULL)
    try:
        argv = client_argv(program, "127.0.0.1", port, 20_000_000, 1, streams=2, bind="127.0.0.1", block_bytes=12_500)
        for _ in range(50):
            done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
            error = report_error(done.stdout)
            if "refused" not in error:
                break
            time.sleep(0.05)
    finally:
        server.terminate()
        server.wait(10)
    assert error == ""
    assert json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"] == pytest.approx(20e6, rel=0.1)
