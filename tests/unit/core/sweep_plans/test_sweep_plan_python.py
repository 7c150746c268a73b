"""Plans of sweeps as a dict and as keyword arguments: the defaults of a file, and the values of NumPy and pandas."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ringtap.core.errors import UsageError
from ringtap.core.sweep_plans.sweep_plan import load_plan, plan_from_keys

pytestmark = pytest.mark.computes

TOML = """\
[sweep]
loads = [0, 0.3, 0.3]
traffic = ["burst"]
capacity = "10gbit"
[burst]
length = "250ms"
period = "2.5s"
[testbed]
queue = "200kB"
[[models]]
name = "vgg16"
"""


def test_keys_and_dicts_give_the_plan_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(TOML)
    plan = load_plan(tmp_path / "plan.toml")
    assert load_plan(str(tmp_path / "plan.toml")) == plan
    sweep = {"loads": np.array([0, 0.3, 0.3]), "traffic": ("burst",), "capacity": 10e9}
    tables = {"burst": {"length": 0.25, "period": "2.5s"}, "testbed": {"queue": 200_000}, "models": [{"name": "vgg16"}]}
    assert load_plan({"sweep": sweep} | tables) == plan
    assert plan_from_keys(sweep | tables | {"models": ["vgg16"]}) == plan
    assert plan_from_keys(sweep | tables | {"loads": pd.Series([0, 0.3, 0.3])}) == plan


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"capacity": -1}, "the plan: sweep.capacity"),
        ({"capacity": float("nan")}, "the plan: sweep.capacity"),
        ({"capacity": True}, "the plan: sweep.capacity"),
        ({"capacity": "10gbti"}, "did you mean 10gbit"),
        ({"burst": {"lenght": 1}}, "burst.lenght is not a key of this table; did you mean length"),
        ({"loads": [[0]]}, "sweep.loads"),
        ({"models": [5]}, "models must be tables: give a list of dicts"),
        ({"models": []}, r"\[\[models\]\] is missing"),
        ({"models": ["vgg16", "vgg16"]}, "two models have the same name"),
    ],
)
def test_wrong_keys_are_named(changes: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan_from_keys({"loads": [0], "models": ["vgg16"]} | changes)
