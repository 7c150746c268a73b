"""Captures that are made to take all memory or all time: bounded in both, and told in a sentence.

Sizes here are those of a test; RINGTAP_BOUNDS=10 makes them ten times as large.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from ringtap.analysis.pcap.scan import MAX_CONVERSATIONS
from tests.unit.capture_makers import Packet, classic, frames, gzipped, udp, usual, zstandarded

pytestmark = [pytest.mark.computes, pytest.mark.long]

TIMES = int(os.environ.get("RINGTAP_BOUNDS", "1"))
BOMB_BYTES = TIMES * 6 * 10**8  # more than all memory that is allowed
FLOWS = TIMES * 300_000
MAX_RSS_BYTES = 500_000_000
MAX_CPU_S = TIMES * 60  # some 20 times what it takes, and enough to compile the kernels


# a process's account begins at the memory of the one that started it: here a small one, not that of the tests
_MEASURED = f"""
import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_CPU, ({MAX_CPU_S}, {MAX_CPU_S}))  # what hangs is ended
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, file=sys.stderr)
sys.exit(code)
"""


def run(*arguments: str) -> tuple[int, str, str, int]:
    """Exit code, both outputs and peak memory of `ringtap flows`."""
    command = [sys.executable, "-S", "-c", _MEASURED, sys.executable, "-m", "ringtap.cli", "flows", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors, _, rss_bytes = done.stderr.strip().rpartition("\n")
    assert "Traceback" not in errors
    return done.returncode, done.stdout, errors, int(rss_bytes)


def bomb(head: bytes, compress: Callable[[bytes], bytes]) -> bytes:
    """The head, then zeros: one compressed piece, again and again."""
    piece = 10**7
    return compress(head) + compress(bytes(piece)) * (BOMB_BYTES // piece)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress], ids=["gz", "zst"])
def test_zeros_behind_a_capture(compress: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """A record of zeros is a packet without bytes: they are counted as they come."""
    path = tmp_path / "bomb"
    path.write_bytes(bomb(classic(frames(usual())), compress))
    assert path.stat().st_size < BOMB_BYTES / 500
    code, output, errors, rss_bytes = run(str(path), "--no-cache", "--json")
    assert code in (0, 2), errors
    assert rss_bytes < MAX_RSS_BYTES
    if code == 0:
        counts = json.loads(output)["counts"]
        assert counts["packets"] >= len(usual())
        assert sum(counts.values()) > counts["packets"]


def test_zeros_alone_are_no_capture(tmp_path: Path) -> None:
    path = tmp_path / "zeros.gz"
    path.write_bytes(bomb(b"", gzip.compress))
    code, output, errors, rss_bytes = run(str(path), "--json")
    assert (code, output) == (2, "")
    assert str(path) in errors
    assert rss_bytes < MAX_RSS_BYTES


def test_a_window_of_gigabytes_is_refused(tmp_path: Path) -> None:
    """zstd frames may ask for a window of 2 GiB: the reader would have to hold it."""
    path = tmp_path / "window.zst"
    # a frame header with window exponent 31, then a block that repeats one byte (RFC 8878, 3.1.1)
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00\xa8" + struct.pack("<I", 128 * 1024 << 3 | 2 | 1)[:3] + b"\0")
    code, output, errors, rss_bytes = run(str(path), "--json")
    assert (code, output) == (2, "")
    assert str(path) in errors
    assert rss_bytes < MAX_RSS_BYTES


def syn_scan(path: Path) -> None:
    """A packet of each of more connections than are told apart."""
    (syn,) = frames([(0, udp("10.0.0.1", "10.0.0.2", (1, 2), 0))])
    record = np.frombuffer(classic([syn])[24:], np.uint8)
    made = np.tile(record, (FLOWS, 1))
    number = np.arange(FLOWS, dtype=">u4")
    made[:, 16 + 26 : 16 + 30] = (number // 50_000 + 0x0A000001).astype(">u4").view(np.uint8).reshape(-1, 4)
    made[:, 16 + 34 : 16 + 36] = (number % 50_000 + 1000).astype(">u2").view(np.uint8).reshape(-1, 2)
    with path.open("wb") as file:
        file.write(classic([]))
        made.tofile(file)


def test_more_conversations_than_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "scan.pcap"
    syn_scan(path)
    code, output, errors, rss_bytes = run(str(path), "--no-cache")
    assert code == 0, errors
    assert rss_bytes < MAX_RSS_BYTES
    assert f"{FLOWS - MAX_CONVERSATIONS:,}" in output, output
    code, output, errors, rss_bytes = run(str(path), "--no-cache", "--json")
    assert code == 0, errors
    assert rss_bytes < MAX_RSS_BYTES
    packets = output.count('"packets_ab": 1,')
    assert packets == MAX_CONVERSATIONS
    counts = json.loads(output[: output.index(', "conversations"')] + "}")["counts"]
    assert counts["packets"] == FLOWS
    assert counts["packets_over_limit"] == FLOWS - MAX_CONVERSATIONS


def test_flows_that_all_have_one_hash(tmp_path: Path) -> None:
    """5-tuples made for a table whose hash anyone can invert: each would be compared with all before it.

    The multipliers are those that the hash is known to have; a secret drawn for each scan takes part in it.
    """
    multiplier, of_rest = -7046029254386353131 % 2**64, -4417276706812531889 % 2**64
    number = TIMES * 250_000
    (one,) = frames([(0, udp("10.0.0.1", "10.0.0.2", (1, 2), 0))])
    made = np.tile(np.frombuffer(classic([one])[24:], np.uint8), (number, 1))
    ports = np.arange(1, number + 1, dtype=np.uint64)
    rest = ports | np.uint64(17 << 32 | 4 << 56)
    addresses = (np.uint64(12345) ^ (rest * np.uint64(of_rest))) * np.uint64(pow(multiplier, -1, 2**64))
    made[:, 16 + 26 : 16 + 34] = addresses.astype("<u8").view(np.uint8).reshape(-1, 8)
    made[:, 16 + 34 : 16 + 38] = ports.astype("<u4").view(np.uint8).reshape(-1, 4)
    path = tmp_path / "flood.pcap"
    path.write_bytes(classic([]) + made.tobytes())
    code, output, errors, _ = run(str(path), "--no-cache")  # with one chain it takes minutes
    assert code == 0, errors
    assert f"{number:,}" in output


SOUND = classic(frames(usual()))
NOT_CAPTURES = {
    "empty": b"",
    "text": b"what is this?\n" * 10,
    "magic": SOUND[:4],
    "half_header": SOUND[:20],
    "only_a_header": SOUND[:24],
    "pcapng_magic": b"\n\r\r\n",
    "pcapng_of_no_order": b"\n\r\r\n" + bytes(40),
    "gz_of_nothing": gzip.compress(b""),
    "gz_of_text": gzip.compress(b"what is this?\n" * 10),
    "gz_torn_at_once": gzip.compress(SOUND)[:12],
    "gz_damaged": gzip.compress(SOUND)[:10] + bytes(100),
    "zst_magic": b"\x28\xb5\x2f\xfd",
    "zst_damaged": zstandard.compress(SOUND)[:9] + bytes(100),
    "other_link_type": classic([Packet(0, bytes(60), 60)] * 3, 105),
    "a_record_of_no_length": SOUND[:32] + b"\xff" * 8 + bytes(30),
}


@pytest.mark.parametrize("name", NOT_CAPTURES)
def test_what_is_no_capture_is_told_in_a_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ringtap import cli

    path = tmp_path / name
    path.write_bytes(NOT_CAPTURES[name])
    code = cli.main(["flows", str(path), "--json"])
    output = capsys.readouterr()
    assert code in (0, 2)
    if code == 2:
        assert output.out == ""
        (line,) = output.err.splitlines()
        assert line.startswith("ringtap: ")
        assert str(path) in line
    else:  # what there is no conversation in is told by its counts
        counts = json.loads(output.out)["counts"]
        assert sum(counts.values()) > counts["bytes"], counts


@pytest.mark.parametrize("wrap", [gzipped, zstandarded])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.97])
def test_a_torn_compressed_capture_is_read_as_far_as_it_goes(
    wrap: Callable[[bytes], bytes], share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ringtap import cli

    path = tmp_path / "torn"
    chance = random.Random(1)  # bytes that cannot be packed: else all of it lies in the first few
    heads = [*frames(usual())] * 20
    packets = [Packet(one.time_ns, one.data[:60] + chance.randbytes(900), 960) for one in heads]
    whole = wrap(classic(packets))
    path.write_bytes(whole[: int(len(whole) * share)])
    code = cli.main(["flows", str(path), "--json"])
    output = capsys.readouterr()
    assert code == 0, output.err
    found = json.loads(output.out)
    assert 0 < found["counts"]["packets"] < len(packets)
    assert found["notes"], "nothing says that the file is torn"
