"""Damaged captures of every kind: no crash, no hang, bounded memory, and sums that agree.

RINGTAP_FUZZ_MUTANTS=1000000 makes it a million, from another seed with RINGTAP_FUZZ_SEED=N.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.pcap_mutants import LINKS, Guarded, Mutants, check, same, scan
from tests.unit.analysis.pcap.test_scan_beside_tshark import KINDS
from tests.unit.capture_makers import Blocks, Packet, classic

pytestmark = [pytest.mark.computes, pytest.mark.long, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = int(os.environ.get("RINGTAP_FUZZ_MUTANTS", "5000"))
SEED = int(os.environ.get("RINGTAP_FUZZ_SEED", "1"))
SHARE = 50_000  # mutants of one process


@pytest.mark.timeout(0 if MUTANTS > SHARE else 300)
def test_damaged_captures(tmp_path: Path) -> None:
    broken: list[str] = []
    captures = first = 0
    while first < MUTANTS and len(broken) < 20:
        found, first = judge_some(first, min(first + SHARE, MUTANTS), tmp_path)
        captures += found["captures"]
        broken += found["broken"]
    assert not broken, f"of seed {SEED}:\n" + "\n".join(broken[:20])
    # mutants that are all refused at the first byte would show nothing
    assert captures > MUTANTS // 2


def judge_some(first: int, end: int, folder: Path) -> tuple[dict[str, Any], int]:
    """Judge mutants in a process of their own; what it found, and where to go on, which is behind one that ends it."""
    progress = folder / "progress"
    progress.write_bytes(bytes(8))
    command = [sys.executable, "-m", "tests.property.pcap_mutants", *map(str, (SEED, first, end - first, progress))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode == 0:
        return dict(json.loads(done.stdout)), end
    last = (done.stderr.strip() or "no word why").splitlines()[-1]
    number = int.from_bytes(progress.read_bytes(), "little", signed=True)
    if number < 0:
        return {"captures": 0, "broken": [f"a frame cut short ended the process with {done.returncode}: {last}"]}, end
    kept = folder / f"mutant-{SEED}-{number}"
    kept.write_bytes(Mutants().make(SEED, number)[0])
    words = f"mutant {number} ended the process with {done.returncode} (kept as {kept}): {last}"
    return {"captures": 0, "broken": [words]}, number + 1


@pytest.fixture(scope="module")
def guarded() -> Guarded:
    return Guarded(1 << 20)


CAPTURES = {name: make() for name, make in KINDS.items() if name not in ("gz", "zst", "pcapng_gz")}


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(CAPTURES)), data=st.data())
def test_any_split_of_the_stream_finds_the_same(guarded: Guarded, name: str, data: st.DataObject) -> None:
    capture = CAPTURES[name]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(capture)), max_size=12)))
    whole = scan(capture, guarded, [])
    assert whole is not None
    check(whole, None)
    assert same(whole, scan(capture, guarded, cuts))


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(CAPTURES)), data=st.data())
def test_cut_off_anywhere(guarded: Guarded, name: str, data: st.DataObject) -> None:
    """What came before the cut is what it is in the whole; the rest is told as torn."""
    capture = CAPTURES[name]
    length = data.draw(st.integers(24, len(capture)))
    whole, cut = scan(capture, guarded, []), scan(capture[:length], guarded, [])
    assert whole is not None
    if cut is None:  # not even the first header is whole
        assert length < 28
        return
    check(cut, None)
    assert cut.counts["packets"] <= whole.counts["packets"]
    if length == len(capture):
        assert same(whole, cut)


@settings(max_examples=200, deadline=None)
@given(
    link=st.sampled_from(LINKS),
    contents=st.lists(st.tuples(st.binary(max_size=120), st.integers(0, 2**16)), max_size=10),
    modern=st.booleans(),
    order=st.sampled_from("<>"),
)
def test_any_frames(guarded: Guarded, link: int, contents: list[tuple[bytes, int]], modern: bool, order: str) -> None:
    packets = [Packet(10**9, data, len(data) + more) for data, more in contents]
    if modern:
        blocks = Blocks(order).interface(link)
        for one in packets:
            blocks.packet(one)
        capture = blocks.bytes()
    else:
        capture = classic(packets, link, order)
    found = scan(capture, guarded, [])
    assert found is not None
    check(found, len(packets))
    assert found.counts["bytes"] == sum(one.length for one in packets)
