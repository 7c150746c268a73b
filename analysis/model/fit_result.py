"""Results of a fit of the general model (thesis, equation 3.7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ringtap.analysis.model.bootstrap import Interval
from ringtap.analysis.model.regression import Array
from ringtap.errors import UsageError

LEVEL = 0.95
Values = Sequence[float] | npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Terms:
    """Parameters of ln t = log_t0 + b ((C/(C-BW))^n - 1), the form in which a fit is solved, for predictions.

    Attributes:
        log_t0: ln of the time at no load, in seconds.
        b: dimensionless slope, B / C^n.
        covariance: covariance of log_t0, b and, if it was fitted, n; None if they cannot be distinguished.
        freedom: its degrees of freedom.
        scatter: standard deviation of ln t of one measured point around the curve.
    """

    log_t0: float
    b: float
    covariance: tuple[tuple[float, ...], ...] | None
    freedom: int
    scatter: float


@dataclass(frozen=True)
class FitResult:
    """One fit of equation 3.7, or the best of several.

    Attributes:
        A: factor, in seconds.
        B: numerator of the exponent, in (Gbit/s)^n.
        n: exponent; n = 1/2, 1 and 2 are equations 3.5, 3.3 and 3.6.
        C_gbps: capacity of the bottleneck, given and not fitted.
        free: True if n was fitted, too.
        space: ``log`` if ln t was fitted, ``linear`` if t was.
        r2: coefficient of determination of t; None if all times are equal or a prediction overflows.
        r2_log: coefficient of determination of ln t.
        deviance: -2 ln likelihood of the residuals of ln t up to constants; models are compared by it.
        aicc: Akaike's criterion from the deviance, corrected for few points; None if it is undefined.
        stderr: standard errors of A, B and n; None if undefined, and for n if it was given.
        warnings: limits of the numbers, one sentence each.
        bandwidth_gbps: loads of the points, ascending, shape (points,).
        iteration_s: times of the points in the same order, shape (points,).
        terms: the solution itself.
        weighted: True if the points were weighted by their own errors.
        between: standard deviation of ln t between points beyond those errors; None if they were not given.
        robust: True if outliers counted for less.
        intervals: bootstrap intervals of A, B and n (`bootstrap.parameter_intervals`); None if not requested.
        samples: number of resampled sets for the intervals.
        linear: the same model fitted to t itself; None if that does not converge, in a linear fit and in a robust one.
        candidates: all models that were compared, with the chosen one; empty if an exponent was given.
    """

    A: float
    B: float
    n: float
    C_gbps: float
    free: bool
    space: Literal["log", "linear"]
    r2: float | None
    r2_log: float | None
    deviance: float
    aicc: float | None
    stderr: dict[str, float | None]
    warnings: tuple[str, ...]
    bandwidth_gbps: Array = field(repr=False, compare=False)
    iteration_s: Array = field(repr=False, compare=False)
    terms: Terms = field(repr=False)
    weighted: bool = False
    between: float | None = None
    robust: bool = False
    intervals: dict[str, Interval] | None = None
    samples: int = 0
    linear: FitResult | None = field(default=None, repr=False)
    candidates: tuple[FitResult, ...] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        """Name of the model in reports, such as ``n = 1/2``, ``n = 2`` or ``n free``."""
        return "n free" if self.free else f"n = {'1/2' if self.n == 0.5 else f'{self.n:g}'}"

    def predict(self, bandwidth_gbps: Values) -> Array:
        """Return the iteration times in seconds at loads in Gbit/s; same shape as the argument.

        Raises:
            UsageError: a load is negative, at or past the capacity, or not a number.
        """
        load = np.asarray(bandwidth_gbps, dtype=np.float64)
        if not np.all((load >= 0) & (load < self.C_gbps)):
            raise UsageError(f"a load to predict at must be from 0 to below the capacity of {self.C_gbps:g} Gbit/s")
        with np.errstate(over="ignore"):
            result: Array = self.A * np.exp(self.B / (self.C_gbps - load) ** self.n)
        return result

    def report(self) -> str:
        """Return the fit as text for a terminal, of several lines."""
        target = ", ".join(["ln t", *["weighted"] * self.weighted, *["outliers held down"] * self.robust])
        lines = [
            f"t = A*exp(B/(C-BW)^n), C = {self.C_gbps:g} Gbit/s, {len(self.iteration_s)} points, fitted to {target}"
        ]
        for fit in self.candidates or (self,):
            mark = "*" if fit.name == self.name and self.candidates else " "
            lines.append(f"{mark} {fit.name:8s} {_numbers(fit)}")
            if fit.linear is not None:
                lines.append(f"  {'  on t':8s} {_numbers(fit.linear)}")
        if self.candidates:
            lines.append("* least AICc")
        if self.intervals is not None:
            shown = [
                f"{name} {low:.4g} to {high:.4g}"
                for name, (low, high) in self.intervals.items()
                if name != "n" or self.free
            ]
            lines.append(f"  95 % by bootstrap  {'  '.join(shown)}")
        lines += [f"  warning: {text}" for text in self.warnings]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain values for JSON, with the linear fit and the candidates nested."""
        item: dict[str, Any] = {"A": self.A, "B": self.B, "n": self.n, "C_gbps": self.C_gbps, "model": self.name}
        item |= {"space": self.space, "points": len(self.iteration_s), "r2": self.r2, "r2_log": self.r2_log}
        item |= {"aicc": self.aicc, "stderr": self.stderr, "warnings": list(self.warnings)}
        item["load_gbps"] = [float(self.bandwidth_gbps[0]), float(self.bandwidth_gbps[-1])]
        if self.space == "log":
            item |= {"weighted": self.weighted, "between": self.between, "robust": self.robust}
            item["terms"] = asdict(self.terms)
            item["linear"] = None if self.linear is None else self.linear.to_json()
        if self.intervals is not None:
            ends = {name: list(interval) for name, interval in self.intervals.items()}
            item["intervals"] = {"level": LEVEL, "samples": self.samples, **ends}
        if self.candidates:
            item["candidates"] = [fit.to_json() for fit in self.candidates]
        return item


def _numbers(fit: FitResult) -> str:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    parts = [f"{key} {getattr(fit, key):.4g} ± {shown(fit.stderr[key], '.2g')}" for key in ("A", "B")]
    parts.append(f"n {fit.n:.3g}" + (f" ± {shown(fit.stderr['n'], '.2g')}" if fit.free else ""))
    parts += [f"R² {shown(fit.r2, '.4f')}", f"R² log {shown(fit.r2_log, '.4f')}"]
    if fit.space == "log":
        parts.append(f"AICc {shown(fit.aicc, '.1f')}")
    return "  ".join(parts)
