"""``ringtap traffic plan`` as typed: every kind, its files, its summary, and what is refused."""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ringtap.cli import main
from ringtap.core.flow_plan_file import PlanFile
from ringtap.core.units import counted
from ringtap.trafficgen.plans.sending_requirements import requirements
from ringtap.trafficgen.plans.size_distributions import WORKLOADS, read_cdf

pytestmark = [pytest.mark.computes, pytest.mark.long]

NODES = "--node 10.0.0.1:5001 --node 10.0.0.2:5001 --node 10.0.0.3:5001"
LINK = "--load 205mbit --duration 1003500us --to 127.0.0.1:5711 --to h:1 --seed 7"
KINDS = {
    "consistent": f"{LINK} --scale 100",
    "burst": f"{LINK} --scale 100 --from 10.0.0.8 --from 10.0.0.9",
    "long-lived": "--load 1gbit --duration 2s --to a:1 --flows 3",
    "on-off": f"{LINK} --on 3ms --off 7ms",
    "incast": "--load 1gbit --duration 100ms --to a:1 --flows 5",
    "all-to-all": f"--size 10kB --duration 100ms {NODES}",
    "ring": f"--bytes 10MB --compute 5ms --iterations 3 --duration 1s {NODES}",
}
# Committed: a change here breaks the repeatability of every published plan
DIGESTS = {
    "consistent": "16e7f5c70ddb16ce",
    "burst": "9f52be00c9380b73",
    "long-lived": "5a52ed17f57b5645",
    "on-off": "5cf24749d9b423c8",
    "incast": "286ab3715cae20b3",
    "all-to-all": "0cddeef0a5c3dcb6",
    "ring": "efc4e75c18582284",
}
SIZES_DIGESTS = {
    "data-mining": "22c394fdd12c160f",
    "facebook-hadoop": "a82d17293ae49bd0",
    "ali-storage-2019": "9e94615ffe221532",
    "fixed:100kB": "4cf426d5f7e9cf4b",
    "uniform:10kB:90kB": "521ab91d42b4e9e0",
    "lognormal:20kB:1.5": "b58a2387cf9879c7",
    "pareto:20kB:1.3": "88df98480823aa01",
}


def plan(kind: str, words: str) -> int:
    return main(["traffic", "plan", "--kind", kind, *shlex.split(words)])


