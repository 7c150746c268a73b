"""A plan sent over loopback, captured with tcpdump, and verified: everything as in docs/commands/traffic-verify.md."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from tests.testbed.test_counters import wire_bytes
from tests.unit.traffic_processes import wait_until

pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]
RINGTAP = [sys.executable, "-m", "ringtap.cli", "traffic"]


@contextlib.contextmanager
def running(command: list[str], ready: str) -> Iterator[str]:
    """A program until it is told to end; yields its line that says it is ready."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        while line and ready not in line:
            line = process.stderr.readline()
        assert line, f"{command} did not start"
        yield line
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)


def ringtap(*arguments: str, code: int = 0) -> str:
    done = subprocess.run([*RINGTAP, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.mark.needs_root("capture packets of lo")
@pytest.mark.alone(2)
def test_what_is_sent_and_captured_is_what_was_planned(tmp_path: Path) -> None:
    serve = [*RINGTAP, "serve", "--bind", "127.0.0.1:0"]
    logs, captures = {}, {}
    with running(serve, "listening on") as line:
        to = line.split()[-1]
        for kind in ("burst", "consistent"):
            plan, logs[kind], captures[kind] = (str(tmp_path / f"{kind}.{end}") for end in ("plan", "rec", "pcap"))
            shape = ["--kind", kind, "--load", "60mbit", "--duration", "2s", "--scale", "100", "--to", to]
            ringtap("plan", *shape, "-o", plan)
            dump = ["tcpdump", "-i", "lo", "-s", "128", "-B", "16384", "-U", "--immediate-mode", "-w", captures[kind]]
            with running([*dump, "tcp", "port", to.rpartition(":")[2]], "listening on"):
                ringtap("send", plan, "--log", logs[kind])
                planned = json.loads(Path(plan).read_text().splitlines()[0])["bytes"]
                wait_until(lambda at=Path(captures[kind]), least=planned: wire_bytes(at, 1448)[1] >= least, 30)
    plan, out = str(tmp_path / "burst.plan"), tmp_path / "out"
    given = [plan, "--sent", logs["burst"], "--capture", captures["burst"], "--compare", captures["consistent"]]
    data = json.loads(ringtap("verify", *given, "--baseline", logs["consistent"], "-o", str(out), "--json"))
    total = json.loads(Path(plan).read_text().splitlines()[0])["bytes"]
    assert data["as_planned"] is True
    assert data["bytes"] == {"planned": total, "sent": total, "received": total}
    assert data["load"]["whole"]["capture_error"] == pytest.approx(0, abs=0.05)  # hellos, what was sent twice
    assert abs(data["clock_offset_us"]) < 1000
    windows = pd.read_csv(out / "windows.csv")
    assert data["bursts"]["burst"]["windows"] == data["bursts"]["quiet"]["windows"] == 200
    in_bursts = windows[windows["part"] == "burst"]
    # Evenly spread it would be a tenth. On a machine with three times as much to do as it has cores it was 0.17.
    assert in_bursts["wire_bytes"].sum() > 0.13 * total
    assert windows["wire_bytes"].sum() == pytest.approx(total, rel=0.05)
    assert data["completion"][0]["congestion_impact_mean"] > 0
    assert (out / "rates.png").stat().st_size > 10_000


def test_another_plan_than_the_one_sent_is_noticed(tmp_path: Path) -> None:
    sent, other, log = (str(tmp_path / name) for name in ("sent.plan", "other.plan", "sent.rec"))
    with running([*RINGTAP, "serve", "--bind", "127.0.0.1:0"], "listening on") as line:
        shape = [
            "--kind",
            "consistent",
            "--load",
            "20mbit",
            "--duration",
            "500ms",
            "--scale",
            "100",
            "--to",
            line.split()[-1],
        ]
        ringtap("plan", *shape, "-o", sent)
        ringtap("plan", *shape, "--seed", "2", "-o", other)
        ringtap("send", sent, "--log", log)
    ringtap("verify", sent, "--sent", log)
    done = subprocess.run([*RINGTAP, "verify", other, "--sent", log], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "of another size than planned" in done.stderr
    assert "the header of" in done.stdout
