"""What is installed is what is here, also away from here."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import tomllib

import ringtap
from tests.gold.analysis_sweep import write_sweep

ROOT = Path(__file__).resolve().parents[3]


def packages() -> dict[str, str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(settings["package-dir"]) == sorted(settings["packages"])
    return dict(settings["package-dir"])


def test_the_list_of_packages_is_what_the_folders_hold() -> None:
    """Folders stand at the top, so setuptools cannot find them by itself and the list is kept by hand."""
    rooms = {Path(folder).parts[0] for folder in packages().values()}
    found = {str(path.parent.relative_to(ROOT)) for room in rooms for path in (ROOT / room).rglob("__init__.py")}
    links = {str(path.relative_to(ROOT)) for path in (ROOT / "ringtap").iterdir() if path.is_symlink()}
    found = {folder for folder in found if not any(folder == link or folder.startswith(link + "/") for link in links)}
    assert found == set(packages().values())


def test_the_links_lead_to_the_rooms() -> None:
    for name, folder in packages().items():
        assert (ROOT / name.replace(".", "/")).resolve() == (ROOT / folder).resolve()


def test_sdist_to_wheel_installs_elsewhere_and_every_module_imports(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    made = subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    sdist = tmp_path / made.strip().splitlines()[-1]
    subprocess.run([*pip, "wheel", str(sdist), "--no-deps", "--no-build-isolation", "-w", str(tmp_path)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    code = (
        "import pkgutil, importlib, ringtap, sys\n"
        f"assert ringtap.__file__.startswith({str(target)!r}), ringtap.__file__\n"
        "names = [m.name for m in pkgutil.walk_packages(ringtap.__path__, 'ringtap.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "from pathlib import Path\n"
        "home = Path(ringtap.__file__).parent\n"
        "data = ['py.typed', 'analysis/report/templates/report.html.j2', 'examples/demo.toml']\n"
        "assert all((home / name).is_file() for name in data)\n"
        "print(len(names))\n"
    )
    command = [sys.executable, "-c", code]
    environment = {"PYTHONPATH": str(target), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 40  # the worked notebook prints, too


def test_help_needs_nothing_but_the_standard_library() -> None:
    code = "import sys; sys.argv = ['ringtap', '--help']\nfrom ringtap.cli import main\n"
    code += "try:\n    main()\nexcept SystemExit: pass\n"
    code += "others = {'numpy', 'pandas', 'psutil', 'pyroute2', 'torch', 'scipy'}\n"
    code += "print({name.partition('.')[0] for name in sys.modules} & others)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "set()"
    assert "sweep" in done.stdout


def demo(folder: Path) -> None:
    """The lines of `make demo`, with a sweep that was measured before in place of nine minutes on a testbed."""
    lines = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0].partition("\n")[2]
    lines = lines.lstrip("\t@").replace("$(DEMO)", "runs/demo").replace("$(BIN)", "'a bin'").replace("$$", "$")
    program = folder / "a bin" / "ringtap"
    program.parent.mkdir()
    module = f"{shlex.quote(sys.executable)} -m ringtap.cli"
    program.write_text(f'#!/bin/sh\n[ "$1" = report ] && exec {module} "$@"\nmkdir -p runs && cp -R measured "$4"\n')
    program.chmod(0o755)
    write_sweep(folder / "measured", [("vgg16", "consistent")])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(["sh", "-ec", lines], cwd=folder, env=environment, capture_output=True, check=True)


def test_make_demo_leaves_a_link_to_the_latest_demo(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    link = tmp_path / "runs" / "demo"
    link.symlink_to("an earlier one")
    demo(tmp_path)
    (folder,) = (tmp_path / "runs").glob("demo-*")
    assert link.readlink() == Path(folder.name)
    assert len(ringtap.open_run(link).points) > 0
    assert (link / "report" / "report.html").is_file()


def test_make_demo_leaves_a_folder_of_that_name_alone(tmp_path: Path) -> None:
    link = tmp_path / "runs" / "demo"
    link.mkdir(parents=True)
    demo(tmp_path)
    assert list(link.iterdir()) == []
