"""Links of a real DDP job on a testbed: the slowed one is named with its cost, none is faster than its interface."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.agents.testbed.start_testbed import RunningTestbed
from ringtap.agents.testbed.topology import TestbedSpec
from ringtap.core.ethernet import ETHERNET_MTU, payload_share
from tests.frameworks.ranks import quick

pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]
RINGTAP = [sys.executable, "-m", "ringtap.cli"]
SCALE_MODEL = str(Path(__file__).resolve().parents[2] / "examples" / "scale_model.py")
RATE_BPS, SLOW_BPS = 200_000_000, 120_000_000


@pytest.mark.alone(1)
@pytest.mark.needs_root("change the limit of a link")
def test_a_slowed_link_is_named_and_its_neighbours_are_not_faster_than_their_interfaces(tmp_path: Path) -> None:
    run, spec = tmp_path / "run", TestbedSpec("links", ("S0", "S1", "S2"), RATE_BPS)
    model = ["--parameters", "1383574", "--iterations", "30", "--compute-s", "0.1"]
    world = {"WORLD_SIZE": "3", "MASTER_ADDR": spec.training_ip("S0"), "MASTER_PORT": "29512"}
    jobs: list[subprocess.Popen[str]] = []
    with RunningTestbed(spec, verify=False) as testbed:
        limit = ["tbf", "rate", f"{SLOW_BPS}bit", "burst", "65500b", "latency", "13.4ms"]
        slow = testbed.command("S1", "tc", "qdisc", "change", "dev", "eth0", "root", *limit)
        subprocess.run(slow, check=True, capture_output=True, timeout=20)
        try:
            for rank, host in enumerate(spec.hosts):
                recorded = [*RINGTAP, "run", "--join", str(run), "--node", host, "--", sys.executable, SCALE_MODEL]
                one = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth0"}
                environment = os.environ | world | one | quick()
                with (tmp_path / f"{host}.txt").open("w") as output:
                    command = testbed.command(host, *recorded, *model)
                    jobs.append(subprocess.Popen(command, stdout=output, stderr=output, text=True, env=environment))
            for job in jobs:
                assert job.wait(120) == 0, [path.read_text()[-2000:] for path in tmp_path.glob("*.txt")]
        finally:
            for job in jobs:
                job.terminate()
                job.wait(20)
    done = subprocess.run([*RINGTAP, "analyze", str(run), "--json"], capture_output=True, check=True, timeout=120)
    data = json.loads(done.stdout)
    found, diagnosis = data["links"], data["diagnosis"]
    ring = {(row["source"], row["destination"]): row for row in found["rows"] if row["payload_bytes"] > 50_000_000}
    assert set(ring) == {("S0", "S2"), ("S2", "S1"), ("S1", "S0")}
    for (source, _), row in ring.items():
        rate_bps = SLOW_BPS if source == "S1" else RATE_BPS
        assert row["capacity_bps"] == pytest.approx(rate_bps * payload_share(ETHERNET_MTU), rel=1e-6)
        assert row["rate_bps"] <= row["capacity_bps"]
    # 98 % on an idle machine; the time in which it has data to send includes that in which a busy one does not take it
    assert ring["S1", "S0"]["rate_bps"] > 0.7 * ring["S1", "S0"]["capacity_bps"]
    assert found["rows"][found["slowest"]] == ring["S1", "S0"]
    assert found["stands_out"]
    # the bytes need 309 ms at the rate of the other interfaces, and 515 ms at this one's; a busy machine adds to both
    cause = diagnosis["causes"][0]
    assert (cause["name"], cause["node"], cause["nic"]) == ("slow link", "S1", "eth0")
    assert cause["seconds"] == pytest.approx(0.515 - 0.309, rel=0.1)
    assert sum(part["seconds"] for part in diagnosis["parts"]) == pytest.approx(diagnosis["iteration_s"])
