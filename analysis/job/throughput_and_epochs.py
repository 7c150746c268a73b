"""Calculates a training job's samples/s, and reads the epochs that it printed with their loss and accuracy."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ringtap.core.errors import UsageError
from ringtap.core.run_directory_schema import JOB_OUTPUTS
from ringtap.core.units import counted
from ringtap.core.untrusted_files import open_regular

# field -> names by which jobs print it, in any case; a space also stands for "_"
NAMES = {
    "cumulative_s": ("cumulative time",),
    "epoch_s": ("epoch time",),
    "samples_per_s": ("images/sec", "samples/sec"),
    "loss": ("loss", "train loss", "training loss"),
    "accuracy": ("accuracy", "acc", "train accuracy", "train acc", "training accuracy"),
    "validation_loss": ("validation loss", "val loss"),
    "validation_accuracy": ("validation accuracy", "val accuracy", "val acc"),
}
_FIELDS = {name: key for key, names in NAMES.items() for name in names}
_ANY_NAME = "|".join(re.escape(name).replace(r"\ ", r"[\s_]+") for name in sorted(_FIELDS, key=len, reverse=True))
_NUMBER = r"[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?"
_VALUE = re.compile(rf"(?<![\w/])({_ANY_NAME})\s*[=:]\s*({_NUMBER})(?![\w/])\s*(%?)", re.IGNORECASE)
# "Epoch = 1:", "Epoch 1/10", "Epoch [1/10]"
_EPOCH = re.compile(r"(?<!\w)epoch\s*[=:]?\s*\[?(\d+)(?:/\d+)?\]?(?![\w.])", re.IGNORECASE)
_BATCH = re.compile(r"^(?:.*[>:] ?)?Batch per rank = (\d+)\s*$", re.MULTILINE)
_PROGRESS = re.compile(r"(\d+)\s*/\s*(\d+)")
# another word right before a name makes it a name of its own ("test accuracy"); a number's unit does not
_OTHER_WORD = re.compile(r"(?<![\da-z_])[a-z_]+\s*$|\d[a-z]{3,}\s*$", re.IGNORECASE)
_WRAPPED = re.compile(r"([=:,]|\b(?:cumulative|epoch|validation|val|train|training))[ \t]*\n[ \t]*", re.IGNORECASE)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_MAX_BYTES = 64 << 20  # of an output that is read


@dataclass(frozen=True)
class Given:
    """Choices and facts about a training job that its logs may not hold.

    Attributes:
        batch: samples of a rank in an iteration; None: as recorded or printed.
        output: file with the job's output; None: the output in the run directory, if there is any.
        target_accuracy: validation accuracy whose time is asked for; None: that of the best epoch.
        phase: number of the training phase that is described; None: the one that took the most time.
    """

    batch: int | None = None
    output: Path | None = None
    target_accuracy: float | None = None
    phase: int | None = None


@dataclass(frozen=True)
class Printed:
    """Epochs and batch size that a job printed.

    Attributes:
        source: file in which it was found, relative to the run directory; empty: none.
        epochs: one item per epoch with ``epoch`` and the keys of `NAMES`; None where the job did not print it.
        batch: samples of a rank in an iteration; None: not printed.
        precision: for each epoch half a unit of the last printed digit of ``epoch_s`` and of ``samples_per_s``.
    """

    source: str = ""
    epochs: tuple[dict[str, Any], ...] = ()
    batch: int | None = None
    precision: tuple[tuple[float, float], ...] = field(default=(), repr=False)


def read_output(run: Path, output: Path | None = None) -> Printed:
    """Read the first output of a job that has epochs or a batch size.

    Args:
        run: the job's run directory.
        output: a file to read instead of those in the run directory.

    Raises:
        UsageError: ``output`` cannot be read.
    """
    paths = [output] if output else [path for pattern in JOB_OUTPUTS for path in sorted(run.glob(pattern))]
    for path in paths:
        try:
            with open_regular(path) as file:
                text = file.read(_MAX_BYTES).decode(errors="replace")
        except OSError as error:
            if output:
                raise UsageError(f"{path} cannot be read: {error.strerror}") from error
            continue
        source = str(path.relative_to(run) if path.is_relative_to(run) else path)
        found = parse_output(text, source)
        if found.epochs or found.batch:
            return found
    return Printed()


def parse_output(text: str, source: str = "") -> Printed:
    """Find the epochs and the batch size in a job's output; of an epoch that is printed twice, the first counts.

    Lines may be wrapped. Values that a job prints within an epoch (``45/100`` before them) do not count.
    """
    found: dict[int, dict[str, tuple[float, float]]] = {}
    for number, values in _epochs(text):
        if values:
            found.setdefault(number, values)
    epochs = [{"epoch": number} | {key: _value(values, key) for key in NAMES} for number, values in found.items()]
    seconds = list(itertools.accumulate(epoch["epoch_s"] or math.nan for epoch in epochs))
    for epoch, cumulative_s in zip(epochs, seconds, strict=True):
        if epoch["cumulative_s"] is None and not math.isnan(cumulative_s):
            epoch["cumulative_s"] = cumulative_s
    precision = [
        tuple(values.get(key, (0.0, 0.0))[1] for key in ("epoch_s", "samples_per_s")) for values in found.values()
    ]
    batch = _BATCH.search(text)
    return Printed(
        source=source,
        epochs=tuple(epochs),
        batch=int(batch[1]) or None if batch else None,
        precision=tuple((half[0], half[1]) for half in precision),
    )


def _value(values: dict[str, tuple[float, float]], key: str) -> float | None:
    value = values[key][0] if key in values else None
    # above 1 without a percent sign, an accuracy may be anything
    return None if value is not None and "accuracy" in key and value > 1 else value


def _epochs(text: str) -> Iterator[tuple[int, dict[str, tuple[float, float]]]]:
    """Yield the number and the values of each mark of an epoch, each value with half a unit of its last digit."""
    number, total = None, ""
    values: dict[str, tuple[float, float]] = {}
    for line in re.split(r"[\r\n\b]+", _WRAPPED.sub(r"\1 ", _COLOURS.sub("", text))):
        mark = _EPOCH.search(line)
        progress = _PROGRESS.search(line, mark.end() if mark else 0)
        if progress and int(progress[1]) < int(progress[2]):
            continue
        if mark:
            if number is not None:
                yield number, values
            number, values = int(mark[1]), {}
        # the values stand beside the mark, or in the first line below it that has some; Keras repeats that line
        if number is not None and (not values or (progress and progress[2] == total)):
            total = progress[2] if progress else ""
            values = _values(line[mark.end() :] if mark else line) | values
    if number is not None:
        yield number, values


def _values(text: str) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for match in _VALUE.finditer(text):
        if not _OTHER_WORD.search(text, max(match.start() - 40, 0), match.start()):
            name = re.sub(r"[\s_]+", " ", match[1].lower())
            unit = 0.01 if match[3] and "accuracy" in _FIELDS[name] else 1.0
            digits = len(match[2].partition(".")[2]) if "e" not in match[2].lower() else 0
            found.setdefault(_FIELDS[name], (float(match[2]) * unit, 0.5 * 10.0**-digits * unit))
    return found


def throughput(
    printed: Printed, given: Given, recorded: object, ranks: int, steps: int, mean_s: float | None
) -> dict[str, Any]:
    """Return the samples/s of a job: ranks times batch over the mean iteration time.

    Args:
        printed: what the job printed.
        given: what the user says of it.
        recorded: the batch in run.json, if it has one.
        ranks: number of ranks.
        steps: steps of a rank.
        mean_s: mean iteration time; None: not known.

    Returns:
        ``samples_per_s``, ``batch`` (samples of a rank in an iteration), ``ranks``, ``batch_from`` (``given``,
        ``plan``, ``printed`` or ``epochs``), and ``why`` it is not known, if so.
    """
    batch, source, why = _batch(printed, given, recorded, ranks, steps)
    if batch is not None and mean_s is None:
        why = "no whole iteration was recorded"
    rate = ranks * batch / mean_s if batch and mean_s and ranks else None
    return {"samples_per_s": rate, "batch": batch, "ranks": ranks, "batch_from": source, "why": why}


def _batch(
    printed: Printed, given: Given, recorded: object, ranks: int, steps: int
) -> tuple[int | None, str | None, str]:
    """Return the batch, its origin, and why it is not known."""
    known = {"given": given.batch, "plan": recorded, "printed": printed.batch}
    for source, batch in known.items():
        if isinstance(batch, int) and batch:
            return batch, source, ""
    unknown = "the batch size is not known: give it with --batch N"
    if not printed.epochs or not all(epoch["epoch_s"] and epoch["samples_per_s"] for epoch in printed.epochs):
        return None, None, unknown
    each, rest = divmod(steps, len(printed.epochs))
    if rest or not each or not ranks:
        epochs = counted(len(printed.epochs), "printed epoch")
        return None, None, f"{counted(steps, 'step')} are not the same whole number in each of {epochs}; {unknown}"
    # samples of an epoch, within the digits that were printed, over those of an epoch with a batch of 1
    batches = set[int]()
    for epoch, (half_s, half_rate) in zip(printed.epochs, printed.precision, strict=True):
        ends = [
            (epoch["epoch_s"] + sign * half_s) * (epoch["samples_per_s"] + sign * half_rate) / (each * ranks)
            for sign in (-1, 1)
        ]
        batches |= set(range(math.ceil(ends[0]), math.floor(ends[1]) + 1)) or {0}
    if len(batches) == 1 and (batch := batches.pop()):
        return batch, "epochs", ""
    return None, None, f"the printed rates and times are no whole number of samples in each step; {unknown}"


def summarize_epochs(printed: Printed, given: Given) -> dict[str, Any]:
    """Return the epochs and the time to an accuracy as plain values.

    Returns:
        ``rows`` (as `Printed.epochs`), ``source``, ``samples_per_s`` (mean by the job's own prints), ``target``: the
        first epoch with at least the target accuracy, or the best one without a target (``target_accuracy``,
        ``epoch``, ``validation_accuracy``, ``cumulative_s``), and ``why`` there is no such epoch, if so.
    """
    rows = list(printed.epochs)
    timed = [row for row in rows if row["epoch_s"] and row["samples_per_s"]]
    seconds = sum(row["epoch_s"] for row in timed)
    mean = sum(row["samples_per_s"] * row["epoch_s"] for row in timed) / seconds if timed else None
    target, why = given.target_accuracy, ""
    item: dict[str, Any] = {"rows": rows, "source": printed.source, "samples_per_s": mean, "target": None}
    judged = [row for row in rows if row["validation_accuracy"] is not None]
    if not judged:
        why = "no epoch with a validation accuracy was printed" if rows else "no output with epochs was found"
        return item | {"target_accuracy": target, "why": why}
    best = max(judged, key=lambda row: row["validation_accuracy"])
    reached = best if target is None else next((row for row in judged if row["validation_accuracy"] >= target), None)
    if reached is None:
        why = f"the best validation accuracy is {best['validation_accuracy']:.3f}, in epoch {best['epoch']}"
    else:
        item["target"] = {key: reached[key] for key in ("epoch", "validation_accuracy", "cumulative_s")}
    return item | {"target_accuracy": target, "why": why}
