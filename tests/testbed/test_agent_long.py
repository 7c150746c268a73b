"""Long sessions: packets around slow iterations of a real job, the disk limit, and what is said of the disk use."""

import json
import os
import subprocess
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest

import ringtap
from ringtap.analysis.pcap.scan_captures import scan_packets
from ringtap.core.append_only_logs import open_records
from ringtap.core.errors import RingtapWarning, UsageError
from tests.unit.agent_processes import RINGTAP, node_item, python, run_item, running, wait_for

pytestmark = pytest.mark.shares

needs_root = pytest.mark.needs_root("capture packets here")
SLOW_S = {130: 0.4, 133: 0.6, 170: 0.8}
# numbered datagrams, with the times before and after each was sent, beside iterations of which three are slow
JOB = textwrap.dedent(
    f"""
    import json, os, socket, sys, threading, time
    import ringtap
    while not os.path.exists(os.environ["RINGTAP_RUN"] + "/nodes/here/packets/packets.json"):
        time.sleep(0.05)
    sink, out = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    sink.bind(("127.0.0.1", 0))
    sent, ended = [], threading.Event()
    def send():
        while not ended.wait(0.002):
            before = time.time_ns()
            out.sendto(len(sent).to_bytes(8, "big"), sink.getsockname())
            sent.append((before, time.time_ns()))
    thread = threading.Thread(target=send)
    thread.start()
    begun_s, longest_s = time.monotonic(), 0.0
    for step in range(200):
        # those that are to be slow are slow, and enough is sent in and before them, on a busy machine too
        slow_s, count = {SLOW_S}.get(step), len(sent)
        time.sleep(max(slow_s, 1.2 * longest_s) if slow_s else 0.01)
        while len(sent) < (count + 50 if slow_s else 150 if step == 50 else 0):
            time.sleep(0.001)
        ringtap.step()
        now_s = time.monotonic()
        begun_s, longest_s = now_s, max(longest_s, now_s - begun_s)
    ended.set()
    thread.join()
    json.dump({{"port": sink.getsockname()[1], "sent": sent}}, open(sys.argv[1], "w"))
    """
)
# a job that sends 5000 bytes per iteration, kills its agent, and goes on for a while
KILLS = textwrap.dedent(
    """
    import json, os, signal, socket, time
    from pathlib import Path
    import ringtap
    node = Path(os.environ["RINGTAP_RUN"], "nodes/here")
    while not (node / "packets/packets.json").exists():
        time.sleep(0.05)
    server = socket.create_server(("127.0.0.1", 0))
    out = socket.create_connection(server.getsockname())
    into, _ = server.accept()
    def send():
        time.sleep(0.02)
        out.sendall(bytes(5000))
        into.recv(5000, socket.MSG_WAITALL)
    def captured():
        try:
            return max(path.stat().st_size for path in (node / "packets/.ring").iterdir()) > 5000
        except (OSError, ValueError):  # no file yet, or one that gets its name
            return False
    while not captured():
        send()
    for step in range(220):
        send()
        ringtap.step()
        if step == 200:
            os.kill(json.loads((node / "node.json").read_text())["agent"]["pid"], signal.SIGKILL)
    """
)
# datagrams beside a capture, which makes room once a second; where it is late, they wait for it
FLOOD = textwrap.dedent(
    """
    import os, socket, sys, time
    def samples():
        return os.path.getsize(sys.argv[2] + "/counts.rec")
    while not os.path.exists(sys.argv[2] + "/packets.json"):
        time.sleep(0.05)
    known = since = 0
    sink, out = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    sink.bind(("127.0.0.1", 0))
    for _ in range(40):
        while since == 13 and samples() == known:
            time.sleep(0.05)
        known, since = samples(), 0 if samples() != known else since
        since += 1
        for _ in range(int(sys.argv[1])):
            out.sendto(bytes(1400), sink.getsockname())
        time.sleep(0.1)
    """
)

# a job that ends after the agent has written that its collectors stop
UNTIL_STOPPED = textwrap.dedent(
    """
    import pathlib, sys, time
    log, end_s = pathlib.Path(sys.argv[1], "nodes/here/log/agent.log"), time.monotonic() + 60
    while time.monotonic() < end_s and not (log.exists() and "the collectors stop" in log.read_text()):
        time.sleep(0.1)
    print("job done")
    """
)


