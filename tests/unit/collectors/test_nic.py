"""Interface counters on a written-down /proc/net/dev whose interfaces come and go."""

import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.collectors.collector_interface import Context
from ringtap.collectors.nic import NicCollector
from ringtap.core.append_only_logs import open_records

pytestmark = pytest.mark.shares

HEADING = (
    "Inter-|   Receive                                                |  Transmit\n"
    " face |bytes    packets errs drop fifo frame compressed multicast|"
    "bytes    packets errs drop fifo colls carrier compressed\n"
)
COLUMNS = ("rx_bytes", "tx_bytes", "rx_packets", "tx_packets", "rx_errors", "tx_errors", "rx_drops", "tx_drops")


def line(name: str, start: int) -> str:
    return f"{name:>6}: " + " ".join(str(start + column) for column in range(16)) + "\n"


def expected(start: int) -> list[int]:
    return [start + column for column in (0, 8, 1, 9, 2, 10, 3, 11)]


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "dev"
    path.write_text(HEADING + line("lo", 0) + line("eth0", 2**40))
    monkeypatch.setattr(NicCollector, "source", path)
    return path


def rows(folder: Path) -> list[dict[str, int]]:
    records = open_records(folder / "nic" / "nic.rec")
    return [dict(zip([field.name for field in records.fields], row, strict=True)) for row in records.tail()]


def of(row: dict[str, int], nic: str) -> list[int]:
    return [row[f"{nic}.{column}"] for column in COLUMNS]


def test_the_columns_are_the_kernels(dev: Path, tmp_path: Path) -> None:
    collector = NicCollector(Context(tmp_path, 0.5))
    assert collector.check().state == "ok"
    assert collector.check().reason == "2 interfaces: eth0, lo"
    collector.start()
    facts = collector.stop()
    assert facts == {"nics": 2, "appeared_ns": {}, "vanished_ns": {}}
    first, last = rows(tmp_path)
    assert list(first)[:3] == ["t_ns", "mono_ns", "eth0.rx_bytes"]
    assert of(first, "eth0") == of(last, "eth0") == expected(2**40)
    assert of(first, "lo") == expected(0)
    about = open_records(tmp_path / "nic" / "nic.rec").about
    assert (about["nics"], about["every_s"]) == (["eth0", "lo"], 0.5)


def test_interfaces_that_come_and_go_are_noted(dev: Path, tmp_path: Path) -> None:
    collector = NicCollector(Context(tmp_path, 0.5))
    collector.start()
    dev.write_text(HEADING + line("new0", 500) + line("lo", 1000))
    collector.sample()
    dev.write_text(HEADING + line("lo", 3000) + line("new0", 600) + line("eth0", 70))
    collector.sample()
    facts = collector.stop()
    assert list(facts["appeared_ns"]) == ["new0"]
    assert list(facts["vanished_ns"]) == ["eth0"]
    _, gone, back, _ = rows(tmp_path)
    assert of(gone, "eth0") == expected(2**40)  # its last counters: no traffic, rather than a jump to zero
    assert of(gone, "lo") == expected(1000)
    assert (of(back, "eth0"), of(back, "lo")) == (expected(70), expected(3000))


def test_more_interfaces_than_fit_a_page(dev: Path, tmp_path: Path) -> None:
    dev.write_text(HEADING + "".join(line(f"veth{number}", number) for number in range(600)))
    collector = NicCollector(Context(tmp_path, 0.5))
    collector.start()
    collector.stop()
    assert of(rows(tmp_path)[0], "veth599") == expected(599)


def test_a_file_that_is_not_there(dev: Path, tmp_path: Path) -> None:
    dev.unlink()
    check = NicCollector(Context(tmp_path, 0.5)).check()
    assert (check.state, check.remedy) == ("unavailable", "mount /proc")
    assert "No such file" in check.reason


def test_records_are_held_for_a_tenth_of_a_second_at_most(dev: Path, tmp_path: Path) -> None:
    collector = NicCollector(Context(tmp_path, 0.001))
    collector.start()
    for _ in range(3000):
        collector.sample()
    records = open_records(tmp_path / "nic" / "nic.rec")
    written_ns = [row[1] for row in records.tail()]
    assert records.torn_bytes == 0
    last_ns = written_ns[-1]
    collector.stop()
    everything = [row[1] for row in open_records(tmp_path / "nic" / "nic.rec").tail()]
    assert len(everything) == 3002
    held = [mono_ns for mono_ns in everything[:-1] if mono_ns > last_ns]
    assert not held or held[-1] - held[0] < 100_000_000


CUT = """
import subprocess, sys, time
from pathlib import Path
from ringtap.collectors.nic import LinkWatch
from ringtap.core.append_only_logs import read_json_lines

def ip(words):
    subprocess.run(["ip", "link", *words.split()], check=True)

def states():
    return [item for item in read_json_lines(path)[0] if item["nic"] == "va"]

def await_change(number):
    deadline = time.monotonic() + 30
    while len(states()) < number:
        watch.sample(time.monotonic_ns())
        assert time.monotonic() < deadline, states()
        time.sleep(0.01)

path = Path(sys.argv[1])
ip("add name va type veth peer name vb")
ip("set va up")
ip("set vb up")
watch = LinkWatch(path)
deadline = time.monotonic() + 30
while states()[-1]["operstate"] != "up":
    watch.sample(time.monotonic_ns())
    assert time.monotonic() < deadline, states()
before = len(states())
ip("set vb down")
await_change(before + 1)
cut = states()[-1]
assert (cut["up"], cut["carrier"]) == (True, False), cut
assert cut["carrier_changes"] > states()[before - 1]["carrier_changes"]
assert cut["t_ns"] > states()[before - 1]["t_ns"]
ip("set vb up")
deadline = time.monotonic() + 30
while states()[-1]["operstate"] != "up" or not states()[-1]["carrier"]:
    watch.sample(time.monotonic_ns())
    assert time.monotonic() < deadline, states()
count = len(states())
ip("del va")
await_change(count + 1)
assert states()[-1]["operstate"] in ("notpresent", "down"), states()[-1]
watch.close()
"""


def test_a_link_that_is_cut_and_comes_back_is_noted(tmp_path: Path) -> None:
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", CUT, tmp_path / "links.jsonl"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
