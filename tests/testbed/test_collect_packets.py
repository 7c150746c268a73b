"""Packets on the real kernel: both tools, drops, rotation, a killed tool, a killed agent, no privilege, a full disk."""

import contextlib
import json
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ringtap.analysis.pcap.read_payload_packets import read_segments
from ringtap.analysis.pcap.scan_captures import read_captures, scan_packets
from ringtap.collectors import capture_program
from ringtap.collectors.collector_interface import Context
from ringtap.collectors.packets import PacketsCollector
from ringtap.core.append_only_logs import open_records
from ringtap.core.capture_file_formats import PCAP_HEADER
from tests.unit.agent_processes import ended, wait_for

pytestmark = [pytest.mark.shares, pytest.mark.together, pytest.mark.usefixtures("unchanged_machine")]
needs_root = pytest.mark.needs_root("capture packets here")
TOOLS = pytest.mark.parametrize("tool", ["tcpdump", "ring"])
# what an ordinary user lacks; CAP_SETFCAP stays, which root needs to map itself into a user namespace
UNPRIVILEGED = ["setpriv", "--inh-caps=-all", "--bounding-set=-sys_admin,-net_admin,-net_raw,-sys_ptrace,-dac_override"]
# the capture programs have this time where a busy machine is late: what is tested is what they do
PATIENCE_S = 30.0
PATIENT = f"""
from ringtap.collectors import capture_program
capture_program._ASK_S = capture_program._START_S = capture_program.END_S = {PATIENCE_S}
capture_program.Tool.settle.__defaults__ = ({PATIENCE_S},)
"""
# two network namespaces with a veth pair between; they end with the last process in them
PAIR = """
ip link set lo up
unshare --net sleep 60 & peer=$!
while [ "$(readlink /proc/$peer/ns/net)" = "$(readlink /proc/self/ns/net)" ]; do sleep 0.02; done
ip link add eth0 mtu 1450 type veth peer name eth0 mtu 1450 netns $peer
ip address add 10.9.0.1/24 dev eth0; ip link set eth0 up
nsenter -t $peer -n sh -c 'ip address add 10.9.0.2/24 dev eth0; ip link set eth0 up'
"$@" $peer; code=$?
kill $peer; exit $code
"""
# sends, waits until all has arrived, and prints tcpi_bytes_sent: with what was sent twice, for whatever reason
SEND = """
import socket, struct
client = socket.create_connection(("10.9.0.1", 5001))
for _ in range({}):
    client.sendall(bytes(10000))
client.shutdown(socket.SHUT_WR)
client.recv(1)
print(*struct.unpack_from("Q", client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 240), 200))
"""
IN_A_PAIR = """
import json, socket, subprocess, sys
from pathlib import Path
from ringtap.collectors.collector_interface import Context
from ringtap.collectors.packets import PacketsCollector
folder, tools, times, peer = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3]), sys.argv[4]
wanted = {"interface": "eth0", "filter": "tcp"}  # no neighbour discovery, which comes at any time
made = [PacketsCollector(Context(folder / tool, 1.0, options=wanted | {"tool": tool})) for tool in tools]
checks = [one.check() for one in made]
server = socket.create_server(("10.9.0.1", 5001))
for one in made:
    one.start()
sender = subprocess.Popen(["nsenter", "-t", peer, "-n", sys.executable, "-c", SEND.format(times)], stdout=-1)
connection, _ = server.accept()
received = 0
while data := connection.recv(1 << 20):
    received += len(data)
connection.close()
sent = int(sender.communicate()[0])
for one in made:
    one.sample()
facts = [one.stop() for one in made]
print(json.dumps({"received": received, "sent": sent, "facts": facts, "checks": [check.reason for check in checks]}))
"""


class Loopback:
    """A server on loopback that discards, and a way to send it so many bytes."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._discard, daemon=True).start()

    def _discard(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            while connection.recv(1 << 20):
                pass
            connection.close()

    def send(self, count: int) -> int:
        """So many thousand bytes; returns how many the kernel sent, with those that a busy machine sends again."""
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            for _ in range(count):
                client.sendall(bytes(1000))
            client.shutdown(socket.SHUT_WR)
            client.recv(1)
            info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 240)
        return int(struct.unpack_from("Q", info, 200)[0])  # tcpi_bytes_sent

    def send_datagrams(self, count: int) -> None:
        """So many packets, exactly: TCP puts what waits into one."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            for _ in range(count):
                client.sendto(bytes(1000), ("127.0.0.1", self.port))

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture
def loopback() -> Iterator[Loopback]:
    made = Loopback()
    yield made
    made.close()