# beside what other tests send over the machine's own
OWN_LOOPBACK = ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def run(
    path: Path, *words: str, options: tuple[str, ...], inside: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [*inside, *RINGTAP, "run", "-o", str(path), "--node", "here", *options, "--", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=90)


@needs_root
def test_packets_are_kept_around_slow_iterations_and_nowhere_else(tmp_path: Path) -> None:
    options = ("--collect", "steps,nic,packets", "--interface", "lo", "--packets-around-slow", "p99:300ms")
    done = run(tmp_path / "run", *python(JOB), str(tmp_path / "sent.json"), options=options)
    assert done.returncode == 0, done.stderr
    packets = tmp_path / "run/nodes/here/packets"
    lines = [json.loads(line) for line in (packets / "lo-windows.jsonl").read_text().splitlines()]
    facts = json.loads((packets / "packets.json").read_text())
    assert (facts["dropped_by_kernel"], facts["windows"], facts["ended"]) == (0, len(lines), "as asked")
    assert sorted(path.name for path in packets.iterdir()) == sorted(
        [*facts["files"], "counts.rec", "lo-windows.jsonl", "packets.json"]
    )

    # the windows, from the step records: a busy machine makes other iterations slow, too
    (log,) = (tmp_path / "run/nodes/here/steps").glob("rank0-*.rec")
    column = [field.name for field in open_records(log).fields].index("end_ns")
    mono = [field.name for field in open_records(log).fields].index("end_mono_ns")
    records = open_records(log).tail()
    times_s = [(after[mono] - before[mono]) / 1e9 for before, after in pairwise(records)]
    slow, spans = [], list[list[int]]()
    for step in range(101, 200):
        threshold_s = sorted(times_s[: step - 1])[-(-(step - 1) * 99 // 100) - 1]
        if times_s[step - 1] > threshold_s:
            slow.append(step)
            end_ns = records[step][column]
            begin_ns = end_ns - (records[step][mono] - records[step - 1][mono]) - 300_000_000
            if spans and begin_ns <= spans[-1][1]:
                spans[-1][1] = end_ns + 300_000_000
            else:
                spans.append([begin_ns, end_ns + 300_000_000])
    assert slow
    assert [[line["begin_ns"], line["end_ns"]] for line in lines] == spans
    assert not any("missing_until_ns" in line for line in lines)
    assert [one["step"] for line in lines for one in line["iterations"]] == slow

    # every datagram that was sent within a window is there, and none from outside
    told = json.loads((tmp_path / "sent.json").read_text())
    kept = set[int]()
    for line in lines:
        files = [packets / name for name in line["files"]]
        assert sum(scan_packets(path).counts["packets"] for path in files) == line["packets"]
        for path in files:
            kept |= numbers_in(path, told["port"])
    inside = {
        number
        for number, (before, after) in enumerate(told["sent"])
        if any(begin <= before and after <= end for begin, end in spans)
    }
    outside = {
        number
        for number, (before, after) in enumerate(told["sent"])
        if not any(begin <= after and before <= end for begin, end in spans)
    }
    assert inside <= kept
    assert not kept & outside
    assert len(inside) > 100 < len(outside)

    # the analysis counts only iterations whose packets are all there; iteration k ends with step k + 1
    job = ringtap.open_job(tmp_path / "run")
    ends_ns = [record[column] for record in records]
    covered = {
        number
        for number, (begin_ns, end_ns) in enumerate(pairwise(ends_ns))
        if any(begin <= begin_ns and end_ns <= end for begin, end in spans)
    }
    kept_bins = job.logs.captured.packets["here"].kept[job.logs.borders.bin_of]
    assert {number for number, is_kept in enumerate(kept_bins) if is_kept} == covered
    with pytest.raises(UsageError, match="no packet of iteration 50 was captured"):
        job.packets(iteration=50)


@needs_root
def test_packets_that_a_killed_agent_has_not_decided_on_are_counted(tmp_path: Path) -> None:
    options = ("--collect", "steps,packets", "--interface", "lo", "--packets-around-slow", "p99:1s")
    done = run(tmp_path / "run", *python(KILLS), options=options)
    assert done.returncode == 0, done.stderr
    # tcpdump ends a second after the agent
    wait_for(lambda: not running(str(tmp_path)))
    ring = [scan_packets(path) for path in (tmp_path / "run/nodes/here/packets/.ring").iterdir()]
    # a second at its ends may lack packets
    begin_ns = min(scanned.first_ns for scanned in ring) + 10**9
    end_ns = max(scanned.last_ns for scanned in ring) - 10**9
    with pytest.warns(RingtapWarning, match=r"here has not decided which packets in packets/\.ring are near slow"):
        found = ringtap.open_job(tmp_path / "run").logs.captured.packets["here"]
    job = ringtap.open_job(tmp_path / "run")
    (log,) = (tmp_path / "run/nodes/here/steps").glob("rank0-*.rec")
    column = [field.name for field in open_records(log).fields].index("end_ns")
    edges_ns = [record[column] for record in open_records(log).tail()]
    inside = {number for number, (begin, end) in enumerate(pairwise(edges_ns)) if begin_ns <= begin and end <= end_ns}
    assert len(inside) > 50
    assert {number for number, is_kept in enumerate(found.kept[job.logs.borders.bin_of]) if is_kept} >= inside
    sent_bytes = found.amounts["payload_bytes"].sum(axis=0)
    assert min(sent_bytes[job.logs.borders.bin_of[number]] for number in inside) >= 5000  # others use loopback, too


def numbers_in(path: Path, port: int) -> set[int]:
    """The numbers in the datagrams to a port, of a capture on loopback (Ethernet, IPv4, UDP)."""
    data, at, found = path.read_bytes(), 24, set[int]()
    while at < len(data):
        kept = int.from_bytes(data[at + 8 : at + 12], "little")
        frame = data[at + 16 : at + 16 + kept]
        if frame[23] == 17 and int.from_bytes(frame[36:38], "big") == port:
            found.add(int.from_bytes(frame[42:50], "big"))
        at += 16 + kept
    return found


@needs_root
def test_the_oldest_packets_go_at_the_disk_limit(tmp_path: Path) -> None:
    options = ("--collect", "nic,packets", "--interface", "lo", "--snap", "2000", "--disk-limit", "4MB")
    flood = [*python(FLOOD), "100", str(tmp_path / "run/nodes/here/packets")]
    done = run(tmp_path / "run", *flood, options=options, inside=OWN_LOOPBACK)
    assert done.returncode == 0, done.stderr
    item, folder = node_item(tmp_path / "run"), tmp_path / "run/nodes/here"
    assert item["status"] == "complete"
    assert item["collectors"]["packets"]["deleted_files"] >= 2  # of 6 MB in files of 1 MB
    files = json.loads((folder / "packets/packets.json").read_text())["files"]
    assert [path.name for path in sorted(folder.glob("packets/*.pcap"))] == sorted(files)
    numbers = [int(name[3:-5]) for name in files]
    assert numbers == list(range(numbers[0], numbers[-1] + 1)), "the newest are kept"
    assert item["disk"]["limit_bytes"] == 4_000_000 > item["disk"]["bytes"]
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 4_000_000


def test_a_recording_that_cannot_be_cut_ends_at_the_disk_limit_and_the_job_goes_on(tmp_path: Path) -> None:
    collector = tmp_path / "heavy.py"
    collector.write_text(
        "from ringtap.collectors.collector_interface import Context\n"
        "class Heavy:\n"
        "    name, slow, every_s = 'heavy', True, 0.1\n"
        "    def __init__(self, context): self.folder = context.folder / 'heavy'\n"
        "    def check(self):\n"
        "        from ringtap.collectors.collector_interface import Check\n"
        "        return Check('ok', 'a megabyte a second')\n"
        "    def start(self): self.folder.mkdir(parents=True)\n"
        "    def sample(self):\n"
        "        with (self.folder / 'log').open('ab') as file: file.write(bytes(100_000))\n"
        "    def stop(self): return {}\n"
    )
    command = [*RINGTAP, "run", "-o", str(tmp_path / "run"), "--node", "here", "--collect", "nic,heavy:Heavy"]
    command += ["--disk-limit", "1MB", "--", *python(UNTIL_STOPPED), str(tmp_path / "run")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=90, cwd=tmp_path, env=dict(os.environ)
    )
    assert (done.returncode, done.stdout) == (0, "job done\n"), done.stderr
    item = node_item(tmp_path / "run")
    assert item["status"] == "partial"
    assert item["why"].startswith("nic, heavy stopped early: the disk limit of 1 MB was reached after ")
    assert run_item(tmp_path / "run")["status"] == "partial"
    assert "the disk limit of 1 MB was reached" in done.stderr
    assert item["jobs"][0]["exit_code"] == 0
    assert item["disk"]["bytes"] > item["disk"]["limit_bytes"] == 1_000_000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--disk-limit", "100kB"), "is less than the"),
        (("--disk-limit", "2MB", "--collect", "nic", "--every", "1ms"), "that the first minute needs"),
        (("--disk-limit", "much"), "--disk-limit 'much' is not understood"),
        (("--disk-limit", "0B"), "is less than the"),
        (("--packets-around-slow", "p99:5s"), "add --collect default,packets"),
    ],
)
def test_wrong_limits_are_refused_before_the_job_starts(tmp_path: Path, options: tuple[str, ...], words: str) -> None:
    done = run(tmp_path / "run", "touch", str(tmp_path / "started"), options=options)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not any(tmp_path.iterdir())
