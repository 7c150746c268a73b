"""``ringtap traffic calibrate``, and what ``send`` makes of its figures."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ringtap.core.errors import MeasurementError
from ringtap.core.flow_plan_format import Flow
from ringtap.trafficgen import calibrate_host_limits
from ringtap.trafficgen.calibrate_host_limits import CLEARLY, Calibration, save, this_host
from tests.unit.traffic_processes import MS, plan_of, serving, traffic

pytestmark = pytest.mark.shares

TINY = Calibration(this_host(), 1.0, "sendfile", 1e6, {"sendfile": 1e6}, 1e9, 1e9, 30_000, *(1.0,) * 6)


@pytest.mark.alone(2)
def test_calibrate_measures_this_host_and_keeps_it(tmp_path: Path) -> None:
    began = time.monotonic()
    done = traffic("calibrate", "--json", env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)}, timeout_s=60)
    # It says 10 s; the rest is for a host with other work
    assert time.monotonic() - began < 20
    found = json.loads(done.stdout)
    (path,) = (tmp_path / "ringtap").iterdir()
    assert path.name == f"calibration-{os.uname().nodename}.json"
    assert json.loads(path.read_text()) == {"version": 1, **found}
    assert set(found) == set(asdict(TINY))
    assert found["host"] == this_host()
    assert found["measured_unix_s"] == pytest.approx(time.time(), abs=60)
    assert set(found["methods_bps"]) == {"send", "sendfile"}
    assert found["ceiling_bps"] == found["methods_bps"][found["method"]]
    clearly = found["methods_bps"]["sendfile"] > CLEARLY * found["methods_bps"]["send"]
    assert found["method"] == ("sendfile" if clearly else "send")
    # A processor of this century moves 0.1 to 1000 Gbit/s of memory and starts 100 to a million flows a second
    assert all(1e8 < rate < 1e12 for rate in found["methods_bps"].values())
    assert 100 < found["new_flows_per_s"] < 1e6
    assert 100 < found["kept_flows_per_s"] < 1e6
    assert 50_000 <= found["spin_ns"] <= 200_000
    for name in ("sleep", "lateness", "lateness_busy"):
        assert 0 < found[f"{name}_p50_us"] <= found[f"{name}_p99_us"] < 1e6


def sent_with(calibration: Calibration | str, folder: Path, *options: object) -> tuple[str, str]:
    """Settings and the remaining words on stderr of a plan of 100 flows a second of 10 kB, which is 8 Mbit/s."""
    path = folder / "ringtap" / f"calibration-{os.uname().nodename}.json"
    if isinstance(calibration, str):
        path.parent.mkdir()
        path.write_text(calibration)
    else:
        save(calibration, path)
    with serving() as serve:
        flows = [Flow(10 * number * MS, "", serve.address, 10_000) for number in range(10)]
        plan = plan_of(folder / "p.plan", flows, 100 * MS)
        done = traffic("send", plan, "--json", "--verbose", *options, env=os.environ | {"XDG_CACHE_HOME": str(folder)})
    assert json.loads(done.stdout)["finished"] == 10
    settings, _, words = done.stderr.partition("\n")
    return settings, words


def test_a_plan_beyond_the_ceiling_is_warned_of(tmp_path: Path) -> None:
    settings, words = sent_with(TINY, tmp_path)
    assert words == ("warning: 8 Mbit/s is above this host's ceiling of 1 Mbit/s, as calibrated; flows will be late\n")
    assert f"spin_ns={TINY.spin_for(own_processor=False)} " in settings
    assert "method=sendfile" in settings


@pytest.mark.parametrize(
    ("mode", "kept", "new", "warned"), [("kept", 50, 1e9, True), ("new", 50, 1e9, False), ("new", 1e9, 50, True)]
)
def test_more_flows_a_second_than_the_ceiling_are_warned_of(
    mode: str, kept: float, new: float, warned: bool, tmp_path: Path
) -> None:
    calibration = replace(TINY, ceiling_bps=1e9, kept_flows_per_s=kept, new_flows_per_s=new)
    _, words = sent_with(calibration, tmp_path, "--connections", mode)
    expected = "warning: 100 flows a second are above this host's ceiling of 50, as calibrated; flows will be late\n"
    assert words == (expected if warned else "")


@pytest.mark.parametrize(
    "calibration",
    [
        replace(TINY, host={**this_host(), "kernel": "2.6.32"}),
        replace(TINY, host={**this_host(), "processors": 1000}),
        "",
        "[]",
        "{}",
        json.dumps({"version": 1, "host": this_host(), "spin_ns": 1}),
        json.dumps({"version": 2, **asdict(TINY)}),
    ],
    ids=["kernel", "processors", "empty", "list", "object", "part", "version"],
)
def test_what_is_no_calibration_of_this_host_is_passed_over(calibration: Calibration | str, tmp_path: Path) -> None:
    settings, words = sent_with(calibration, tmp_path)
    assert words == ""
    assert "spin_ns=50000" in settings


def test_a_process_that_does_not_answer_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_host_limits, "_PATIENCE_S", 0.0)
    with pytest.raises(MeasurementError, match="calibration: the receiver did not answer within 0 s"):
        calibrate_host_limits.calibrate()
