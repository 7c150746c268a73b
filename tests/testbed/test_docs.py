"""Every command that README and docs show is run, in a copy of the working tree's view of a newcomer."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

from ringtap.agents.testbed.registry import state_folder
from ringtap.core.sweep_plans.sweep_plan import load_plan
from ringtap.workload.transformer import read_layout

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def newcomer(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A folder with the examples in it, and ringtap on the PATH."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for command, module in (("ringtap", "-m ringtap.cli"), ("python", ""), ("torchrun", "-m torch.distributed.run")):
        script = bin_folder / command
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        script.chmod(0o755)
    path = f"{bin_folder}:{os.environ['PATH']}:/usr/sbin:/sbin"
    return tmp_path, dict(os.environ) | {"PATH": path, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}


def shown(page: Path) -> pytest.ParameterSet:
    """A page whose commands are run."""
    alone = any("ringtap testbed" in block for block in blocks(page, "sh"))
    captures = any("tcpdump" in block for block in blocks(page, "sh"))
    marks = [pytest.mark.alone(1)] * alone + [pytest.mark.needs_root("capture packets here")] * captures
    return pytest.param(page, id=name(page), marks=marks)


def own_registry(folder: Path) -> list[str]:
    """Begin a command that sees its own testbeds alone: some are for the only testbed, or for all.

    Without privilege, the testbeds of other tests are seen.
    """
    if os.geteuid() != 0:
        return []
    registry = folder / "registry"
    registry.mkdir(mode=0o700, exist_ok=True)
    begin = 'mount --bind "$0" "$1"; shift; exec "$@"'
    return ["unshare", "--mount", "sh", "-ec", begin, str(registry), str(state_folder())]


@pytest.mark.parametrize("page", [shown(page) for page in PAGES if blocks(page, "sh")])
def test_commands_work_as_shown(page: Path, newcomer: tuple[Path, dict[str, str]]) -> None:
    folder, environment = newcomer
    # a page may show a file that its commands use
    for file, text in re.findall(r"`(\w+\.py)`:\n\n```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        (folder / file).write_text(text)
    for block in blocks(page, "sh"):
        command = [*(own_registry(folder) if "ringtap testbed" in block else []), "sh", "-ec", block]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=280
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"


def read_plan_or_layout(path: Path) -> None:
    """Read a sweep plan, or the layout of a transformer, which has a table [layout]."""
    if "layout" in tomllib.loads(path.read_text()):
        read_layout(path)
    else:
        load_plan(path)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=name)
def test_plans_are_valid_as_shown(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "toml"):
        path = tmp_path / "plan.toml"
        path.write_text(block)
        read_plan_or_layout(path)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{name(page)} -> {target}"


@pytest.mark.parametrize("target", ["demo", "reproduce", "test"])
def test_make_knows_its_targets(target: str) -> None:
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("plan", sorted((ROOT / "examples").glob("*.toml")), ids=lambda plan: plan.name)
def test_plans_that_ship_are_valid(plan: Path) -> None:
    read_plan_or_layout(plan)
