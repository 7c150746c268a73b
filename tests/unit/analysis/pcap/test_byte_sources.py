"""Bytes of captures, however they lie: plain, packed, in pieces, through pipes, cut and damaged."""

import bz2
import functools
import gzip
import json
import lzma
import os
import random
import subprocess
import sys
import threading

import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.pcap.byte_sources import BLOCK_BYTES, CaptureStream, expand
from ringtap.analysis.pcap.scan_captures import read_captures
from ringtap.cli import main
from ringtap.core.errors import RingtapWarning, UsageError
from tests.unit.capture_makers import classic, frames, usual

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

CAPTURE = classic(frames(usual()))
# nothing compresses it to a single block
NOISE = random.Random(1).randbytes(3 * BLOCK_BYTES // 2)


def read(path):
    stream = CaptureStream(path)
    try:
        return b"".join(bytes(block) for block in stream.blocks()), stream
    finally:
        stream.close()


@functools.cache
def noise_by(pack):
    return pack(NOISE)


def zstd(data, **options):
    return zstandard.ZstdCompressor(**options).compress(data)


@pytest.mark.parametrize(
    "packed",
    [
        NOISE,
        gzip.compress(NOISE),
        gzip.compress(NOISE[:1000]) + gzip.compress(b"") + gzip.compress(NOISE[1000:]),
        gzip.compress(NOISE) + bytes(512),
        zstd(NOISE),
        zstd(NOISE[:1000]) + zstd(b"") + zstd(NOISE[1000:]),
        b"\x50\x2a\x4d\x18\x04\0\0\0skip" + zstd(NOISE, write_checksum=True),
        zstd(NOISE, write_content_size=False),
        lzma.compress(NOISE),
        lzma.compress(NOISE[:1000]) + bytes(8) + lzma.compress(NOISE[1000:]),
        bz2.compress(NOISE),
        bz2.compress(NOISE[:1000]) + bz2.compress(NOISE[1000:]),
        lz4.frame.compress(NOISE),
        lz4.frame.compress(NOISE[:1000]) + lz4.frame.compress(NOISE[1000:]),
    ],
    ids=[
        *("plain", "gzip", "members", "padded", "zstd", "frames", "skippable", "no-size"),
        *("xz", "xz-streams", "bzip2", "bzip2-streams", "lz4", "lz4-frames"),
    ],
)
def test_the_same_bytes_from_every_packing(tmp_path, packed):
    path = tmp_path / "file"
    path.write_bytes(packed)
    found, stream = read(path)
    assert found == NOISE
    assert stream.troubles == {}
    assert stream.read_bytes == stream.total_bytes == len(packed)


@pytest.mark.parametrize("pack", [gzip.compress, zstd, lzma.compress, bz2.compress, lz4.frame.compress])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_cut_file_gives_what_came_until_then(tmp_path_factory, pack, data):
    packed = noise_by(pack)
    cut = data.draw(st.integers(6, len(packed) - 1))
    path = tmp_path_factory.mktemp("cut") / "file"
    path.write_bytes(packed[:cut])
    try:
        found, stream = read(path)
    except UsageError as error:
        assert "holds nothing that can be unpacked" in str(error)
        assert cut < (1_000_000 if pack is bz2.compress else 200_000)  # a block of bzip2 is whole or nothing
        return
    assert NOISE.startswith(found)
    assert stream.troubles == {"unpacking_cut": 1}


@pytest.mark.parametrize(
    ("packed", "trouble"),
    [
        (gzip.compress(NOISE) + b"rubbish", "bytes_after_gzip"),
        (gzip.compress(NOISE)[:-6] + b"xxxxxx", "unpacking_damaged"),
        (zstd(NOISE) + b"rubbish", "unpacking_damaged"),
        (lzma.compress(NOISE) + b"rubbish-rubbish", "unpacking_damaged"),
        (bz2.compress(NOISE) + b"rubbish", "unpacking_damaged"),
        (lz4.frame.compress(NOISE) + b"rubbish", "unpacking_damaged"),
    ],
)
def test_damage_is_counted_and_what_came_before_is_kept(tmp_path, packed, trouble):
    path = tmp_path / "file"
    path.write_bytes(packed)
    found, stream = read(path)
    assert found == NOISE
    assert stream.troubles == {trouble: 1}


def test_bombs_are_read_in_small_pieces(tmp_path):
    """20 MB of zeros in a few kB: no piece is large, and how far the file is stays true."""
    zeros = bytes(2 * 10**7)
    packers = {"gz": gzip.compress, "zst": zstd, "xz": lzma.compress, "bz2": bz2.compress, "lz4": lz4.frame.compress}
    for name, pack in packers.items():
        packed = pack(zeros)
        path = tmp_path / name
        path.write_bytes(packed)
        stream = CaptureStream(path)
        sizes = [len(block) for block in stream.blocks()]
        stream.close()
        assert sum(sizes) == len(zeros)
        assert max(sizes) <= 2**20
        assert stream.read_bytes == len(packed) < len(zeros) // 100


def test_a_zstd_file_that_asks_for_much_memory_is_refused(tmp_path):
    path = tmp_path / "long.pcap.zst"
    large = zstandard.ZstdCompressionParameters(window_log=28)
    packer = zstandard.ZstdCompressor(compression_params=large).compressobj()
    path.write_bytes(packer.compress(CAPTURE) + packer.flush())
    with pytest.raises(UsageError, match=r"long.pcap.zst is packed with a window of more than 128 MiB"):
        read_captures(path)


def test_an_xz_file_that_asks_for_much_memory_is_refused(tmp_path):
    path = tmp_path / "long.pcap.xz"
    path.write_bytes(
        lzma.compress(
            CAPTURE,
            filters=[
                {
                    "id": lzma.FILTER_LZMA2,
                    "dict_size": 1 << 28,
                    "mode": lzma.MODE_FAST,
                    "mf": lzma.MF_HC3,
                    "nice_len": 8,
                }
            ],
        )
    )
    with pytest.raises(UsageError, match=r"long.pcap.xz is packed with a window of more than 128 MiB"):
        read_captures(path)


@pytest.mark.parametrize(("magic", "name"), [(b"PK\3\4....", "zip"), (b"7z\xbc\xaf\x27\x1c", "7z")])
def test_other_packings_are_named(tmp_path, magic, name):
    (tmp_path / "file").write_bytes(magic * 10)
    with pytest.raises(UsageError, match=f"packed with {name}"):
        read_captures(tmp_path / "file")


def test_a_pipe_and_standard_input_are_read(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(gzip.compress(CAPTURE)))
    writer.start()
    traffic = read_captures(pipe)
    writer.join()
    assert traffic.counts["packets"] == len(usual())
    code = "from ringtap.analysis.pcap.scan_captures import read_captures as r; print(r('-').counts['packets'])"
    done = subprocess.run([sys.executable, "-c", code], input=CAPTURE, capture_output=True, check=True, timeout=60)
    assert int(done.stdout) == len(usual())


def test_globs_and_directories_stand_for_their_captures(tmp_path):
    for name in ("eth0.pcap", "eth0.pcap1", "eth0.pcap10", "eth1.pcap.gz"):
        (tmp_path / name).write_bytes(gzip.compress(CAPTURE) if name.endswith("gz") else CAPTURE)
    (tmp_path / "packets.json").write_text("{}")
    (tmp_path / ".hidden.pcap").write_bytes(CAPTURE)
    (tmp_path / "folder.pcap").mkdir()
    assert [path.name for path in expand([tmp_path]).paths] == [
        "eth0.pcap",
        "eth0.pcap1",
        "eth0.pcap10",
        "eth1.pcap.gz",
    ]
    assert [path.name for path in expand([f"{tmp_path}/*.pcap*"]).paths] == [
        path.name for path in expand([tmp_path]).paths
    ]
    assert [path.name for path in expand([f"{tmp_path}/eth0.pcap?"]).paths] == ["eth0.pcap1"]
    assert expand(["-", tmp_path / "eth0.pcap"]).paths[0] is None
    odd = tmp_path / "what[1].pcap"
    odd.write_bytes(CAPTURE)
    assert expand([odd]) == ([odd], ())


def test_what_stands_for_nothing_is_said(tmp_path):
    (tmp_path / "notes.txt").write_text("no capture")
    for word, says in (
        (tmp_path / "no.pcap", "does not exist"),
        (tmp_path / "*.pcap", "no file matches"),
        (tmp_path, "is a directory without captures: 1 of 1 entry of .* left out: notes.txt does not begin as a"),
        ("a\0b", "does not exist"),
        ("x" * 5000, "cannot be read"),
    ):
        with pytest.raises(UsageError, match=says):
            expand([word])
    (tmp_path / "a.pcap").write_bytes(CAPTURE)
    (tmp_path / "b.pcap").symlink_to("a.pcap")
    with pytest.raises(UsageError, match=r"b.pcap is named twice"):
        expand([tmp_path])
    with pytest.raises(UsageError, match="named twice"):
        expand(["-", "-"])


def test_a_directory_reads_every_packing(tmp_path):
    packers = {"gz": gzip.compress, "zst": zstd, "xz": lzma.compress, "bz2": bz2.compress}
    for name, pack in packers.items():
        (tmp_path / f"a.pcap.{name}").write_bytes(pack(CAPTURE))
    assert read_captures(tmp_path).counts["packets"] == len(packers) * len(usual())


def test_what_a_directory_leaves_out_is_named_and_counted(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lz4", None)  # as if it were not installed
    folder = tmp_path / "captures"
    folder.mkdir()
    (folder / "a.pcap").write_bytes(CAPTURE)
    (folder / "b.pcap.lz4").write_bytes(b"\x04\x22\x4d\x18" + CAPTURE)
    (folder / "c.pcap").write_bytes(b"\0\0\0\0" + CAPTURE[4:])
    (folder / "d.pcap").touch()
    (folder / "e.pcap.gz").write_bytes(gzip.compress(CAPTURE)[:10] + bytes(100))
    (folder / "f").mkdir()
    (folder / "packets.json").write_text("{}")
    with pytest.warns(RingtapWarning) as warned:
        traffic = read_captures(folder)
    assert traffic.counts["packets"] == len(usual())
    (text,) = traffic.left_out
    assert [str(one.message) for one in warned] == [text]
    assert text.startswith(f"5 of 6 entries of {folder} left out: b.pcap.lz4 is packed with lz4: pip install lz4")
    for part in ("c.pcap does not begin as a capture does", "d.pcap is empty", "e.pcap.gz holds nothing that can be"):
        assert part in text
    assert text.endswith("f is a directory")
    assert traffic.select("tcp").left_out == (text,)
    assert main(["flows", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["left_out"] == [text]
    assert text in found["notes"]
    assert main(["flows", str(folder)]) == 0
    assert text in capsys.readouterr().out
    assert main(["packets", str(folder), "-o", str(tmp_path / "slice.pcapng")]) == 0
    assert text in capsys.readouterr().out
    assert expand([f"{folder}/*[af]*"]).left_out[0].endswith("f is a directory")


def test_a_damaged_file_that_is_named_is_refused(tmp_path):
    (tmp_path / "c.pcap").write_bytes(b"\0\0\0\0" + CAPTURE[4:])
    with pytest.raises(UsageError, match=r"c\.pcap"):
        read_captures(tmp_path / "c.pcap")
