"""The second look at a capture is the first's, as long as nothing has changed."""

import os
from pathlib import Path

import numpy as np
import pytest

from ringtap.analysis.pcap import scan_cache as caches
from ringtap.analysis.pcap import scan_captures
from ringtap.analysis.pcap.scan_captures import read_captures
from ringtap.core.errors import UsageError
from tests.unit.capture_makers import A4, B4, classic, frames, spaced, udp

pytestmark = [pytest.mark.computes, pytest.mark.together]

BIG = [udp(A4, B4, (9, 9 + number % 3), 8_000) for number in range(150)]


@pytest.fixture
def capture(tmp_path, monkeypatch):
    monkeypatch.setattr(caches, "cache_folder", lambda: tmp_path / "user")
    path = tmp_path / "eth0-0.pcap"
    path.write_bytes(classic(frames(spaced(BIG))))
    assert path.stat().st_size > 2**20
    return path


@pytest.fixture
def scans(monkeypatch):
    """Counts the files that were really read."""
    made = []
    scan = scan_captures.Scan

    def counted(*arguments, **options):
        made.append(arguments)
        return scan(*arguments, **options)

    monkeypatch.setattr(scan_captures, "Scan", counted)
    return made


def tables(traffic):
    return [traffic.scanned.conversations, traffic.scanned.cells, traffic.scanned.queue_pairs, traffic.counts]


def same(one, other):
    return one.start_ns == other.start_ns and all(
        np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b
        for a, b in zip(tables(one), tables(other), strict=True)
    )


def hidden(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_the_second_look_reads_nothing_and_finds_the_same(capture, scans):
    first = read_captures(capture)
    second = read_captures(capture)
    assert len(scans) == 1
    assert same(first, second)
    assert isinstance(second.scanned.cells, np.memmap)
    assert second.binned(what="packets").sum() == len(BIG)
    assert len(hidden(capture.parent)) == 1


def test_no_pattern_takes_the_cache_for_a_capture(capture):
    read_captures(capture)
    for pattern in ("*.pcap*", "*pcap", "*.pcap"):
        assert list(capture.parent.glob(pattern)) == [capture]
    assert read_captures(capture.parent).files == (str(capture),)


@pytest.mark.parametrize("change", ["touch", "grow", "replace"])
def test_a_capture_that_changed_is_read_again_and_has_one_cache(capture, scans, change):
    read_captures(capture)
    before = capture.stat()
    if change == "touch":
        os.utime(capture, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    elif change == "grow":
        capture.write_bytes(classic(frames(spaced([*BIG, BIG[0]]))))
        os.utime(capture, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        other = capture.with_name("other")
        other.write_bytes(capture.read_bytes())
        os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
        other.replace(capture)
    again = read_captures(capture)
    assert len(scans) == 2
    assert again.counts["packets"] == len(BIG) + (change == "grow")
    assert len(hidden(capture.parent)) == 1
    read_captures(capture)
    assert len(scans) == 2


def test_other_bins_and_another_reader_read_again(capture, scans, monkeypatch):
    read_captures(capture)
    assert read_captures(capture, bin_s=0.0005).bin_ns == 500_000
    assert len(scans) == 2
    monkeypatch.setattr(caches, "_engine", lambda: "newer")
    read_captures(capture, bin_s=0.0005)
    assert len(scans) == 3
    assert len(hidden(capture.parent)) == 1


@pytest.mark.parametrize("place", [0, 1, -20, -44, -300])
def test_a_damaged_cache_is_read_over_and_made_anew(capture, scans, place):
    first = read_captures(capture)
    (cache,) = (path for path in capture.parent.iterdir() if path.name.startswith("."))
    whole = bytearray(cache.read_bytes())
    if place in (0, 1):  # cut
        del whole[len(whole) * place // 2 :]
    else:
        whole[place] ^= 0xFF
    cache.unlink()  # the first look's cells are mapped from it
    cache.write_bytes(whole)
    assert same(read_captures(capture), first)
    assert len(scans) == 2
    read_captures(capture)
    assert len(scans) == 2


def test_damaged_cells_are_a_sentence(capture):
    read_captures(capture)
    (cache,) = (path for path in capture.parent.iterdir() if path.name.startswith("."))
    whole = bytearray(cache.read_bytes())
    whole[0:8] = b"\xff" * 8
    cache.unlink()  # the first look's cells are mapped from it
    cache.write_bytes(whole)
    with pytest.raises(UsageError, match="cache of a capture is damaged"):
        read_captures(capture).binned()


@pytest.mark.needs_root("give a file away")
def test_anothers_cache_is_not_believed(capture, scans, monkeypatch):
    read_captures(capture)
    (cache,) = (path for path in capture.parent.iterdir() if path.name.startswith("."))
    os.chown(cache, 12345, 12345)
    read_captures(capture)
    assert len(scans) == 2


def test_where_nothing_can_be_written_beside_the_users_folder_takes_it(capture, scans, monkeypatch, tmp_path):
    mkstemp = caches.tempfile.mkstemp

    def refused(dir, **options):
        if Path(dir) == capture.parent:
            raise PermissionError(13, "Permission denied")
        return mkstemp(dir=dir, **options)

    monkeypatch.setattr(caches.tempfile, "mkstemp", refused)
    read_captures(capture)
    read_captures(capture)
    assert len(scans) == 1
    assert hidden(capture.parent) == []
    assert len(list((tmp_path / "user" / "flows").iterdir())) == 1
    # captures that are gone take their caches with them
    other = capture.with_name("b.pcap")
    capture.rename(other)
    read_captures(other)
    assert [path.name[:6] for path in (tmp_path / "user" / "flows").iterdir()] == ["b_pcap"]


def test_without_a_cache_nothing_is_left(capture, scans):
    read_captures(capture, cache=False)
    assert hidden(capture.parent) == []
    read_captures(capture)
    read_captures(capture, cache=False)
    assert len(scans) == 3


def test_the_cache_may_be_read_by_those_who_may_read_the_capture(capture):
    capture.chmod(0o640)
    read_captures(capture)
    (cache,) = (path for path in capture.parent.iterdir() if path.name.startswith("."))
    assert cache.stat().st_mode & 0o777 == 0o640


def test_small_captures_have_none(tmp_path):
    path = tmp_path / "small.pcap"
    path.write_bytes(classic(frames(spaced(BIG[:10]))))
    read_captures(path)
    assert hidden(tmp_path) == []


def test_a_capture_that_is_being_written_leaves_no_cache(capture, monkeypatch):
    keep = caches.Pending.keep

    def grown(self, scanned):
        with capture.open("ab") as file:
            file.write(b"more")
        return keep(self, scanned)

    monkeypatch.setattr(caches.Pending, "keep", grown)
    assert read_captures(capture).counts["packets"] == len(BIG)
    assert hidden(capture.parent) == []


def test_cells_that_memory_does_not_hold_are_the_cache(capture, scans, monkeypatch):
    from ringtap.analysis.pcap import scan

    whole = read_captures(capture, cache=False)
    monkeypatch.setattr(scan, "_CELLS_IN_MEMORY", 2)
    first = read_captures(capture)
    second = read_captures(capture)
    assert len(scans) == 2
    assert np.array_equal(np.sort(whole.scanned.cells), np.sort(second.scanned.cells))
    assert same(first, second)
