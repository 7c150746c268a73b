"""What is installed is what is here, also away from here."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import ringtap
from ringtap.cli import main
from ringtap.core.append_only_logs import open_records
from ringtap.core.installation import cache_folder
from tests.gold.analysis_sweep import write_sweep
from tests.unit.core.test_installation import HELP, check_helps, every_verb

pytestmark = [pytest.mark.shares, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[3]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
# away from the checkout, which PYTHONPATH may name
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel made of the sdist, in an empty folder; a copy is built, for a build leaves files in its source."""
    folder = tmp_path_factory.mktemp("dist")
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("agents", "analysis", "collectors", "examples", "ringtap", "slurm", "trafficgen", "workload"):
        shutil.copytree(ROOT / name, folder / "source" / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(folder)!r}))"
    command = [sys.executable, "-c", build]
    made = subprocess.run(command, cwd=folder / "source", env=CLEAN, check=True, capture_output=True, text=True).stdout
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*PIP, "wheel", *options, str(folder / made.strip().splitlines()[-1])], env=CLEAN, check=True)
    (found,) = folder.glob("*.whl")
    return found


def test_the_wheel_holds_every_module(wheel: Path) -> None:
    """Folders stand at the top, and setuptools finds them by the links in ringtap/."""
    here = [path for path in (ROOT / "ringtap").rglob("*.py") if path.parent == path.parent.resolve()]
    for link in (path for path in (ROOT / "ringtap").iterdir() if path.is_symlink()):
        here += [link / path.relative_to(link.resolve()) for path in link.resolve().rglob("*.py")]
    assert len(here) > 400
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.endswith(".py")}
    assert held == {str(path.relative_to(ROOT)) for path in here}


def installed(wheel: Path, folder: Path, beside: Path) -> Path:
    """An environment with the wheel; what pip would get from the package index is beside it, in a folder."""
    venv.create(folder, with_pip=False, symlinks=True)
    command = [*PIP, "--python", str(folder / "bin" / "python"), "install", "--no-deps", str(wheel)]
    subprocess.run(command, env=CLEAN, check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "beside.pth").write_text(f"{beside}\n")
    (folder / "cwd").mkdir()
    return folder


