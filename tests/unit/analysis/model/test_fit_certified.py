"""Fits against certified values: NIST, Statistical Reference Datasets (https://www.itl.nist.gov/div898/strd/)."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import optimize

from ringtap.analysis.model.fit import CongestionModel

pytestmark = [pytest.mark.computes, pytest.mark.together]

NORRIS = Path(__file__).parents[3] / "gold" / "nist_norris.csv"
# MGH10, y = b1*exp(b2/(x + b3)), "higher level of difficulty": equation 3.7 with n = 1 and C - BW = x + b3
MGH10_X = np.arange(50.0, 126, 5)
MGH10_Y = np.array(
    [34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744, 8261, 7030, 6005, 5147, 4427, 3820, 3307, 2872]
)
B1, B2, B3, RSS = 5.6096364710e-03, 6.1813463463e03, 3.4522363462e02, 8.7945855171e01
CAPACITY = 500.0


def at(b3):
    return CongestionModel(CAPACITY, 1.0).fit(CAPACITY - MGH10_X - b3, MGH10_Y, bootstrap=0).linear


def rss(b3):
    fit = at(b3)
    return float(np.sum((fit.predict(fit.bandwidth_gbps) - fit.iteration_s) ** 2))


def test_mgh10_in_linear_space():
    fit = at(B3)
    # six digits: b1 and b2 depend strongly on b3, of which eleven digits are certified
    assert pytest.approx(B1, rel=1e-6) == fit.A
    assert pytest.approx(B2, rel=1e-6) == fit.B
    assert rss(B3) == pytest.approx(RSS, rel=1e-9)


def test_mgh10_third_parameter_has_its_least_where_it_is_certified():
    found = optimize.minimize_scalar(rss, bounds=(340, 350), method="bounded", options={"xatol": 1e-6})
    # a minimum is known to the root of the cost's precision only
    assert found.x == pytest.approx(B3, rel=1e-5)


def test_norris_in_log_space():
    """A straight line through ln t against C/(C-BW) - 1, both a thousandth of the data's."""
    points = pd.read_csv(NORRIS)
    x, y = points["x"].to_numpy() / 1000, points["y"].to_numpy() / 1000
    fit = CongestionModel(25, 1.0).fit(25 * x / (1 + x), np.exp(y), bootstrap=0)
    slope, intercept = 1.00211681802045, -0.262323073774029
    # equal x in another order and the way through exp and ln leave eight digits
    assert fit.terms.b == pytest.approx(slope, rel=1e-9)
    assert fit.terms.log_t0 == pytest.approx(intercept / 1000, rel=1e-7)
    assert np.sqrt(np.diag(fit.terms.covariance)) == pytest.approx(
        [0.232818234301152e-3, 0.429796848199937e-3], rel=1e-8
    )
    assert fit.terms.scatter == pytest.approx(0.884796396144373e-3, rel=1e-8)
    assert fit.r2_log == pytest.approx(0.999993745883712, rel=1e-12)
    assert fit.terms.freedom == 34
