"""Each recipe of docs/reference/recipes.md is run, and has at most five lines; each picture of the gallery is drawn."""

import asyncio
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import duckdb
import matplotlib as mpl
import matplotlib.image
import numpy as np
import polars
import pytest

import ringtap
from tests.gold.analysis_sweep import write_sweep
from tests.gold.job_run import MS, Truth, write_ddp_job
from tests.unit.capture_makers import classic, frames, usual

pytestmark = [pytest.mark.shares, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "reference" / "recipes.md"
GALLERY = ROOT / "docs" / "reference" / "gallery.md"
LOADS_GBPS = (0.0, 6.0, 10.0, 14.0, 16.0, 18.0, 20.0, 22.0)
MAX_LINES = 5
ELSEWHERE = "A sweep, measured"  # tests/testbed/test_sweep_python.py runs it, on a testbed
STEPS = "import ringtap, time\nfor _ in range(20): time.sleep(0.02); ringtap.step()"


def recipes() -> list[object]:
    parts = re.split("^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return [
        pytest.param(block, id=f"{part.splitlines()[0]}-{number}")
        for part in parts
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", part, re.MULTILINE | re.DOTALL))
        if not part.startswith(ELSEWHERE)
    ]


def block(title: str, number: int = 0) -> str:
    (found,) = [one.values[0] for one in recipes() if one.id == f"{title}-{number}"]
    return found


TRAFFIC = block("A traffic plan as a table, sent and received")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a recorded job, a sweep and the examples."""
    path = tmp_path_factory.mktemp("recipes")
    with tarfile.open(ROOT / "tests" / "gold" / "v0.1" / "runs.tar.xz") as archive:
        archive.extractall(path, filter="data")
    (path / "runs").mkdir()
    (path / "job").rename(path / "runs" / "job")
    pairs = [("vgg16", "consistent"), ("vgg16", "burst")]
    write_sweep(path / "runs" / "sweep", pairs, loads_gbps=LOADS_GBPS)
    write_ddp_job(path / "runs" / "packets", Truth())
    (path / "runs" / "packets" / "nodes" / "n0" / "packets").mkdir()
    capture = classic(frames([(at_ns + 2_500 * MS, ip) for at_ns, ip in usual()]))  # within iteration 12
    (path / "runs" / "packets" / "nodes" / "n0" / "packets" / "eth0-0.pcap").write_bytes(capture)
    (path / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "ring.pcap.gz", path / "examples")
    (path / "load.py").write_text(block("A collector of your own"))
    command = [sys.executable, "-m", "ringtap.cli", "run", "--collect", "default,load:Load", "-o", "runs/load"]
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, "--", sys.executable, "-c", STEPS], cwd=path, env=environment, check=True, timeout=60)
    return path


@pytest.fixture(autouse=True)
def figures():
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    yield
    plt.close("all")


@pytest.mark.parametrize("block", recipes())
def test_a_recipe_works_in_five_lines(block, folder, monkeypatch, capsys):
    import matplotlib.pyplot as plt

    monkeypatch.chdir(folder)
    lines = [line for line in block.splitlines() if line]
    assert len(lines) <= MAX_LINES
    last = lines.pop() if not re.match(r"\s|[\w.]+(, \w+)* = |for |print\(", lines[-1]) else "None"
    names = {"ringtap": ringtap, "polars": polars, "duckdb": duckdb, "asyncio": asyncio, "pytest": pytest}
    names |= {"ThreadPoolExecutor": ThreadPoolExecutor}
    if "plan," in block:
        exec(TRAFFIC.splitlines()[0], names)
    if "ax=ax" in block:
        names["ax"] = plt.subplots()[1]
    exec("\n".join(lines), names)
    shown = eval(last, names)
    for value in (shown, *(names[name] for name in names if name in block)):
        assert value is None or not hasattr(value, "__len__") or len(value), "an empty answer"
    if "savefig" in block:
        assert (folder / "fit.pdf").read_bytes().startswith(b"%PDF")
        assert names["line"].figure.get_size_inches()[0] == 3.3


def test_the_samples_of_the_own_collector_are_joined_to_the_iterations(folder):
    job = ringtap.open_job(folder / "runs" / "load")
    joined = job.table("load", by="iteration").merge(job.iterations, on="iteration")
    assert len(joined) == len(job.iterations) == 19
    assert job.table("load")["load_average"].between(0, 10_000).all()


def test_the_recipe_of_pytest_is_a_fixture(tmp_path):
    fixture = block("In threads, asyncio, pytest and Jupyter", 2)
    test = f"""
import pytest, ringtap
{fixture}
def test_flows_arrive(receiver):
    {TRAFFIC.splitlines()[0]}
    assert ringtap.send(plan, to=receiver.address).finished == plan.flows
"""
    (tmp_path / "test_own.py").write_text(test)
    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_own.py"]
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_each_rank_has_a_time_at_the_end_of_each_iteration(folder, monkeypatch):
    monkeypatch.chdir(folder)
    names = {"ringtap": ringtap}
    exec(block("Iteration times of each rank, by UTC"), names)
    times, job = names["times"], names["job"]
    assert times.shape == (len(job.iterations), len(job.ranks))
    assert times.notna().all(axis=None)
    assert (times.index.name, str(times.index.dtype)) == ("end_utc", "datetime64[ns, UTC]")
    assert (times.index.astype("int64") == job.iterations["end_ns"]).all()


def test_the_parts_of_the_recipes_are_right(folder):
    job = ringtap.open_job(folder / "runs" / "job")
    table = polars.read_parquet(job.to_parquet(folder / "parquet") / "iterations.parquet")
    assert table["iteration_s"].to_list() == job.iterations["iteration_s"].tolist()
    demand = ringtap.demand(round(job.summary()["demand"]["gradient_bytes"] / 4), len(job.ranks))
    shares = job.ranks["sent_bytes"] / demand.worker_bytes
    assert shares.to_numpy(float) == pytest.approx(1, abs=0.05), "samples of 200 ms of a job of 2 s"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> dict[str, Path]:
    found = importlib.util.spec_from_file_location("draw_gallery", ROOT / "scripts" / "draw_gallery.py")
    assert found is not None
    module: ModuleType = importlib.util.module_from_spec(found)
    assert found.loader is not None
    found.loader.exec_module(module)
    return {path.name: path for path in module.draw(tmp_path_factory.mktemp("gallery"))}


def test_the_gallery_shows_every_function_of_plot(drawn):
    shown = re.findall(r"\(\.\./images/(gallery-\w+\.png)\)", GALLERY.read_text())
    assert sorted(shown) == sorted(drawn)
    names = {name for name in vars(ringtap.plot) if callable(getattr(ringtap.plot, name)) and not name.startswith("_")}
    own = {name for name in names if getattr(getattr(ringtap.plot, name), "__module__", "") == ringtap.plot.__name__}
    makers = {name for name in own if "Artist" in str(getattr(ringtap.plot, name).__annotations__.get("return"))}
    assert {f"gallery-{name}.png" for name in makers - {"curve"}} == set(drawn)


def test_the_pictures_of_the_gallery_are_those_that_are_drawn_now(drawn):
    for name, path in drawn.items():
        now, then = (matplotlib.image.imread(one)[..., :3] for one in (path, ROOT / "docs" / "images" / name))
        # another version of Matplotlib may set text a pixel aside, which changes its edges
        assert abs(now.shape[0] - then.shape[0]) <= 4
        assert abs(now.shape[1] - then.shape[1]) <= 4
        rows, columns = (min(now.shape[at], then.shape[at]) for at in (0, 1))
        assert np.abs(now[:rows, :columns] - then[:rows, :columns]).mean() < 0.05


def test_fits_on_the_same_axes_have_colours_of_their_own(folder):
    import matplotlib.pyplot as plt

    fits = [series.fit for series in ringtap.open_sweep(folder / "runs" / "sweep")]
    ax = plt.subplots()[1]
    drawn = [fit.plot(ax=ax) for fit in fits]
    colours = [
        {mpl.colors.to_hex(artist.get_color()) for artist in one if hasattr(artist, "get_color")} for one in drawn
    ]
    assert [len(one) for one in colours] == [1, 1]
    assert colours[0] != colours[1]
    given = fits[0].plot(ax=ax, color="tab:red")
    assert given[0].get_color() == "tab:red"


def test_figures_on_own_axes_are_vectors_of_any_backend(folder, tmp_path):
    import matplotlib.pyplot as plt

    job = ringtap.open_job(folder / "runs" / "job")
    with ringtap.plot.style():
        figure, axes = plt.subplots(1, 2, figsize=(3.3, 1.8))
        first = ringtap.plot.iteration_times(job, axes[0], color="tab:red")
        second = ringtap.plot.cdf(job.iterations["iteration_s"], ax=axes[1])
    assert first[0].axes is axes[0]
    assert first[0].get_color() == "tab:red"
    assert second[0].axes is axes[1]
    figure.savefig(tmp_path / "both.svg")
    assert "<image" not in (tmp_path / "both.svg").read_text()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda job: ringtap.plot.cdf([]), "at least 1 values"),
        (lambda job: ringtap.plot.cdf(job, ax="axes"), "ax must be Matplotlib axes"),
        (lambda job: ringtap.plot.rates(job.iterations), "from a table of Traffic.rates"),
        (lambda job: ringtap.plot.timeline(job, 10**6), "has no iteration 1000000: the iterations are 0 to"),
    ],
)
def test_wrong_figures_are_answered_in_a_sentence(call, says, folder):
    with pytest.raises(ringtap.UsageError, match=says):
        call(ringtap.open_job(folder / "runs" / "job"))
