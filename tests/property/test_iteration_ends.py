"""The rules of a whole log and those of a log that grows agree, and every step is counted once."""

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringtap.analysis.runs.group_steps_into_iterations import MOST, find_stretches, process_marks
from ringtap.core.iteration_end_detector import IterationEnds
from ringtap.core.run_directory_schema import MARK_RECORD, MAX_STEPS_IN_A_ROW

pytestmark = [pytest.mark.computes, pytest.mark.long]

# steps of each optimizer in a round, and the number of rounds
eras = st.lists(
    st.tuples(st.lists(st.integers(1, MAX_STEPS_IN_A_ROW + 4), min_size=1, max_size=4), st.integers(1, 12)),
    min_size=1,
    max_size=4,
)
sequences = st.lists(st.integers(0, 3), max_size=80)


def steps_of(found: list[tuple[list[int], int]]) -> list[int]:
    """Steps of eras, each with optimizers of its own."""
    steps, first = [], 0
    for counts, rounds in found:
        steps += [first + place for _ in range(rounds) for place, count in enumerate(counts) for _ in range(count)]
        first += len(counts)
    return steps


def ends_of(optimizers: list[int], marks: set[int] = frozenset()) -> list[int]:
    """The ends of iterations of the last stretch, as a reader of a growing log sees them."""
    rule, stretch, ends = IterationEnds[int](), 0, []
    for number, optimizer in enumerate(optimizers):
        ended = rule.add(number, optimizer, number in marks)
        if rule.stretch != stretch:
            stretch = rule.stretch
            ends.clear()
        if ended is not None:
            ends.append(ended)
    return ends


@settings(max_examples=300)
@given(eras)
def test_a_growing_log_ends_with_the_last_stretch_of_the_whole_one(found):
    optimizers = steps_of(found)
    last = find_stretches(np.array(optimizers), np.zeros(len(optimizers), int))[-1]
    assert ends_of(optimizers) == last.ends.tolist()


@settings(max_examples=300)
@given(sequences, st.sets(st.integers(0, 79)))
def test_every_step_is_in_one_stretch_and_iterations_end_in_theirs(optimizers, marks):
    kinds = np.array([MARK_RECORD * (number in marks) for number in range(len(optimizers))], np.int64)
    found = find_stretches(np.array(optimizers, np.int64), kinds)
    edges = [0, *(stretch.end for stretch in found)]
    assert [stretch.begin for stretch in found] == edges[:-1]
    assert edges[-1] == len(optimizers)
    for stretch in found:
        ends = stretch.ends.tolist()
        assert ends == sorted(set(ends))
        assert all(stretch.begin <= end < stretch.end for end in ends)
        if stretch.mode != MOST and stretch.counts and not any(kinds[stretch.begin : stretch.end]):
            assert set(stretch.counts) == set(optimizers[stretch.begin : stretch.end])


@settings(max_examples=200)
@given(st.lists(st.tuples(sequences, st.sets(st.integers(0, 79), max_size=3)), min_size=1, max_size=3))
def test_steps_and_their_time_are_counted_once(processes):
    rows = []
    for process, (optimizers, marks) in enumerate(processes):
        for number, optimizer in enumerate(optimizers):
            kind = MARK_RECORD if number in marks else 0
            rows.append((process, optimizer, kind, 10 * number, 10 * number + 4, number % 3, number % 2))
    names = ["process", "optimizer", "kind", "start_ns", "end_ns", "backwards", "passes_ns"]
    steps = pd.DataFrame(rows, columns=names, dtype="int64")
    steps = steps.assign(start_mono_ns=steps["start_ns"], end_mono_ns=steps["end_ns"])
    marks, stretches = process_marks(steps)
    is_step = steps["kind"] != MARK_RECORD
    assert stretches["steps"].sum() == is_step.sum()
    assert (marks["stretch"].value_counts().reindex(stretches.index, fill_value=0) == stretches["iterations"]).all()
    spent_ns = (4 - steps["passes_ns"])[is_step].sum()
    if not stretches["left_out"].any():
        assert marks["optimizer_ns"].sum() == spent_ns
    assert marks["optimizer_ns"].sum() <= spent_ns
    assert marks["backwards"].sum() <= steps["backwards"].sum()
