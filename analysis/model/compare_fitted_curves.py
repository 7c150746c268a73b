"""Compares two fitted curves: the ratio of their times, and the loads at which they differ beyond chance."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import special

from ringtap.analysis.model.model_least_squares import jacobian
from ringtap.analysis.model.predict import Predictor
from ringtap.analysis.notebook_formatting import described, with_section
from ringtap.analysis.statistics.to_arrays import Array
from ringtap.core.errors import UsageError

if TYPE_CHECKING:
    from ringtap.analysis.model.fit_result import FitResult

_LOADS = 201  # loads at which the curves are compared
ALPHA = 0.05
_COLUMNS = {
    "bandwidth_gbps": "load",
    "ratio": "time of the second curve over that of the first",
    "low, high": "ends of the interval of the ratio",
    "differs": "True if the interval leaves out 1",
}


@dataclass(frozen=True, repr=False)
class FitComparison:
    """The times of a second curve over those of a first one.

    Attributes:
        p: probability of as large a difference by chance, at any load.
        differs: True if the difference is beyond chance at 5 %.
        ranges_gbps: lower and upper ends of the loads at which it is, ascending; empty without a difference.
        largest_gbps: load at which the difference is clearest.
        ratio: time of the second curve over that of the first at this load.
        low: lower end of its interval.
        high: upper end.
        table: `FitComparison.band`, one row per load.
    """

    p: float
    differs: bool
    ranges_gbps: tuple[tuple[float, float], ...]
    largest_gbps: float
    ratio: float
    low: float
    high: float
    table: pd.DataFrame = field(repr=False, compare=False)

    @property
    @with_section("Columns", _COLUMNS)
    def band(self) -> pd.DataFrame:
        """Ratio of the times with its interval, which holds at all loads together."""
        return self.table.copy()

    def __repr__(self) -> str:
        return f"<FitComparison: {self}>"

    def __str__(self) -> str:
        at = f"at {self.largest_gbps:.3g} Gbit/s the second curve takes {self.ratio:.3g} times as long"
        at += f" ({self.low:.3g} to {self.high:.3g})"
        p = "< 0.001" if self.p < 0.001 else f"= {self.p:.2g}"
        if not self.differs:
            return f"No difference beyond chance was found (p {p}); {at}."
        where = " and ".join(f"{low:.3g} to {high:.3g} Gbit/s" for low, high in self.ranges_gbps)
        return f"The curves differ beyond chance from {where} (p {p}); {at}."


def compare_fits(first: FitResult, second: FitResult) -> FitComparison:
    """Compare two fitted curves at the loads that both were measured at.

    The difference of ln t has a standard error from both fits (`Predictor.log_error`). Scheffé's method makes the
    intervals hold at all loads together (Miller, Simultaneous Statistical Inference, 1981, section 2.2), with as many
    dimensions as the difference of the curves can have, and degrees of freedom by Welch and Satterthwaite.

    Raises:
        UsageError: the fits have different capacities, no loads in common, or no standard errors.
    """
    if first.capacity_gbps != second.capacity_gbps:
        raise UsageError(
            f"curves for capacities of {first.capacity_gbps:g} and {second.capacity_gbps:g} Gbit/s have no loads in "
            "common: compare slowdowns at shares of the capacity instead"
        )
    ends = [(float(fit.bandwidth_gbps[0]), float(fit.bandwidth_gbps[-1])) for fit in (first, second)]
    low, high = max(one[0] for one in ends), min(one[1] for one in ends)
    if low >= high:
        raise UsageError(
            f"the fits have no loads in common: {ends[0][0]:g} to {ends[0][1]:g} and {ends[1][0]:g} to "
            f"{ends[1][1]:g} Gbit/s"
        )
    load = np.linspace(low, high, _LOADS)
    predictors = [Predictor.from_fit(fit) for fit in (first, second)]
    errors = [error for one in predictors if (error := one.log_error(load)) is not None]
    if len(errors) < len(predictors):
        raise UsageError("one of the fits has no standard errors, so chance cannot be judged: it needs more points")
    change = predictors[1].log_time(load) - predictors[0].log_time(load)
    parts = [error**2 for error in errors]
    error = np.sqrt(parts[0] + parts[1])
    freedom = error**4 / sum(part**2 / one.terms.freedom for part, one in zip(parts, (first, second), strict=True))
    dimensions = _dimensions(first, second, load)
    ratio_f = (change / error) ** 2 / dimensions
    chance = np.asarray(special.fdtrc(dimensions, freedom, ratio_f), np.float64)
    reach = np.sqrt(dimensions * special.fdtri(dimensions, freedom, 1 - ALPHA)) * error
    differs = np.asarray(chance < ALPHA)
    columns = {"bandwidth_gbps": load, "ratio": np.exp(change)}
    columns |= {"low": np.exp(change - reach), "high": np.exp(change + reach), "differs": differs}
    table = described(pd.DataFrame(columns), _COLUMNS)
    best = int(chance.argmin())
    row = table.iloc[best]
    return FitComparison(
        p=float(chance[best]),
        differs=bool(differs.any()),
        ranges_gbps=_ranges(load, differs),
        largest_gbps=float(row["bandwidth_gbps"]),
        ratio=float(row["ratio"]),
        low=float(row["low"]),
        high=float(row["high"]),
        table=table,
    )


def _dimensions(first: FitResult, second: FitResult, load: Array) -> int:
    """Return the rank of the gradients of both curves: 2 for two fits of one exponent, up to 6 for two free ones."""
    gradients = [jacobian(load, fit.capacity_gbps, fit.terms.b, fit.n, fit.free) for fit in (first, second)]
    columns = np.column_stack(gradients)
    return int(np.linalg.matrix_rank(columns / np.linalg.norm(columns, axis=0), tol=1e-6 * len(load)))


def _ranges(load: Array, differs: npt.NDArray[np.bool_]) -> tuple[tuple[float, float], ...]:
    edges = np.flatnonzero(np.diff(np.concatenate(([0], differs.astype(np.int8), [0]))))
    return tuple((float(load[begin]), float(load[end - 1])) for begin, end in edges.reshape(-1, 2))
