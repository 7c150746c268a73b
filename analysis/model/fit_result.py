"""Holds the results of a fit of the general model (thesis, equation 3.7)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from ringtap.analysis.model.model_least_squares import Interval
from ringtap.analysis.notebook_formatting import documented, html_of_text
from ringtap.analysis.statistics.quantiles import LEVEL
from ringtap.analysis.statistics.to_arrays import Array, Values, as_gbps
from ringtap.core.check_api_arguments import instance_of, path_of
from ringtap.core.errors import UsageError, did_you_mean
from ringtap.core.json_validation import ShapeError, load_json
from ringtap.core.units import counted

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from ringtap.analysis.model.compare_fitted_curves import FitComparison
    from ringtap.analysis.model.predict import AllowedLoad

BandKind = Literal["curve", "point"]
_POINTS = ("bandwidth_gbps", "iteration_s")


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


@dataclass(frozen=True, repr=False)
class FitResult:
    """One fit of equation 3.7, or the best of several.

    Attributes:
        A: factor, in seconds.
        B: numerator of the exponent, in (Gbit/s)^n.
        n: exponent; n = 1/2, 1 and 2 are equations 3.5, 3.3 and 3.6.
        capacity_gbps: capacity of the bottleneck, given and not fitted.
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
        robust: True if outliers were looked for and left out.
        intervals: bootstrap intervals of A, B and n, or Student's t if robust with a given n; None if not requested.
        samples: number of resampled sets for the intervals.
        linear: the same model fitted to t itself; None if that does not converge, and in a linear fit.
        candidates: all models that were compared, with the chosen one; empty if an exponent was given.
        max_load_gbps: load up to which points were fitted; None: all were.
    """

    A: float
    B: float
    n: float
    capacity_gbps: float
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
    max_load_gbps: float | None = None

    @property
    def name(self) -> str:
        """Name of the model in reports, such as ``n = 1/2``, ``n = 2`` or ``n free``."""
        return "n free" if self.free else f"n = {'1/2' if self.n == 0.5 else f'{self.n:g}'}"

    @property
    def range(self) -> str:
        """Range of the fitted points as text, such as ``up to 17 Gbit/s``; empty if all were fitted."""
        return "" if self.max_load_gbps is None else f"up to {self.max_load_gbps:g} Gbit/s"

    @property
    def formula(self) -> str:
        """The curve with its numbers: t in s, BW in Gbit/s."""
        return f"t = {self.A:.4g}·exp({self.B:.4g}/({self.capacity_gbps:g}−BW)^{self.n:.3g})"

    def __repr__(self) -> str:
        return f"<FitResult {self.formula}: {counted(len(self.iteration_s), 'point')}, R² {self.r2:.4f}>"

    def _repr_html_(self) -> str:
        return html_of_text(self.report())

    def predict(self, bandwidth_gbps: Values) -> Array:
        """Return the iteration times in seconds at loads in Gbit/s; same shape as the argument.

        Raises:
            UsageError: a load is negative, at or past the capacity, or not a number.
        """
        load = self._checked(bandwidth_gbps)
        with np.errstate(over="ignore"):
            result: Array = self.A * np.exp(self.B / (self.capacity_gbps - load) ** self.n)
        return result

    def _checked(self, bandwidth_gbps: Values) -> Array:
        load = as_gbps(bandwidth_gbps, self.capacity_gbps)
        if not load.size:
            raise UsageError("there is no load to predict at: name at least one")
        if not np.all((load >= 0) & (load < self.capacity_gbps)):
            raise UsageError(
                f"a load to predict at must be from 0 to below the capacity of {self.capacity_gbps:g} Gbit/s"
            )
        return load

    @documented(
        {
            "bandwidth_gbps": "load",
            "iteration_s": "time on the curve",
            "low_s, high_s": "ends of the interval",
        }
    )
    def band(self, bandwidth_gbps: Values, kind: BandKind = "curve") -> pd.DataFrame:
        """Iteration times at loads with their 95 % interval, over all models that were compared.

        Args:
            bandwidth_gbps: loads in Gbit/s, from 0 to below the capacity.
            kind: ``curve`` for the interval of the curve, ``point`` for that of a newly measured mean.

        Returns:
            One row per load; the interval is NA for a fit without standard errors.

        Raises:
            UsageError: a load outside of this range, or an unknown kind.
        """
        import pandas as pd

        from ringtap.analysis.model.predict import Predictor

        if kind not in ("curve", "point"):
            raise UsageError(
                f"a band of kind {kind!r} is not known: {did_you_mean(kind, get_args(BandKind))}give curve or point"
            )
        load = self._checked(bandwidth_gbps).reshape(-1)
        iteration_s, low_s, high_s = Predictor.from_fit(self).band(load, kind)
        columns = {"bandwidth_gbps": load, "iteration_s": iteration_s, "low_s": low_s, "high_s": high_s}
        return pd.DataFrame(columns).astype({"low_s": "Float64", "high_s": "Float64"})

    def load_for(self, slowdown: float) -> AllowedLoad:
        """Return the load at which an iteration takes ``slowdown`` times as long as without cross traffic.

        Raises:
            UsageError: the slowdown is below 1, or the fitted time does not grow with the load.
        """
        from ringtap.analysis.model.predict import Predictor

        return Predictor.from_fit(self).load_for(slowdown)

    def compare(self, other: FitResult) -> FitComparison:
        """Compare the curve of another fit with this one: is the difference beyond chance, and at which loads?

        Raises:
            UsageError: the fits have different capacities, no loads in common, or no standard errors.
        """
        from ringtap.analysis.model.compare_fitted_curves import compare_fits

        return compare_fits(self, instance_of(other, FitResult, "the other fit"))

    def plot(self, ax: Axes | None = None, **style: Any) -> list[Artist]:
        """Draw the points, the curve and its 95 % band (`ringtap.plot.fit`); return what was drawn."""
        from ringtap.analysis.plots.figures_on_axes import fit

        return fit(self, ax, **style)

    def report(self) -> str:
        """Return the fit as text for a terminal, of several lines."""
        target = ", ".join(["ln t", *["weighted"] * self.weighted, *["outliers left out"] * self.robust])
        points = " ".join([f"{len(self.iteration_s)} points", *filter(None, [self.range])])
        lines = [f"t = A*exp(B/(C-BW)^n), C = {self.capacity_gbps:g} Gbit/s, {points}, fitted to {target}"]
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
            lines.append(f"  95 % {'by t' if self.robust and not self.free else 'by bootstrap'}  {'  '.join(shown)}")
        lines += [f"  warning: {text}" for text in self.warnings]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain values for JSON, with the linear fit and the candidates nested."""
        points = {name: getattr(self, name).tolist() for name in _POINTS}
        return self._own_json() | {"max_load_gbps": self.max_load_gbps} | points

    def _own_json(self) -> dict[str, Any]:
        """Return the numbers without the points, which a fit shares with its linear fit and its candidates."""
        item: dict[str, Any] = {"A": self.A, "B": self.B, "n": self.n, "capacity_gbps": self.capacity_gbps}
        item |= {
            "model": self.name,
            "space": self.space,
            "points": len(self.iteration_s),
            "r2": self.r2,
            "r2_log": self.r2_log,
        }
        item |= {"deviance": self.deviance, "aicc": self.aicc, "stderr": self.stderr, "warnings": list(self.warnings)}
        item["load_gbps"] = [float(self.bandwidth_gbps[0]), float(self.bandwidth_gbps[-1])]
        item |= {"weighted": self.weighted, "between": self.between, "robust": self.robust, "terms": asdict(self.terms)}
        if self.space == "log":
            item["linear"] = None if self.linear is None else self.linear._own_json()
        if self.intervals is not None:
            ends = {name: list(interval) for name, interval in self.intervals.items()}
            item["intervals"] = {"level": LEVEL, "samples": self.samples, **ends}
        if self.candidates:
            item["candidates"] = [fit._own_json() for fit in self.candidates]
        return item

    @classmethod
    def from_json(cls, source: Mapping[str, Any] | str | os.PathLike[str]) -> FitResult:
        """Return a fit from the JSON that ``ringtap fit -o`` and `to_json` write.

        Args:
            source: the parsed JSON, or the path of a file.

        Raises:
            UsageError: it cannot be read, is not the JSON of a fit, or is that of an earlier version.
        """
        if isinstance(source, Mapping):
            name, item = "the fit", source
        else:
            path = path_of(source, "the fit")
            name = str(path)
            try:
                item = load_json(path)
            except OSError as error:
                raise UsageError(f"{name} cannot be read: {error.strerror}") from error
            except ShapeError as error:
                raise UsageError(f"{name} is not the JSON that ringtap fit writes: {error}") from error
        if "C_gbps" in item:
            raise UsageError(f"{name} is of an earlier version of ringtap: fit the points again")
        try:
            return cls._from_json(item, *(np.array(item[one], dtype=np.float64) for one in _POINTS))
        except (KeyError, TypeError, ValueError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise UsageError(f"{name} is not the JSON that ringtap fit writes ({why})") from error

    @classmethod
    def _from_json(cls, item: Mapping[str, Any], load: Array, time: Array) -> FitResult:
        terms, known, linear = dict(item["terms"]), item.get("intervals"), item.get("linear")
        if terms["covariance"] is not None:
            terms["covariance"] = tuple(tuple(map(float, row)) for row in terms["covariance"])
        same = ("A", "B", "n", "capacity_gbps", "space", "r2", "r2_log", "deviance", "aicc", "stderr")
        return cls(
            **{name: item[name] for name in (*same, "weighted", "between", "robust")},
            free=item["model"] == "n free",
            warnings=tuple(item["warnings"]),
            bandwidth_gbps=load,
            iteration_s=time,
            terms=Terms(**terms),
            intervals=known and {name: (known[name][0], known[name][1]) for name in ("A", "B", "n")},
            samples=known["samples"] if known else 0,
            linear=None if linear is None else cls._from_json(linear, load, time),
            candidates=tuple(cls._from_json(one, load, time) for one in item.get("candidates", ())),
            max_load_gbps=item.get("max_load_gbps"),
        )


def _numbers(fit: FitResult) -> str:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    parts = [f"{key} {getattr(fit, key):.4g} ± {shown(fit.stderr[key], '.2g')}" for key in ("A", "B")]
    parts.append(f"n {fit.n:.3g}" + (f" ± {shown(fit.stderr['n'], '.2g')}" if fit.free else ""))
    parts += [f"R² {shown(fit.r2, '.4f')}", f"R² log {shown(fit.r2_log, '.4f')}"]
    if fit.space == "log":
        parts.append(f"AICc {shown(fit.aicc, '.1f')}")
    return "  ".join(parts)
