"""Tells, step by step, which optimizer steps end an iteration, for readers of a job that still runs.

`ringtap.analysis.runs.group_steps_into_iterations` has the same rules for a whole log; a test compares the two.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Generic, TypeVar

from ringtap.core.run_directory_schema import MAX_STEPS_IN_A_ROW, REGULAR_SHARE

Step = TypeVar("Step")
_ROUNDS_KEPT = 20
_MAX_RUNS = 10_000  # optimizers that are expected to step again
_MIN_ROUNDS = 4  # fewer do not tell regular rounds from irregular ones


class IterationEnds(Generic[Step]):
    """The ends of iterations of one process.

    Marks end an iteration as soon as there is one. Else each step of the optimizer that steps alone does. If several
    alternate, the last step of each round does, or, where these make no regular rounds, each step of the one with the
    most steps.

    Attributes:
        stretch: changes when iterations end by another rule, or those of another optimizer begin: times between ends of
            different stretches are no iterations.
        is_reread: True if the steps before this stretch were not what they seemed.
    """

    def __init__(self) -> None:
        self.stretch = 0
        self.is_reread = False
        self._is_marked = False
        self._previous: Step | None = None
        self._runs: list[list[int]] = []  # optimizer and steps of each run of the round, or of the last short runs
        self._steps = 0  # in them
        self._seen: set[int] = set()  # their optimizers
        self._rounds: deque[tuple[tuple[int, int], ...]] = deque(maxlen=_ROUNDS_KEPT)
        self._in_rounds = self._is_ended = False
        self._usual_steps = 0  # of the last whole round
        self._most: int | None = None  # the optimizer whose steps count, if rounds are irregular

    def add(self, step: Step, optimizer: int, is_mark: bool = False) -> Step | None:
        """Add a step or a mark.

        Args:
            step: anything that stands for it.
            optimizer: number of its optimizer.
            is_mark: True for a mark.

        Returns:
            The step that ended an iteration: this one, or the one before it; None if none did.
        """
        is_end, was_end = self._look(optimizer, is_mark)
        previous, self._previous = self._previous, step
        return step if is_end else previous if was_end else None

    def _look(self, optimizer: int, is_mark: bool) -> tuple[bool, bool]:
        """Return whether a step ends an iteration, and whether the one before it did, as this one shows."""
        if is_mark and not self._is_marked:
            self._is_marked = True
            self._begin(True)
        if self._is_marked:
            return is_mark, False
        if self._runs and self._runs[-1][0] == optimizer:
            self._runs[-1][1] += 1
            self._steps += 1
            if self._runs[-1][1] == MAX_STEPS_IN_A_ROW + 1:
                if self._in_rounds:
                    self._begin(False)
                self._in_rounds = False
                self._keep(self._runs[-1:])
            return self._ends(optimizer), False
        was_end = False
        if self._runs and self._runs[-1][1] > MAX_STEPS_IN_A_ROW:
            self._keep([])
        if optimizer in self._seen:
            if not self._in_rounds:  # those before it are of an earlier stretch
                first = next(number for number, run in enumerate(self._runs) if run[0] == optimizer)
                self._keep(self._runs[first:])
            was_end = self._close()
        elif not self._in_rounds or self._is_ended:
            if self._in_rounds or len(self._runs) == _MAX_RUNS:  # the round is over, and this optimizer is not of it
                self._in_rounds = False
                self._keep([])
            self._begin(False)
        self._runs.append([optimizer, 1])
        self._seen.add(optimizer)
        self._steps += 1
        return self._ends(optimizer), was_end

    def _keep(self, runs: list[list[int]]) -> None:
        self._runs, self._seen, self._steps = runs, {one for one, _ in runs}, sum(steps for _, steps in runs)

    def _begin(self, is_reread: bool) -> None:
        self.stretch += 1
        self.is_reread = is_reread

    def _close(self) -> bool:
        """End a round, the first of which shows that there are rounds; return True if its end was not known before."""
        counts = Counter[int]()
        for optimizer, steps in self._runs:
            counts[optimizer] += steps
        self._rounds.append(tuple(sorted(counts.items())))
        self._usual_steps = self._steps
        self._keep([])
        was_ended, self._is_ended = self._is_ended, False
        if not self._in_rounds:
            self._rounds = deque(list(self._rounds)[-1:], _ROUNDS_KEPT)
            self._in_rounds, self._most = True, None
            self._begin(True)
            return True
        usual = Counter(self._rounds).most_common(1)[0][1]
        is_irregular = len(self._rounds) >= _MIN_ROUNDS and usual < REGULAR_SHARE * len(self._rounds)
        if is_irregular != (self._most is not None):
            self._begin(True)
            totals = Counter[int]()
            for one in self._rounds:
                totals.update(dict(one))
            self._most = min(totals, key=lambda one: (-totals[one], one)) if is_irregular else None
        return not was_ended and self._most is None

    def _ends(self, optimizer: int) -> bool:
        """Return True if a step ends an iteration: a round that has the same steps as the one before it is over."""
        if not self._in_rounds:
            return True
        if self._most is not None:
            return optimizer == self._most
        if self._is_ended or self._steps != self._usual_steps:
            return False
        self._is_ended = tuple(sorted((one, steps) for one, steps in self._runs)) == self._rounds[-1]
        return self._is_ended
