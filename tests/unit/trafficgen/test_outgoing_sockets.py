"""Socket options of the sender: asked for in the plan or on the command line, in force, recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from ringtap.core.append_only_logs import open_records
from tests.unit.traffic_processes import MS, by_flow, plan_for, plan_of_kind, send, serving, traffic

pytestmark = pytest.mark.shares

ASKED = {"congestion_control": "reno", "dscp": 10, "send_buffer": 100_000, "pacing": 80_000_000}


@pytest.mark.parametrize("mode", ["kept", "new"])
def test_what_the_plan_asks_for_is_in_force_and_recorded(mode: str, tmp_path: Path) -> None:
    with serving() as serve:
        given = {"duration": 100 * MS, "flows": 1, "to": [serve.address], **ASKED}
        plan = plan_of_kind(tmp_path / "p.plan", "long-lived", **given)
        summary, _ = send(plan, "--log", tmp_path / "s.rec", "--connections", mode)
    in_force = summary["transport"]
    assert in_force == open_records(tmp_path / "s.rec").about["transport"]
    assert in_force["congestion_control"] == "reno"
    assert in_force["dscp"] == 10
    assert in_force["send_buffer_bytes"] == 200_000  # the kernel doubles it for its own book-keeping
    assert in_force["pacing_bps"] == 80e6
    assert in_force["interface"] is None


def test_an_option_has_precedence_over_the_plan(tmp_path: Path) -> None:
    with serving() as serve:
        plan = plan_of_kind(tmp_path / "p.plan", "long-lived", duration=50 * MS, flows=1, to=[serve.address], **ASKED)
        options = ("--dscp", 0, "--pacing", "40mbit", "--send-buffer", "50kB")
        in_force = send(plan, *options)[0]["transport"]
    assert (in_force["dscp"], in_force["pacing_bps"], in_force["send_buffer_bytes"]) == (0, 40e6, 100_000)
    assert in_force["congestion_control"] == "reno"


def test_an_interface_is_kept_to(tmp_path: Path) -> None:
    with serving() as serve:
        summary, _ = send(plan_for(tmp_path, serve.address, seconds=0.05), "--interface", "lo")
    assert summary["transport"]["interface"] == "lo"
    assert summary["finished"] == summary["flows"]


@pytest.mark.alone(2)
@pytest.mark.parametrize("mode", ["kept", "new"])
def test_a_paced_flow_has_the_rate_asked_for(mode: str, tmp_path: Path) -> None:
    """50 Mbit/s for 1 s, to 10 %, without the first ten segments, of 32 kB over loopback: they go before it paces."""
    with serving() as serve:
        plan = plan_of_kind(tmp_path / "p.plan", "long-lived", duration=1000 * MS, flows=1, to=[serve.address])
        options = ("--pacing", "50mbit", "--send-buffer", "100kB", "--connections", mode)
        summary, _ = send(plan, "--log", tmp_path / "s.rec", *options)
        received = serve.end()
    (row,) = by_flow(tmp_path / "s.rec")
    assert summary["finished"] == 1
    assert received["bytes"] == row["sent_bytes"]
    paced_bits = (received["bytes"] - 10 * 32_768) * 8
    assert paced_bits * 1e9 / (row["received_ns"] - row["start_ns"]) == pytest.approx(50e6, rel=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--congestion-control", "nosuch"), "congestion control 'nosuch'"),
        (("--dscp", 64), "--dscp 64 is not usable: it must be from 0 to 63"),
        (("--dscp", -1), "--dscp -1"),
        (("--send-buffer", "5GB"), "--send-buffer"),
        (("--send-buffer", "0B"), "--send-buffer"),
        (("--pacing", "1e30bit"), "--pacing"),
        (("--pacing", "0bit"), "--pacing"),
        (("--interface", "nosuch0"), "interface 'nosuch0'"),
        (("--patience", "1e300s"), "--patience"),
        (("--duration", "1e308s"), "--duration"),
        (("--duration", "0s"), "--duration"),
        (("--workers", 0), "--workers"),
        (("--threads", 0), "--threads"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(
    options: tuple[object, ...], words: str, tmp_path: Path
) -> None:
    _, complaint = send(plan_for(tmp_path, "127.0.0.1:9", seconds=0.05), *options, expect=2)
    assert words in complaint
    assert complaint.startswith("ringtap: ")


def test_what_cannot_be_is_refused_in_a_plan_too(tmp_path: Path) -> None:
    given = {"duration": 50 * MS, "flows": 1, "to": ["127.0.0.1:9"], "congestion_control": "nosuch"}
    done = traffic("send", plan_of_kind(tmp_path / "p.plan", "long-lived", **given), expect=2)
    assert "congestion control 'nosuch'" in done.stderr.splitlines()[-1]
