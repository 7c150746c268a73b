"""``ringtap bundle``: a new environment is made from it, and from what the site has, without an index."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import ringtap
from ringtap.core.errors import MeasurementError, UsageError
from ringtap.slurm.bundle import MANIFEST, README, check_wheels, own_wheel, requirements, write_bundle
from ringtap.slurm.site_profiles import load_site

pytestmark = [pytest.mark.shares, pytest.mark.together]

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
# no index, no folder of wheels that whoever runs the tests may have set up
BARE = {name: text for name, text in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
BARE |= {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle") / "for narval"
    words = [sys.executable, "-m", "ringtap.cli", "bundle", "--python", HERE, "--site", "narval", "-o", folder]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"Wrote {folder} (" in done.stdout
    assert "from the wheels of narval: psutil" in done.stdout
    return folder


def test_it_has_what_the_site_lacks_and_says_how_to_use_it(bundle: Path) -> None:
    names = sorted(path.name.partition("-")[0] for path in bundle.glob("*.whl"))
    assert names == ["pyroute2", "ringtap"]
    subprocess.run(["sha256sum", "--check", "--quiet", "--strict", MANIFEST], cwd=bundle, check=True)
    listed = {line.split("  ")[1] for line in (bundle / MANIFEST).read_text().splitlines()}
    assert listed == {path.name for path in bundle.iterdir()} - {MANIFEST}
    assert "pip install --no-index --find-links DIR ringtap" in (bundle / README).read_text()


def test_an_environment_is_made_from_it_without_an_index(bundle: Path, tmp_path: Path) -> None:
    site = tmp_path / "wheels of the site"
    write_bundle(HERE, load_site("generic", {}), tmp_path / "everything")
    site.mkdir()
    (psutil,) = (tmp_path / "everything").glob("psutil-*.whl")
    shutil.copy(psutil, site)
    # without a pip of its own, whose installation takes as long as the rest
    venv.create(tmp_path / "env", symlinks=True)
    install = [sys.executable, "-m", "pip", "--python", tmp_path / "env" / "bin" / "python"]
    install += ["install", "--quiet", "--no-index", "--find-links", bundle, "ringtap"]
    without = subprocess.run(install, env=BARE, capture_output=True, text=True, check=False)
    assert without.returncode != 0
    assert "psutil" in without.stderr
    subprocess.run([*install, "--find-links", site], env=BARE, check=True, cwd=tmp_path)
    command = tmp_path / "env" / "bin" / "ringtap"
    done = subprocess.run(
        [command, "doctor", "--json"], env=BARE, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "nic" in json.dumps(json.loads(done.stdout))
    shown = subprocess.run(
        [command, "submit", "--print", "--", "true"], env=BARE, cwd=tmp_path, capture_output=True, check=True
    )
    assert shown.stdout.startswith(b"#!/bin/bash\n")


def test_a_bundle_that_changed_is_not_installed(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(bundle, folder)
    (folder / "own-1.0-py3-none-any.whl").write_bytes(b"added")
    check_wheels(folder)
    (wheel,) = folder.glob("pyroute2-*.whl")
    data = wheel.read_bytes()
    for change in (lambda: wheel.write_bytes(data[:-1] + b"x"), wheel.unlink):
        change()
        with pytest.raises(UsageError, match=rf"{wheel.name} is not as MANIFEST says: copy the bundle again"):
            check_wheels(folder)
    (folder / MANIFEST).unlink()
    check_wheels(folder)  # a folder of one's own
    next(folder.glob("ringtap-*.whl")).unlink()
    with pytest.raises(UsageError, match="has no wheel of ringtap"):
        check_wheels(folder)


def test_the_traffic_generator_in_it_needs_nothing(bundle: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", bundle / "ringtap-traffic.pyz", "--help"], check=True, capture_output=True
    )
    assert b"send" in done.stdout


def test_its_wheel_is_the_ringtap_that_runs_here(tmp_path: Path) -> None:
    with zipfile.ZipFile(own_wheel(tmp_path)) as archive:
        names = archive.namelist()
        assert archive.testzip() is None
        for name in (
            "slurm/sites/narval.toml",
            "agents/hook/sitecustomize.py",
            "analysis/report/templates/job.html.j2",
        ):
            here = Path(ringtap.__file__).parent / name
            assert (
                hashlib.sha256(archive.read(f"ringtap/{name}")).digest() == hashlib.sha256(here.read_bytes()).digest()
            )
    assert len(names) == len(set(names))
    assert not [name for name in names if "__pycache__" in name]


def test_an_older_python_needs_more() -> None:
    assert {line.partition(">")[0] for line in requirements(10)} == {"psutil", "pyroute2", "tomli"}
    assert {line.partition(">")[0] for line in requirements(11)} == {"psutil", "pyroute2"}


def test_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = load_site("generic", {})
    for version in ("3", "3.9", "2.7", "3.11.4", "three"):
        with pytest.raises(UsageError, match="is not a version that ringtap runs on"):
            write_bundle(version, site, tmp_path / "b")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").touch()
    with pytest.raises(UsageError, match="is not empty: name another folder"):
        write_bundle(HERE, site, tmp_path / "b")
    with pytest.raises(UsageError, match="cannot be written"):
        write_bundle(HERE, site, tmp_path / "b" / "mine")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name in ("PIP_CONFIG_FILE", "PIP_NO_INDEX"):
        monkeypatch.setenv(name, BARE[name])
    with pytest.raises(MeasurementError, match="pip cannot get psutil"):
        write_bundle(HERE, site, tmp_path / "c")
    assert not list((tmp_path / "c").iterdir())
