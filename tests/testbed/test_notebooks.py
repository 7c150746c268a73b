"""The notebooks of examples/: each is run from its first cell to its last, and shows what its file shows."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

import ringtap

pytestmark = [pytest.mark.shares, pytest.mark.usefixtures("unchanged_machine")]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    found = importlib.util.spec_from_file_location("run_notebooks", ROOT / "scripts" / "run_notebooks.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds(cell: Any) -> list[list[str]]:
    """What a cell shows: MIME types, or the name of a stream."""
    return [sorted(output.get("data", {})) or [output.get("name")] for output in cell.outputs]


def texts(cell: Any) -> list[str]:
    return [output.get("text") or output["data"].get("text/plain", "") for output in cell.outputs]


def committed(name: str) -> Any:
    return nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)


@pytest.mark.parametrize("name", ["job", "capture", pytest.param("sweep", marks=pytest.mark.alone(1))])
def test_a_notebook_shows_what_its_file_shows(name: str, script: ModuleType, tmp_path: Path) -> None:
    file, now = committed(name), script.run(name, tmp_path)
    nbformat.validate(file)
    assert [cell.execution_count for cell in cells(file)] == list(range(1, len(cells(file)) + 1))
    assert [kinds(cell) for cell in cells(now)] == [kinds(cell) for cell in cells(file)]
    assert "stderr" not in {kind for cell in cells(now) for (kind, *_) in kinds(cell)}
    drawn = [cell for cell in cells(now) if re.search(r"\.plot[.(]", cell.source)]
    assert drawn
    assert all(["image/svg+xml", "text/plain"] in kinds(cell) for cell in drawn)
    assert not re.search(r'"[^"]*(/home/|/root/|/work/|/Users/)', nbformat.writes(file))
    if name == "capture":
        assert [texts(cell) for cell in cells(now)] == [texts(cell) for cell in cells(file)]


def test_the_text_of_the_capture_names_its_numbers() -> None:
    traffic = ringtap.read_captures(ROOT / "examples" / "ring.pcap.gz", cache=False)
    about = committed("capture").cells[0].source
    assert f"has {traffic.duration_s:.1f} s of data-parallel training" in about
    assert f"headers of {traffic.counts['packets']:,} packets" in about


def test_the_site_shows_the_notebooks(script: ModuleType) -> None:
    for name in script.NAMES:
        assert (ROOT / "docs" / "notebooks" / f"{name}.ipynb").resolve() == ROOT / "examples" / f"{name}.ipynb"
        assert f"notebooks/{name}.ipynb" in (ROOT / "mkdocs.yml").read_text()
    assert sorted(path.stem for path in (ROOT / "examples").glob("*.ipynb")) == sorted(script.NAMES)
