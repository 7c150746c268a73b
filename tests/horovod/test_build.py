"""The module that builds Horovod: what it says when it cannot, where it keeps the wheel. Nothing is compiled here."""

import importlib.util
import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.shares, pytest.mark.together]

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "build_horovod.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_horovod", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_horovod"] = module
    spec.loader.exec_module(module)
    return module


def refusal(tmp_path: Path, *arguments: str, **extra: str) -> str:
    """The one sentence of a run that fails, with an empty cache."""
    environment = dict(os.environ) | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PIP_CONFIG_FILE": os.devnull} | extra
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("build_horovod:")]
    return said


def test_without_a_compiler_it_says_what_to_install(tmp_path: Path) -> None:
    said = refusal(tmp_path, PATH=str(tmp_path))
    assert "c++ and make cannot be found" in said
    assert "apt-get install g++ make" in said


def test_without_torch_it_says_so(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    assert "has no torch" in refusal(tmp_path, "--python", str(bare))


def test_an_interpreter_that_is_not_there(tmp_path: Path) -> None:
    assert "cannot be run" in refusal(tmp_path, "--python", str(tmp_path / "nothing"))


def test_without_an_index_it_says_so(tmp_path: Path) -> None:
    said = refusal(tmp_path, PIP_INDEX_URL="http://127.0.0.1:9/simple", PIP_EXTRA_INDEX_URL="", PIP_RETRIES="0")
    assert "is not available from the package index" in said


def test_another_file_under_the_same_name_is_not_even_unpacked(tmp_path: Path) -> None:
    (tmp_path / "setup.py").write_text("raise SystemExit('it ran')")
    with tarfile.open(tmp_path / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "setup.py", "horovod-0.28.1/setup.py")
    said = refusal(tmp_path, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(tmp_path))
    assert "another SHA-256" in said
    assert "it ran" not in said


def test_the_wheel_is_kept_under_all_that_decides_what_is_in_it(script: ModuleType, tmp_path: Path) -> None:
    facts = {"torch": "2.13.0+cpu", "cxx11_abi": True, "abi": "cpython-311-x86_64-linux-gnu", "machine": "x86_64"}
    where = script.cache_folder(facts, {"XDG_CACHE_HOME": str(tmp_path)})
    assert where.parent == tmp_path / "ringtap"
    others = [facts | {"torch": "2.12.0"}, facts | {"cxx11_abi": False}, facts | {"abi": "x"}, facts | {"machine": "y"}]
    assert len({script.cache_folder(one, {"XDG_CACHE_HOME": str(tmp_path)}) for one in [facts, *others]}) == 5


@pytest.mark.parametrize("has_filter", [True, False])
@pytest.mark.parametrize("kind", ["parent", "absolute", "symlink", "hardlink", "pipe"])
def test_an_archive_whose_members_lie_elsewhere_is_refused(
    script: ModuleType, kind: str, has_filter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_filter:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    elif not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python's tarfile has no data_filter")
    evil = {"parent": "../evil", "absolute": str(tmp_path / "evil")}.get(kind, f"horovod-{script.VERSION}/evil")
    member = tarfile.TarInfo(evil)
    member.type = {"symlink": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE, "pipe": tarfile.FIFOTYPE}.get(
        kind, tarfile.REGTYPE
    )
    member.linkname = "../../evil"
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as archive:
        archive.addfile(member)
    with pytest.raises(script.BuildError):
        script.unpack(tmp_path / "sdist.tar.gz", tmp_path / "out")
    assert not [path for path in tmp_path.rglob("*") if "evil" in path.name]


@pytest.mark.parametrize("kept", [0, 15, 60, 3000])
def test_a_source_that_is_cut_is_refused(script: ModuleType, tmp_path: Path, kept: int) -> None:
    (tmp_path / "CMakeLists.txt").write_bytes(random.Random(1).randbytes(5000))
    sdist = tmp_path / "sdist.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tmp_path / "CMakeLists.txt", f"horovod-{script.VERSION}/CMakeLists.txt")
    sdist.write_bytes(sdist.read_bytes()[:kept])
    with pytest.raises(script.BuildError, match="Horovod's source cannot be unpacked: "):
        script.unpack(sdist, tmp_path / "out")


def test_a_source_without_the_place_to_edit_is_refused(script: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "in" / f"horovod-{script.VERSION}"
    folder.mkdir(parents=True)
    (folder / "CMakeLists.txt").write_text("project(something else)")
    with tarfile.open(tmp_path / "sdist.tar.gz", "w:gz") as archive:
        archive.add(folder, folder.name)
    with pytest.raises(script.BuildError, match="does not have the place to edit once"):
        script.unpack(tmp_path / "sdist.tar.gz", tmp_path / "out")