MADE: list[PacketsCollector] = []


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give capture programs time, and leave none of them to the next test."""
    for name in ("_ASK_S", "_START_S", "END_S"):
        monkeypatch.setattr(capture_program, name, PATIENCE_S)
    monkeypatch.setattr(capture_program.Tool.settle, "__defaults__", (PATIENCE_S,))
    yield
    while MADE:
        if (tool := MADE.pop()._tool) is not None:
            tool.kill()


def collector(tmp_path: Path, **options: object) -> PacketsCollector:
    words = {"interface": "lo"} | {name: str(value) for name, value in options.items()}
    MADE.append(PacketsCollector(Context(tmp_path, 1.0, options=words)))
    return MADE[-1]


def program_of(taken: PacketsCollector) -> tuple[psutil.Process, psutil.Process]:
    """The shell that watches a collector's capture program, and the program."""
    assert taken._tool is not None
    shell = psutil.Process(taken._tool._process.pid)
    (program,) = shell.children()
    return shell, program


def sent_to(path: Path, port: int) -> int:
    return sum(payload_bytes for _, ends, payload_bytes in read_segments(path) if ends[3] == port)


def packets_in(path: Path) -> int:
    counts = scan_packets(path).counts
    assert counts["torn_bytes"] == 0
    return counts["packets"]


def told(tmp_path: Path) -> dict[str, Any]:
    return dict(json.loads((tmp_path / "packets/packets.json").read_text()))


def written_bytes(tmp_path: Path, loopback: Loopback) -> int:
    """Return the payload to the server in the capture so far."""
    if (tmp_path / "packets/lo-0.pcap").stat().st_size <= PCAP_HEADER.size:
        return 0
    flows = read_captures(tmp_path / "packets/lo-0.pcap").flows()
    return int(flows["payload"][flows["destination_port"] == loopback.port].sum())


def until_written(tmp_path: Path, taken: PacketsCollector, loopback: Loopback) -> None:
    """Wait until two million bytes are in the file: the kernel hands a block over within a second."""
    end_s = time.monotonic() + 20
    while written_bytes(tmp_path, loopback) < 2_000_000 and time.monotonic() < end_s:
        taken.sample()
        time.sleep(0.1)


def sample_on(taken: PacketsCollector) -> None:
    """Sample for some seconds, at most until it fails."""
    for _ in range(100):
        taken.sample()
        time.sleep(0.05)


