"""Run the notebooks of examples/ and keep what they show: python scripts/run_notebooks.py [NAME ...] (all)."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
NAMES = ("job", "capture", "sweep")
TIMEOUT_S = 240


def run(name: str, folder: Path) -> nbformat.NotebookNode:
    """Return a notebook of examples/, run in a folder from the first cell to the last.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an exception.
    """
    notebook = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    (folder / "examples").symlink_to(EXAMPLES)  # so that no output has the path of this checkout
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT_S,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=os.environ | {"PATH": programs, "PYTHONPATH": paths})
    notebook.metadata["language_info"] = {"name": "python"}  # and not the version of this Python
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:] or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(run(name, Path(folder)), EXAMPLES / f"{name}.ipynb")
        print(f"Wrote {EXAMPLES / name}.ipynb")
