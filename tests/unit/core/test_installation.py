"""What is said where packages are missing, and how to get them for the ringtap that runs."""

import argparse
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import tomllib

import ringtap
from ringtap.cli import SUB_VERBS, VERBS, build_parser
from ringtap.core import installation

pytestmark = [pytest.mark.shares, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[3]
# what needs the analysis, with arguments that reach the place where it does
NEED_REPORT = {
    "flows": ["flows", "examples/ring.pcap.gz"],
    "structure": ["structure", "examples/ring.pcap.gz"],
    "analyze": ["analyze", "{run}"],
    "report": ["report", "{run}"],
    "export": ["export", "{run}", "--to", "parquet", "-o", "tables"],
    "fit": ["fit", "examples/points.csv", "--capacity", "25gbit"],
    "predict": ["predict", "--fit", "fit.json", "--load", "1gbit"],
    "traffic verify": ["traffic", "verify", "web.plan", "--sent", "sent.rec"],
}


@pytest.fixture(scope="module")
def least(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what ringtap cannot do without, and nothing else."""
    folder = tmp_path_factory.mktemp("least")
    for name in ("psutil", "pyroute2", "tomli"):
        package = Path(sysconfig.get_path("purelib")) / name
        found = next((Path(place) / name for place in sys.path if (Path(place) / name).is_dir()), package)
        if found.is_dir():
            (folder / name).symlink_to(found)
    assert (folder / "psutil").is_dir()
    return folder


def alone(least: Path, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Python with these packages alone: -S leaves out what is installed beside it."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{least}{os.pathsep}{ROOT}", "HOME": str(least)}
    command = [sys.executable, "-S", *words]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120)


# the help of each verb named, after a zero byte, by a process of its own, forked from one that has imported the command
HELP = """
import os, sys
from ringtap.cli import main
for verb in sys.argv[1:]:
    print(end="\\0", flush=True)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = main([*verb.split(), "--help"])
        except SystemExit as end:
            code = end.code or 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        sys.exit(f"{verb}: exit code {code}")
"""


def every_verb() -> list[str]:
    found = list(VERBS)
    for verb in VERBS:
        (parsers,) = (one for one in build_parser(verb)._actions if isinstance(one, argparse._SubParsersAction))
        for action in parsers.choices[verb]._actions:
            if isinstance(action, argparse._SubParsersAction):
                found += [f"{verb} {name}" for name in action.choices]
    return found


def test_every_verb_prints_its_help_with_psutil_and_pyroute2_alone(least: Path) -> None:
    verbs = every_verb()
    assert "testbed up" in verbs
    assert all(f"{verb} {name}" in verbs for verb, names in SUB_VERBS.items() for name in names)
    check_helps(verbs, alone(least, "-c", HELP, *verbs))


def check_helps(verbs: list[str], done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stderr) == (0, "")
    for verb, text in zip(verbs, done.stdout.split("\0")[1:], strict=True):
        assert text.startswith(f"usage: ringtap {verb}"), verb


@pytest.mark.parametrize("verb", NEED_REPORT)
def test_every_verb_says_what_is_missing_and_how_to_get_it(least: Path, tmp_path: Path, verb: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text('{"schema": 1, "kind": "job"}')
    words = [word.format(run=tmp_path / "run") for word in NEED_REPORT[verb]]
    done = alone(least, "-m", "ringtap.cli", *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert re.match(r"ringtap: \w+ is not installed here: .* install .*\[report\]'?\n", done.stderr)


def test_completion_says_what_is_missing_and_how_to_get_it(least: Path) -> None:
    done = alone(least, "-m", "ringtap.cli", "completion", "bash")
    assert done.returncode == 2
    assert re.fullmatch(r"ringtap: shtab is not installed here: .* install .*\[completion\]'?\n", done.stderr)


def test_live_says_that_plain_text_needs_nothing(least: Path, tmp_path: Path) -> None:
    done = alone(least, "-m", "ringtap.cli", "live", str(tmp_path))
    assert done.returncode == 2
    assert re.match(r"ringtap: \w+ is not installed here: .* install .*\[tui\]'?, or use --plain", done.stderr)


WITHOUT_PACKAGES = ("MeasurementError", "RingtapError", "RingtapWarning", "UsageError", "__version__")
WITHOUT_PACKAGES += ("FlowPlan", "demand", "receiver", "run_sweep", "send", "step", "testbed", "utc")
WITHOUT_PACKAGES += ("schedule", "simulate", "whatif")


@pytest.mark.parametrize("name", [name for name in ringtap.__all__ if name not in WITHOUT_PACKAGES])
def test_every_public_name_says_what_is_missing_and_how_to_get_it(least: Path, name: str) -> None:
    done = alone(least, "-c", f"from ringtap import {name}")
    last = done.stderr.splitlines()[-1]
    sentence = rf"ImportError: ringtap\.{name} cannot be used: \w+ is not installed here: .* install .*\[report\]'?"
    assert re.fullmatch(sentence, last)
    assert "pandas" not in done.stderr.replace(last, "")


def test_a_call_says_what_is_missing_and_how_to_get_it(least: Path) -> None:
    jobs = "job=['100ms:0ms-60ms@20gbit'] * 2"
    done = alone(least, "-c", f"import ringtap; ringtap.schedule({jobs}, capacity='25gbit')")
    sentence = r"ImportError: ringtap\.schedule cannot be used: \w+ is not installed here: .* install .*\[\w+\]'?"
    assert re.fullmatch(sentence, done.stderr.splitlines()[-1])


def test_what_needs_nothing_works_with_psutil_and_pyroute2_alone(least: Path) -> None:
    names = ", ".join(WITHOUT_PACKAGES)
    assert alone(least, "-c", f"import ringtap; from ringtap import {names}; ringtap.step()").returncode == 0
    demand = ["demand", "--params", "138357444", "--workers", "4"]
    assert alone(least, "-m", "ringtap.cli", *demand).returncode == 0


def test_pandas_without_numpy_is_told_as_missing_numpy() -> None:
    """pandas reports it by an error of its own that names no package."""
    try:
        try:
            raise ModuleNotFoundError("No module named 'numpy'", name="numpy")
        except ModuleNotFoundError as error:
            raise ImportError("Unable to import required dependencies:\nnumpy") from error
    except ImportError as error:
        assert str(installation.missing(error)).startswith("numpy is not installed here: ")
    assert installation.missing(ModuleNotFoundError("", name="ringtap.nothing")) is None
    assert installation.missing(ImportError("cannot import name", name="numpy")) is None


class Noted:
    """An installation as pip notes it."""

    requires = (
        "psutil>=5.9",
        'tomli>=2; python_version < "3.11"',
        'numpy>=1.26; extra == "analysis"',
        'ringtap[analysis]; extra == "report"',
        'jinja2>=3.1; extra == "report"',
    )

    def __init__(self, record: object) -> None:
        self.record = record

    def read_text(self, name: str) -> "str | None":
        assert name == "direct_url.json"
        return None if self.record is None else json.dumps(self.record)


def command_for(monkeypatch: pytest.MonkeyPatch, record: object, extra: str = "report") -> "list[str]":
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Noted(record))
    command = installation.install_command(extra)
    before, _, after = command.partition(" install ")
    assert before == installation.pip()
    return shlex.split(after)


def test_the_command_names_where_ringtap_was_installed_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkout, wheel = tmp_path / "my work" / "ringtap", tmp_path / "ringtap-0.1.0-py3-none-any.whl"
    checkout.mkdir(parents=True)
    wheel.touch()
    editable = {"url": checkout.as_uri(), "dir_info": {"editable": True}}
    assert command_for(monkeypatch, editable) == ["--editable", f"{checkout}[report]"]
    assert command_for(monkeypatch, {"url": checkout.as_uri(), "dir_info": {}}) == [f"{checkout}[report]"]
    assert command_for(monkeypatch, {"url": wheel.as_uri(), "archive_info": {}}, "gpu") == [f"{wheel}[gpu]"]
    assert command_for(monkeypatch, editable, "") == ["--editable", str(checkout)]
    git = {"url": "https://example.org/ringtap.git", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}}
    assert command_for(monkeypatch, git) == ["ringtap[report] @ git+https://example.org/ringtap.git@c0ffee"]
    served = {"url": "https://example.org/ringtap-0.1.0-py3-none-any.whl", "archive_info": {}}
    assert command_for(monkeypatch, served) == [f"ringtap[report] @ {served['url']}"]


def test_without_a_note_the_command_names_the_checkout_or_the_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = {"url": (tmp_path / "gone.whl").as_uri(), "archive_info": {}}
    assert command_for(monkeypatch, gone) == [f"{ROOT}[report]"]
    monkeypatch.setattr(installation, "__file__", str(tmp_path / "site-packages" / "ringtap" / "installed.py"))
    for record in (None, gone):
        assert command_for(monkeypatch, record) == ["numpy>=1.26", "jinja2>=3.1"]


def test_every_package_that_pyproject_names_has_its_extra() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    by_name = {"nvidia-ml-py": "pynvml", "dask-jobqueue": "dask_jobqueue"}
    extras = settings["optional-dependencies"] | {"": settings["dependencies"]}
    for extra, advised in {
        "": "",
        "analysis": "report",
        "report": "report",
        "tui": "tui",
        "dask": "dask",
        "gpu": "gpu",
        "completion": "completion",
        "duckdb": "duckdb",
        "perfetto": "perfetto",
        "tensorboard": "tensorboard",
    }.items():
        for requirement in extras[extra]:
            name = re.match(r"[\w-]+", requirement)[0]  # type: ignore[index]
            if name != "ringtap":
                assert installation.EXTRAS[by_name.get(name, name)] == advised, requirement


def test_a_wheel_made_as_the_readme_says_installs_and_is_named_by_the_remedies(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    lines = [line.partition(" #")[0].strip() for line in readme.splitlines() if line.startswith("pip ")]
    build, install = (shlex.split(line)[1:] for line in lines[1:3])
    assert [build[-1], install[0]] == ["/path/to/ringtap", "install"]
    environment = tmp_path / "their own"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    # a copy, for a build leaves files in its source; what ringtap is built with is here, what it needs is not looked at
    names = ["agents", "analysis", "collectors", "examples", "ringtap", "slurm", "trafficgen", "workload"]
    for name in names:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / "source" / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    subprocess.run([*pip, *build[:-1], "--no-build-isolation", str(tmp_path / "source")], cwd=tmp_path, check=True)
    subprocess.run([*pip, "--python", str(python), *install, "--no-deps"], cwd=tmp_path, check=True)
    command = [str(environment / "bin" / "ringtap"), "fit", str(ROOT / "examples" / "points.csv")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    wheel = tmp_path.resolve() / install[1].partition("[")[0]
    assert done.stderr.endswith(f" install {shlex.quote(f'{wheel}[report]')}\n")
    assert " is not installed here: " in done.stderr


def test_no_message_and_no_page_advises_a_name_that_nobody_owns() -> None:
    """Names on the package index belong to whoever registers them: ringtap is installed from a path."""
    advice = re.compile(r"pip3? install (?!--no-index)[^\n`\"]*?(?<![/\w.-])'?ringtap(\[|'|\"|`| |$)", re.MULTILINE)
    folders = ["agents", "analysis", "collectors", "docs", "examples", "ringtap", "slurm", "trafficgen", "workload"]
    files = [
        path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md", ".j2", ".toml")
    ]
    found = [f"{path}: {hit[0]}" for path in [ROOT / "README.md", *files] for hit in advice.finditer(path.read_text())]
    assert found == []


def test_words_of_a_command_that_are_examples_become_their_files_unless_there_are_such_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    own = ["torchrun", "examples", "examples/", "examples/none.py", "./my/examples/demo.toml", "examples/" + "n" * 300]
    assert installation.with_shipped_examples([*own, ""], said.append) == [*own, ""]
    assert not said
    shipped = str(Path(installation.__file__).parents[1] / "examples" / "scale_model.py")
    assert installation.with_shipped_examples(["python3", "examples/scale_model.py"], said.append) == [
        "python3",
        shipped,
    ]
    assert said == [f"examples/scale_model.py is {shipped}, which ships with ringtap: there is no such file here"]
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "scale_model.py").touch()
    assert installation.with_shipped_examples(["examples/scale_model.py"], said.append) == ["examples/scale_model.py"]
    assert len(said) == 1