@pytest.fixture(scope="module")
def least(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment as ``pip install`` of the wheel alone gives it."""
    beside = tmp_path_factory.mktemp("beside")
    for name in ("psutil", "pyroute2", "tomli"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            (beside / name).symlink_to(Path(spec.origin).parent)
    return installed(wheel, tmp_path_factory.mktemp("least") / "environment", beside)


@pytest.fixture(scope="module")
def whole(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the packages of the analysis, too."""
    return installed(wheel, tmp_path_factory.mktemp("whole") / "environment", Path(sysconfig.get_path("purelib")))


def away(environment: Path, program: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A program of an environment, run in a folder of its own, away from the checkout.

    What was compiled from the same kernels of the reader of captures is not compiled again.
    """
    command = [str(environment / "bin" / program), *words]
    settings = CLEAN | {
        "HOME": str(environment),
        "XDG_CACHE_HOME": str(cache_folder().parent),
        "PATH": f"{environment / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    cwd = environment / "cwd"
    return subprocess.run(command, cwd=cwd, env=settings, capture_output=True, text=True, check=False, timeout=120)


def test_every_module_of_the_wheel_imports(whole: Path) -> None:
    # the kernels of the reader of captures are compiled on import, which is tested where captures are read
    code = (
        "import gc, os; os.environ['NUMBA_DISABLE_JIT'] = '1'\n"
        "gc.disable()\n"
        "import pkgutil, importlib, ringtap\n"
        f"assert ringtap.__file__.startswith({str(whole)!r}), ringtap.__file__\n"
        "names = [m.name for m in pkgutil.walk_packages(ringtap.__path__, 'ringtap.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names), end='')\n"
        "gc.freeze()\n"
    )
    done = away(whole, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 40


def test_every_verb_of_the_wheel_prints_its_help(least: Path) -> None:
    verbs = every_verb()
    check_helps(verbs, away(least, "python", "-c", HELP, *verbs))
    assert away(least, "ringtap", "demand", "--help").stdout.startswith("usage: ringtap demand")


def test_the_wheel_alone_records_a_job(least: Path) -> None:
    job = "import ringtap, time\nfor _ in range(5): time.sleep(0.02); ringtap.step()"
    done = away(least, "ringtap", "run", "-o", "a run", "--", "python", "-c", job)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    run = least / "cwd" / "a run"
    assert json.loads((run / "run.json").read_text())["status"] == "complete"
    (steps,) = run.glob("nodes/*/steps/*.rec")
    assert open_records(steps).count == 5
    (nic,) = run.glob("nodes/*/nic/nic.rec")
    assert open_records(nic).count > 0


def test_the_wheel_alone_answers_what_needs_no_extra(least: Path) -> None:
    found = json.loads(away(least, "ringtap", "doctor", "--json").stdout)
    assert found["ringtap"] == ringtap.__version__
    assert away(least, "ringtap", "demand", "--params", "138357444", "--workers", "4").returncode == 0
    dry = away(least, "ringtap", "sweep", "examples/demo.toml", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "30 points" in dry.stdout
    horovod = away(least, "python", "-m", "ringtap.examples.build_horovod", "--help")
    assert horovod.stdout.startswith("usage: "), horovod.stderr


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("flows examples/ring.pcap.gz --no-cache", "15,177 packets"),
        ("structure examples/ring.pcap.gz --no-cache", "a ring of 3 hosts"),
        ("fit examples/points.csv --capacity 25gbit", "Congestion begins at 13.3 Gbit/s"),
    ],
)
def test_examples_are_found_where_only_the_wheel_is(command: str, says: str, whole: Path) -> None:
    done = away(whole, "ringtap", *command.split())
    assert done.returncode == 0, done.stderr
    assert says in done.stdout


def test_a_file_of_that_name_here_comes_before_the_example(whole: Path) -> None:
    folder = whole / "cwd" / "examples"
    folder.mkdir()
    (folder / "points.csv").write_text("not,points\n1,2\n")
    done = away(whole, "ringtap", "fit", "examples/points.csv", "--capacity", "25gbit")
    shutil.rmtree(folder)
    assert done.returncode == 2
    assert done.stderr.startswith("ringtap: examples/points.csv")


def test_no_message_names_a_file_that_only_a_checkout_has() -> None:
    """Docstrings may: they are for those who read the source."""
    folders = ["agents", "analysis", "collectors", "ringtap", "slurm", "trafficgen", "workload"]
    named = []
    for path in sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                named += [
                    f"{path}: {hit}" for hit in re.findall(r"\b(?:scripts|docs|tests|benchmarks)/\S+", node.value)
                ]
    assert named == []


def test_help_needs_nothing_but_the_standard_library() -> None:
    code = "import sys; sys.argv = ['ringtap', '--help']\nfrom ringtap.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit: pass\n"
    code += "others = {'numpy', 'pandas', 'psutil', 'pyroute2', 'torch', 'scipy'}\n"
    code += "print({name.partition('.')[0] for name in sys.modules} & others)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "set()"
    assert "sweep" in done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that was measured before, with its report."""
    folder = tmp_path_factory.mktemp("demo") / "measured"
    write_sweep(folder, [("vgg16", "consistent")])
    assert main(["report", str(folder)]) == 0
    return folder


def demo(folder: Path, measured: Path) -> None:
    """The lines of `make demo`, with a sweep that was measured before in place of nine minutes on a testbed."""
    lines = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0].partition("\n")[2]
    lines = lines.lstrip("\t@").replace("$(DEMO)", "runs/demo").replace("$(BIN)", "'a bin'").replace("$$", "$")
    program = folder / "a bin" / "ringtap"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n[ "$5" = --report ]; mkdir -p runs && cp -R {shlex.quote(str(measured))} "$4"\n')
    program.chmod(0o755)
    subprocess.run(["sh", "-ec", lines], cwd=folder, capture_output=True, check=True)


def test_make_demo_leaves_a_link_to_the_latest_demo(tmp_path: Path, measured: Path) -> None:
    (tmp_path / "runs").mkdir()
    link = tmp_path / "runs" / "demo"
    link.symlink_to("an earlier one")
    demo(tmp_path, measured)
    (folder,) = (tmp_path / "runs").glob("demo-*")
    assert link.readlink() == Path(folder.name)
    assert len(ringtap.open_run(link).points) > 0
    assert (link / "report" / "report.html").is_file()


def test_make_demo_leaves_a_folder_of_that_name_alone(tmp_path: Path, measured: Path) -> None:
    link = tmp_path / "runs" / "demo"
    link.mkdir(parents=True)
    demo(tmp_path, measured)
    assert list(link.iterdir()) == []
