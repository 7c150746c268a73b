"""Predicts from a fit: the time at a load and the load for a slowdown, each with its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import optimize, special

from ringtap.analysis.model.fit_result import BandKind, FitResult
from ringtap.analysis.model.model_least_squares import Array, Interval, Solution, exp, jacobian, log_predict
from ringtap.analysis.statistics.quantiles import LEVEL
from ringtap.core.check_api_arguments import number
from ringtap.core.errors import UsageError
from ringtap.core.json_validation import ShapeError, load_json
from ringtap.core.run_directory_schema import REPORT_JSON

_STEPS = 2000  # steps of the grid in ln(C/(C-BW)) for the search of intervals' ends
_NEAREST = 20.0  # upper end of this grid: all but 2e-9 of the capacity


@dataclass(frozen=True)
class Prediction:
    """Iteration time at one load.

    Attributes:
        load_gbps: cross traffic.
        iteration_s: time on the fitted curve.
        curve_s: interval of the curve at this load, over all exponents; None if the fit has no standard errors.
        point_s: interval of a newly measured mean; None if the fit has no standard errors.
        slowdown: time over that of no load.
        level: confidence of the intervals.
        warnings: limits of the numbers, one sentence each.
    """

    load_gbps: float
    iteration_s: float
    curve_s: Interval | None
    point_s: Interval | None
    slowdown: float
    level: float
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The prediction as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class AllowedLoad:
    """Load at which the iteration time is a given multiple of that without load.

    Attributes:
        slowdown: time over that of no load.
        load_gbps: cross traffic that causes it.
        low_gbps: lower end of its interval; None if the fit has no standard errors.
        high_gbps: upper end; None if no load below the capacity is certain to cause it.
        iteration_s: time on the fitted curve at this load.
        level: confidence of the interval.
        warnings: limits of the numbers, one sentence each.
    """

    slowdown: float
    load_gbps: float
    low_gbps: float | None
    high_gbps: float | None
    iteration_s: float
    level: float
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The load as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class _Model:
    solution: Solution
    freedom: int
    scatter: float
    free: bool
    weight: float  # Akaike weight among the candidates


@dataclass(frozen=True)
class Predictor:
    """A fit and the models compared with it, prepared for predictions.

    Attributes:
        capacity_gbps: C.
        measured_gbps: lightest and heaviest load of its points.
        chosen: the chosen model.
        models: all models that were compared, with the chosen one.
    """

    capacity_gbps: float
    measured_gbps: Interval
    chosen: _Model
    models: tuple[_Model, ...]

    @classmethod
    def from_fit(cls, fit: FitResult | Mapping[str, Any]) -> Predictor:
        """Create a predictor from a fit or from its JSON.

        Raises:
            UsageError: the JSON is not that of a fit.
        """
        item = fit.to_json() if isinstance(fit, FitResult) else fit
        if isinstance(item, Mapping) and "C_gbps" in item:
            raise UsageError("the fit is of an earlier version of ringtap: fit the points, or write the report, again")
        try:
            capacity, measured = float(item["capacity_gbps"]), tuple(map(float, item["load_gbps"]))
            candidates = item.get("candidates") or [item]
            known = [one for one in candidates if one["aicc"] is not None and one["terms"]["covariance"] is not None]
            least = min((one["aicc"] for one in known), default=0.0)
            shares = [math.exp((least - one["aicc"]) / 2) for one in known]
            models = [_model(one, share / sum(shares)) for one, share in zip(known, shares, strict=True)]
            if not any(one["model"] == item["model"] for one in known):
                models = [_model(item, 1.0)]
            chosen = _model(item, 1.0)
            low, high = measured
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"this is not the JSON that ringtap fit writes ({type(error).__name__}: {error})"
            ) from error
        return cls(capacity, (low, high), chosen, tuple(models))

    def at(self, load_gbps: float) -> Prediction:
        """Predict the iteration time at a load.

        Raises:
            UsageError: the load is negative, or at or past the capacity, where the model has no value.
        """
        if not 0 <= load_gbps < self.capacity_gbps:
            raise UsageError(
                f"a load of {load_gbps:g} Gbit/s cannot be predicted: the model holds from 0 to below the capacity of "
                f"{self.capacity_gbps:g}"
            )
        load = np.array([load_gbps])
        log_time = float(self.log_time(load)[0])
        error = self.log_error(load)
        curve = point = None
        if error is not None:
            reach = self._reach()
            curve = _around(log_time, reach * float(error[0]))
            point = _around(log_time, reach * math.hypot(float(error[0]), self.chosen.scatter))
        return Prediction(
            load_gbps=load_gbps,
            iteration_s=exp(log_time),
            curve_s=curve,
            point_s=point,
            slowdown=exp(log_time - self.chosen.solution.log_t0),
            level=LEVEL,
            warnings=(*self._outside(load_gbps), *self._unsure()),
        )

    def log_time(self, load: Array) -> Array:
        """Return ln t on the chosen curve at loads, in Gbit/s."""
        return self._log_time(self.chosen, load)

    def log_error(self, load: Array) -> Array | None:
        """Return the standard error of ln t at loads, over all models; None if the fit has no standard errors."""
        return self._error(load, self._log_time, _gradient)

    def band(self, load: Array, kind: BandKind) -> Array:
        """Return time, lower and upper end of the interval in seconds at loads, shape (3, loads); NaN if not known.

        Args:
            load: loads in Gbit/s.
            kind: ``curve`` for the interval of the curve, ``point`` for that of a newly measured mean.
        """
        log_time, error = self.log_time(load), self.log_error(load)
        if error is None:
            reach = np.full(len(load), np.nan)
        else:
            reach = self._reach() * (error if kind == "curve" else np.hypot(error, self.chosen.scatter))
        result: Array = np.exp(np.clip(np.stack([log_time, log_time - reach, log_time + reach]), -700, 700))
        return result

    def load_for(self, slowdown: float) -> AllowedLoad:
        """Return the load at which an iteration takes ``slowdown`` times as long as without cross traffic.

        Raises:
            UsageError: the slowdown is below 1, or the fitted time does not grow with the load.
        """
        slowdown = number(slowdown, "the slowdown")
        if not (math.isfinite(slowdown) and slowdown >= 1):
            raise UsageError(
                f"a slowdown of {slowdown:g} makes no sense: 1 is the time without cross traffic, 1.5 is 50 % more"
            )
        model, log_slowdown = self.chosen, math.log(slowdown)
        if model.solution.b <= 0:
            raise UsageError("the fitted time does not grow with the load, so no load causes a slowdown")
        n = model.solution.n
        load = -self.capacity_gbps * math.expm1(-math.log1p(log_slowdown / model.solution.b) / n)
        low, high = self._ends(log_slowdown)
        warnings = [*self._outside(load), *self._unsure()]
        if high is None and low is not None:
            warnings.append(
                "the upper end of the load is missing: no load below the capacity is certain to cause that slowdown"
            )
        return AllowedLoad(slowdown, load, low, high, exp(model.solution.log_t0 + log_slowdown), LEVEL, tuple(warnings))

    def _ends(self, log_slowdown: float) -> tuple[float | None, float | None]:
        """Return the loads from which a slowdown is possible, and from which it is certain."""

        def limit(u: Array, sign: float) -> Array:
            load = -self.capacity_gbps * np.expm1(-u)
            error = self._error(load, self._growth, _growth_gradient)
            if error is None:
                return np.full(len(u), -np.inf)
            result: Array = self._growth(self.chosen, load) + sign * self._reach() * error - log_slowdown
            return result

        return self._crossing(lambda u: limit(u, 1.0)), self._crossing(lambda u: limit(u, -1.0))

    def _crossing(self, at: Callable[[Array], Array]) -> float | None:
        grid = np.linspace(0.0, _NEAREST, _STEPS)
        past = np.flatnonzero(at(grid) >= 0)
        if not len(past):
            return None
        if past[0] == 0:
            return 0.0
        u = optimize.brentq(lambda value: float(at(np.array([value]))[0]), grid[past[0] - 1], grid[past[0]], xtol=1e-13)
        return float(-self.capacity_gbps * math.expm1(-u))

    def _log_time(self, model: _Model, load: Array) -> Array:
        return log_predict(model.solution, load, self.capacity_gbps)

    def _growth(self, model: _Model, load: Array) -> Array:
        return self._log_time(model, load) - model.solution.log_t0

    def _error(
        self, load: Array, value: Callable[[_Model, Array], Array], gradient: Callable[[_Model, Array, float], Array]
    ) -> Array | None:
        """Standard error by the delta method, averaged over the models, including the variance between them.

        Burnham and Anderson, Model Selection and Multimodel Inference (2002), equation 6.12.
        """
        centre, variance = value(self.chosen, load), np.zeros(len(load))
        for model in self.models:
            if model.solution.covariance is None:
                return None
            slopes = gradient(model, load, self.capacity_gbps)
            own = np.einsum("pi,ij,pj->p", slopes, model.solution.covariance, slopes)
            variance += model.weight * (np.maximum(own, 0.0) + (value(model, load) - centre) ** 2)
        result: Array = np.sqrt(variance)
        return result

    def _reach(self) -> float:
        return float(special.stdtrit(self.chosen.freedom, (1 + LEVEL) / 2))

    def _outside(self, load: float) -> list[str]:
        low, high = self.measured_gbps
        if low <= load <= high:
            return []
        return [f"{load:.4g} Gbit/s lies outside the measured loads, {low:.4g} to {high:.4g}: this is extrapolated"]

    def _unsure(self) -> list[str]:
        if self.models[0].solution.covariance is not None:
            return []
        return ["the fit has no standard errors, so there is no interval"]


def read_fit(path: Path, series: str | None = None) -> Predictor:
    """Read the output of ``ringtap fit -o``, or one series of a report.json, by default its only one.

    Raises:
        UsageError: the file cannot be read, is neither, or has no such series.
    """
    if path.is_dir():
        how = f"name {path / REPORT_JSON}, or the file that ringtap fit {path} -o FIT.json writes"
        raise UsageError(f"{path} is a folder: {how}")
    try:
        item = load_json(path, {"series?": ([dict], str, None)})
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except ShapeError as error:
        raise UsageError(f"{path} is not the JSON that ringtap fit writes: {error}") from error
    if "series" in item and "capacity_gbps" not in item:
        item = _one_series(item["series"] or [], series, path)
    elif series is not None:
        raise UsageError(f"{path} holds one fit and no series: leave --series out")
    try:
        return Predictor.from_fit(item)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _one_series(listed: Sequence[Any], wanted: str | None, path: Path) -> Any:
    known = {str(item["series"]): item for item in listed if isinstance(item, dict) and "series" in item}
    if wanted is None and len(known) == 1:
        (wanted,) = known
    if wanted not in known:
        problem = "name one with --series" if wanted is None else f"there is no {wanted!r}"
        raise UsageError(f"{path} holds the series {', '.join(known) or '(none)'}: {problem}")
    if known[wanted].get("fit") is None:
        raise UsageError(f"{path} has no fit of {wanted}: {known[wanted].get('fit_reason', 'it gives no reason')}")
    return known[wanted]["fit"]


def _model(item: Mapping[str, Any], weight: float) -> _Model:
    terms = item["terms"]
    covariance = None if terms["covariance"] is None else np.array(terms["covariance"], dtype=np.float64)
    free = item["model"] == "n free"
    if covariance is not None and covariance.shape != ((3, 3) if free else (2, 2)):
        raise ValueError(f"covariance of shape {covariance.shape}")
    solution = Solution(float(terms["log_t0"]), float(terms["b"]), float(item["n"]), covariance)
    return _Model(solution, int(terms["freedom"]), float(terms["scatter"]), free, weight)


def _gradient(model: _Model, load: Array, capacity: float) -> Array:
    return jacobian(load, capacity, model.solution.b, model.solution.n, model.free)


def _growth_gradient(model: _Model, load: Array, capacity: float) -> Array:
    return _gradient(model, load, capacity) - _gradient(model, np.zeros(1), capacity)


def _around(centre: float, reach: float) -> Interval:
    return exp(centre - reach), exp(centre + reach)