def in_a_pair(prefix: list[str], folder: Path, tools: str, times: int) -> dict[str, Any]:
    script = f"SEND = {SEND!r}\n{PATIENT}{IN_A_PAIR}"
    command = [*prefix, "sh", "-c", PAIR, "sh", sys.executable, "-c", script, str(folder), tools, str(times)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@needs_root
def test_both_tools_see_every_byte_of_a_transfer_between_two_hosts(tmp_path: Path) -> None:
    told = in_a_pair(["unshare", "--net"], tmp_path, "tcpdump,ring", 5000)
    assert told["received"] == 50_000_000 <= told["sent"]
    assert told["checks"][0] == "tcpdump on eth0"
    for tool, facts in zip(("tcpdump", "ring"), told["facts"], strict=True):
        path = tmp_path / tool / "packets/eth0-0.pcap"
        assert sent_to(path, 5001) == told["sent"]
        assert facts["dropped_by_kernel"] == 0
        assert facts["captured"] == facts["received_by_filter"]
        assert facts["ended"] == "as asked"
        assert packets_in(path) == facts["captured"]
    item = json.loads((tmp_path / "ring/packets/packets.json").read_text())
    assert (item["tool"], item["mtu"], item["snap_bytes"], item["files"]) == ("ring", 1450, 128, ["eth0-0.pcap"])
    # with segmentation offload one captured packet holds many of the wire's: the reader must know
    assert item["offloads"]["tx-tcp-segmentation"] in (True, False)


TAGGED = """
import json, socket, sys, time
from pathlib import Path
from ringtap.collectors.collector_interface import Context
from ringtap.collectors.packets import PacketsCollector
folder = Path(sys.argv[1])
options = [{"interface": "in0", "tool": tool} for tool in ("tcpdump", "ring")]
made = [PacketsCollector(Context(folder / one["tool"], 1.0, options=one)) for one in options]
for one in made:
    one.start()
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
wire.bind(("out0", 0))
for kind, tag in ((b"\\x81\\x00", b"\\x60\\x07"), (b"\\x88\\xa8", b"\\x00\\x09")):
    for size in (46, 1000):
        wire.send(b"\\xff" * 6 + bytes(6) + kind + tag + b"\\x88\\xb5" + bytes(size))
for one in made:
    one.stop()
"""


@needs_root
def test_a_vlan_tag_that_the_kernel_took_off_is_put_back(tmp_path: Path) -> None:
    """Byte for byte what tcpdump writes: the tag is in neither's packet data, but beside it."""
    links = 'ip link add in0 type veth peer name out0; ip link set in0 up; ip link set out0 up; exec "$@"'
    command = ["unshare", "--net", "sh", "-c", links, "sh", sys.executable, "-c", PATIENT + TAGGED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    by_tcpdump, by_ring = (tagged_frames(tmp_path / tool / "packets/in0-0.pcap") for tool in ("tcpdump", "ring"))
    assert [length for length, _ in by_ring] == [64, 1018, 64, 1018]
    assert [frame[12:18].hex() for _, frame in by_ring] == ["8100600788b5"] * 2 + ["88a8000988b5"] * 2
    # the ring keeps the tag beyond the snap length, tcpdump within it
    assert [(length, frame[:128]) for length, frame in by_ring] == [
        (length, frame[:128]) for length, frame in by_tcpdump
    ]


def tagged_frames(path: Path) -> list[tuple[int, bytes]]:
    """Lengths and bytes of the frames with a VLAN tag; the kernel's own (IPv6 greetings) have none."""
    data, at, found = path.read_bytes(), 24, []
    while at < len(data):
        _, _, kept, length = struct.unpack_from("=IIII", data, at)
        frame = data[at + 16 : at + 16 + kept]
        if frame[12:14] in (b"\x81\x00", b"\x88\xa8"):
            found.append((length, frame))
        at += 16 + kept
    return found


def test_the_root_of_a_user_namespace_gets_the_ring(tmp_path: Path) -> None:
    """tcpdump gives up root for a user that such a namespace does not have."""
    told = in_a_pair([*UNPRIVILEGED, "unshare", "-Urn"], tmp_path, "tcpdump", 500)
    assert told["checks"] == ["a ring in Python (tcpdump is not usable here) on eth0"]
    assert sent_to(tmp_path / "tcpdump/packets/eth0-0.pcap", 5001) == told["sent"]


@needs_root
@TOOLS
def test_a_filter_keeps_what_it_says(tmp_path: Path, loopback: Loopback, tool: str) -> None:
    taken = collector(tmp_path, tool=tool, filter=f"tcp port {loopback.port}")
    assert taken.check().state == "ok"
    taken.start()
    with contextlib.closing(Loopback()) as other:
        sent = loopback.send(200)
        other.send(200)
        facts = taken.stop()
    assert sent_to(tmp_path / "packets/lo-0.pcap", loopback.port) == sent >= 200_000
    assert sent_to(tmp_path / "packets/lo-0.pcap", other.port) == 0
    assert facts["captured"] < 1000
    wrong = collector(tmp_path / "wrong", tool=tool, filter="tcp porto 80").check()
    assert wrong.state == "unavailable"
    assert "tcp porto 80" in wrong.reason


@needs_root
@TOOLS
def test_drops_are_counted(tmp_path: Path, loopback: Loopback, tool: str) -> None:
    """A program that does not get to run, with little room in the kernel: what it cannot take is known."""
    taken = collector(tmp_path, tool=tool, buffer_bytes=2 << 20, filter=f"udp port {loopback.port}")
    taken.start()
    assert taken._tool is not None
    taken._tool.signal("STOP")
    wait_for(lambda: program_of(taken)[1].status() == psutil.STATUS_STOPPED)
    loopback.send_datagrams(30_000)
    taken._tool.signal("CONT")
    taken.sample()
    facts = taken.stop()
    assert facts["dropped_by_kernel"] > 1000
    assert told(tmp_path)["dropped_by_kernel"] == facts["dropped_by_kernel"]
    assert packets_in(tmp_path / "packets/lo-0.pcap") == facts["captured"] < 30_000, (facts, taken._tool.ended)
    log = open_records(tmp_path / "packets/counts.rec")
    last = dict(zip((field.name for field in log.fields), log.tail()[-1], strict=True))
    assert {name: last[name] for name in facts if name != "ended"} == {
        name: facts[name] for name in facts if name != "ended"
    }


@needs_root
@TOOLS
def test_rotation_bounds_the_disk_and_keeps_the_newest(tmp_path: Path, loopback: Loopback, tool: str) -> None:
    taken = collector(tmp_path, tool=tool, file_bytes=1_000_000, files=2, filter=f"udp port {loopback.port}")
    taken.start()
    for _ in range(5):
        loopback.send_datagrams(9000)
        time.sleep(0.2)
        taken.sample()
    facts = taken.stop()
    assert facts["captured"] == 45_000
    item = told(tmp_path)
    assert len(item["files"]) == 2
    assert item["deleted_files"] >= 2
    assert item["files"] == sorted(path.name for path in (tmp_path / "packets").glob("*.pcap"))
    for name in item["files"]:
        assert packets_in(tmp_path / "packets" / name) > 0
    first, last = (int(item["files"][place][3:-5]) for place in (0, -1))
    assert last == first + 1 >= 3


@needs_root
@TOOLS
def test_what_a_tool_has_received_is_in_its_file_at_a_word(tmp_path: Path, loopback: Loopback, tool: str) -> None:
    taken = collector(tmp_path, tool=tool, filter=f"udp port {loopback.port}")
    taken.start()
    loopback.send_datagrams(3)
    assert taken._tool is not None
    (path,) = (tmp_path / "packets").glob("*.pcap")
    deadline_s = time.monotonic() + PATIENCE_S
    # the kernel hands them over within a second
    while path.stat().st_size <= PCAP_HEADER.size and time.monotonic() < deadline_s:
        taken._tool.signal("USR2")
        time.sleep(0.1)
    assert packets_in(path) == 3
    taken.stop()


@needs_root
@TOOLS
def test_a_tool_that_is_killed_is_noted_and_its_file_reads(tmp_path: Path, loopback: Loopback, tool: str) -> None:
    taken = collector(tmp_path, tool=tool)
    taken.start()
    loopback.send(2000)
    until_written(tmp_path, taken, loopback)
    assert taken._tool is not None
    taken._tool.signal("KILL")
    with pytest.raises(OSError, match="ended early: signal SIGKILL"):
        sample_on(taken)
    assert told(tmp_path)["ended"].startswith("early: signal SIGKILL")
    assert taken.stop()["ended"].startswith("early")
    assert written_bytes(tmp_path, loopback) >= 2_000_000


@needs_root
@TOOLS
def test_a_tool_whose_shell_is_killed_ends_and_its_file_reads(tmp_path: Path, loopback: Loopback, tool: str) -> None:
    taken = collector(tmp_path, tool=tool)
    taken.start()
    loopback.send(2000)
    until_written(tmp_path, taken, loopback)
    shell, program = program_of(taken)
    shell.kill()
    with pytest.raises(OSError, match="ended early: signal SIGKILL"):
        sample_on(taken)
    program.wait(5)
    assert taken.stop()["ended"].startswith("early")
    assert written_bytes(tmp_path, loopback) >= 2_000_000


@needs_root
@TOOLS
def test_a_tool_that_does_not_end_is_killed_and_that_is_noted(
    tmp_path: Path, loopback: Loopback, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = collector(tmp_path, tool=tool)
    taken.start()
    assert taken._tool is not None
    kill = taken._tool.kill

    def patient_kill() -> None:
        monkeypatch.setattr(capture_program, "END_S", PATIENCE_S)  # its shell has time for it, too
        kill()

    monkeypatch.setattr(taken._tool, "kill", patient_kill)
    monkeypatch.setattr(capture_program, "END_S", 0.5)
    monkeypatch.setattr(capture_program.Tool.settle, "__defaults__", (1.5,))
    taken._tool.signal("STOP")
    facts = taken.stop()
    assert facts["ended"] == told(tmp_path)["ended"]
    assert facts["ended"].startswith("killed: it did not end within 5 s")
    assert taken._tool.ended.startswith("signal SIGKILL")


@needs_root
@TOOLS
def test_nothing_stays_behind_when_the_agent_is_killed(tmp_path: Path, loopback: Loopback, tool: str) -> None:
    script = PATIENT + textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from ringtap.collectors.collector_interface import Context
        from ringtap.collectors.packets import PacketsCollector
        options = {{"interface": "lo", "tool": "{tool}"}}
        PacketsCollector(Context(Path({str(tmp_path)!r}), 1.0, options=options)).start()
        print("up", flush=True)
        time.sleep(60)
        """
    )
    with ended(subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "up\n"
        family = psutil.Process(agent.pid).children(recursive=True)
        assert any(tool in " ".join(process.cmdline()) for process in family)
        assert all(process.nice() == min(19, psutil.Process().nice() + 10) for process in family)
        loopback.send(2000)
        agent.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs(family, timeout=8)
    assert not alive
    assert gone
    # what was received is written, for the program ended itself
    assert sent_to(tmp_path / "packets/lo-0.pcap", loopback.port) >= 2_000_000


def test_without_privilege_it_says_so_and_what_to_do(tmp_path: Path) -> None:
    script = PATIENT + (
        "import sys\nfrom pathlib import Path\nfrom ringtap.collectors.collector_interface import Context\n"
        "from ringtap.collectors.packets import PacketsCollector\n"
        "options = {'interface': 'lo', 'tool': sys.argv[1]}\n"
        "check = PacketsCollector(Context(Path('.'), 1.0, options=options)).check()\n"
        "print(check.state, check.reason, check.remedy, sep='|')"
    )
    for tool, words in (("tcpdump", "permission"), ("ring", "not permitted")):
        command = [*UNPRIVILEGED, sys.executable, "-c", script, tool]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        state, reason, remedy = done.stdout.strip().split("|")
        assert state == "unavailable"
        assert words in reason
        assert "CAP_NET_RAW" in remedy
    assert not any(tmp_path.iterdir())


def test_interfaces_that_are_not_there(tmp_path: Path) -> None:
    check = collector(tmp_path, interface="nosuch0").check()
    assert (check.state, check.reason) == ("unavailable", "there is no interface nosuch0")
    taken = collector(tmp_path, interface="nosuch0")
    with pytest.raises(OSError, match=r"did not start: .*nosuch0"):
        taken.start()
    assert taken.stop() == {}


@needs_root
@TOOLS
def test_a_limit_ends_the_capture_and_leaves_the_rest_alone(tmp_path: Path, loopback: Loopback, tool: str) -> None:
    taken = collector(tmp_path, tool=tool, most_bytes=100_000, filter=f"udp port {loopback.port}")
    taken.start()
    loopback.send_datagrams(2000)
    with pytest.raises(OSError, match="ended early: its files reached"):
        sample_on(taken)  # the kernel hands a block over within a second; the file is flushed at each sample
    assert told(tmp_path)["ended"].startswith("early: its files reached")
    taken.stop()


@needs_root
def test_a_disk_that_fills_up_is_left_to_the_job(tmp_path: Path) -> None:
    script = PATIENT + textwrap.dedent(
        """
        from pathlib import Path
        from ringtap.collectors.collector_interface import Context
        from ringtap.collectors.packets import PacketsCollector
        folder = Path("disk")
        taken = PacketsCollector(Context(folder, 1.0, options={"interface": "lo"}))
        taken.start()
        taken.sample()
        (folder / "checkpoint").write_bytes(bytes(19_500_000))
        try:
            taken.sample()
        except OSError as error:
            print(error.strerror)
        print(taken.stop()["ended"])
        """
    )
    mount = 'mkdir disk && mount -t tmpfs -o size=20m none disk && ip link set lo up && exec "$@"'
    command = ["unshare", "--mount", "--net", "sh", "-c", mount, "sh", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "bytes are free on its disk, which the job may need" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("early: only")