def digest(path: Path) -> str:
    """Of the flows; the header's floats are for people."""
    return hashlib.sha256(path.read_bytes().split(b"\n", 1)[1]).hexdigest()[:16]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_seed_gives_the_same_file_for_ever(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.plan"
    assert plan(kind, f"{KINDS[kind]} -o {path}") == 0
    list(PlanFile(path).flows())
    assert digest(path) == DIGESTS[kind]


@pytest.mark.parametrize("sizes", sorted(SIZES_DIGESTS))
def test_a_seed_gives_the_same_sizes_for_ever(sizes: str, tmp_path: Path) -> None:
    path = tmp_path / "x.plan"
    assert plan("consistent", f"--load 100gbit --duration 100ms --to a:1 --sizes {sizes} -o {path}") == 0
    assert digest(path) == SIZES_DIGESTS[sizes]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_has_a_summary(kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert plan(kind, f"{KINDS[kind]} --summary --json -o {tmp_path / 'x.plan'}") == 0
    summary = json.loads(capsys.readouterr().out)
    assert {"flows", "bytes", "duration_s", "mean_size_bytes", "offered_bps"} == set(summary)
    needs = requirements(PlanFile(tmp_path / "x.plan"))
    assert (summary["flows"], summary["bytes"]) == (needs.flows, needs.bytes)
    if kind == "long-lived":
        assert summary["mean_size_bytes"] is None
        assert summary["offered_bps"] == pytest.approx(1e9, rel=1e-6)
    else:
        assert summary["mean_size_bytes"] * summary["flows"] == pytest.approx(needs.bytes)
        assert summary["offered_bps"] * summary["duration_s"] / 8 == pytest.approx(needs.bytes)
    assert plan(kind, f"{KINDS[kind]} --summary") == 0
    assert counted(needs.flows, "flow") in capsys.readouterr().out


def test_a_long_lived_plan_without_a_load_offers_what_the_network_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("long-lived", "--duration 1s --summary --json") == 0
    assert json.loads(capsys.readouterr().out)["offered_bps"] is None
    assert plan("long-lived", "--duration 1s --summary") == 0
    assert "as much as the network gives" in capsys.readouterr().out


def test_a_wire_load_is_stated(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("consistent", "--load 10gbit --load-counts wire --duration 1s --summary --json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["load_counts"] == "wire"
    assert summary["wire_bps"] == pytest.approx(10e9)
    assert summary["offered_bps"] == pytest.approx(10e9 * 1448 / 1538)
    assert plan("consistent", "--load 10gbit --load-counts wire --duration 1s --summary") == 0
    assert "10 Gbit/s on the wire" in capsys.readouterr().out


def test_files_for_other_generators_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cdf, flows = tmp_path / "x.cdf", tmp_path / "x.txt"
    words = f"--load 1gbit --duration 1s --sizes ali-storage-2019 --export-cdf {cdf} --export-hpcc {flows}"
    assert plan("consistent", words) == 0
    assert read_cdf(cdf).points == WORKLOADS["ali-storage-2019"].points
    assert "nodes: 0 unbound, 1 127.0.0.1:5001" in capsys.readouterr().out
    assert plan("list", f"--list {flows} --node 10.0.0.1:1 --node 10.0.0.2:1 --summary --json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["bytes"] == 125_000_000
    assert plan("consistent", words) == 2
    assert "--force" in capsys.readouterr().err
    assert plan("consistent", f"{words} --force --scale 10") == 0
    assert read_cdf(cdf).mean_bytes == pytest.approx(4_086.98)
    assert plan("incast", f"--size 9kB --duration 1s --export-cdf {tmp_path / 'y.cdf'}") == 0
    assert read_cdf(tmp_path / "y.cdf").points == ((9000, 0), (9000, 1))


def test_a_users_cdf_file_gives_the_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cdf = tmp_path / "mine.txt"
    cdf.write_text("0 0\n1000 50\n3000 100\n")
    assert plan("consistent", f"--load 1gbit --duration 1s --sizes file:{cdf} --summary --json") == 0
    assert json.loads(capsys.readouterr().out)["mean_size_bytes"] == pytest.approx(1250, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "words", "complaint"),
    [
        ("consistent", "--duration 1s --summary", "needs --load"),
        ("ring", f"{NODES} --duration 1s --bytes 1MB --summary", "needs --iterations"),
        ("ring", f"{NODES} --duration 1s --bytes 1MB --iterations 1 --load 1gbit --summary", "does not take --load"),
        ("consistent", f"{LINK} --burst-height 2 --summary", "does not take --burst-height"),
        ("incast", f"{LINK} --sizes web-search --summary", "does not take --sizes"),
        ("consistent", f"{LINK} --sizes websearch --summary", "unknown"),
        ("consistent", f"{LINK} --dscp 64 --summary", "--dscp 64"),
        ("consistent", LINK, "nothing to do"),
        ("consistent", "--load fast --duration 1s", "--load 'fast' is not understood"),
        ("consistent", "--load 1gbit --duration 1s -o x.plan", "--to"),
        ("consistent", f"{LINK} --duration x --summary", "--duration 'x'"),
        ("list", f"--list missing {NODES} --summary", "missing cannot be read"),
        ("replay", "--replay missing.pcap --to a:1 --summary", "missing.pcap"),
        ("long-lived", "--duration 1s --summary --export-cdf x.cdf", "no flows with a size"),
        ("ring", f"{KINDS['ring']} --export-hpcc x.txt", "kind ring"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    kind: str, words: str, complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert plan(kind, words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("ringtap: ")
    assert complaint in last
    assert list(tmp_path.iterdir()) == []


def test_many_flows_take_little_memory_to_write_and_to_read(tmp_path: Path) -> None:
    """A list of 250,000 flows would take 40 MB at least."""
    path = tmp_path / "x.plan"
    words = f"--kind consistent --load 2gbit --duration 1s --sizes fixed:1000 --to a:1 -o {path}"
    read = (
        "import sys, pathlib; from ringtap.core.flow_plan_file import PlanFile; "
        "from ringtap.trafficgen.plans.sending_requirements import requirements; "
        "p = PlanFile(pathlib.Path(sys.argv[1])); "
        "assert requirements(p).flows == 250_000; assert sum(1 for _ in p.flows()) == 250_000"
    )
    for arguments in (["-m", "ringtap.cli", "traffic", "plan", *words.split()], ["-c", read, str(path)]):
        code = (
            "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL); "
            "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
        )
        command = [sys.executable, "-c", code, sys.executable, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < 45 * 1024, arguments
