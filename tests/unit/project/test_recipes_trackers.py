"""The recipes for MLflow and Weights & Biases in docs/commands/export.md run as they stand, without a server."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ringtap
from ringtap.cli import main
from tests.gold.job_run import Truth, write_ddp_job

pytestmark = [pytest.mark.shares, pytest.mark.together]

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "commands" / "export.md"
ITERATIONS = 4

# prints what MLflow's client reads from the files
READ_MLFLOW = """
import json
from mlflow import MlflowClient
client = MlflowClient()
(run,) = client.search_runs(["0"])
steps = {metric.step: metric.value for metric in client.get_metric_history(run.info.run_id, "iteration_s")}
files = [file.path for file in client.list_artifacts(run.info.run_id, "tables")]
print(json.dumps([run.data.params, steps, sorted(run.data.metrics), files]))
"""

# prints what is in W&B's log: messages in the log format of LevelDB, behind a header of 7 bytes
READ_WANDB = """
import glob, json, struct
from wandb.proto.wandb_internal_pb2 import Record
wandb.teardown()  # its service may still write after the run has ended
BLOCK, FULL, LAST = 32768, 1, 4
(path,) = glob.glob("wandb/offline-run-*/*.wandb")
data, at, message, steps, config = open(path, "rb").read(), 7, b"", {}, {}
while at + 7 <= len(data):
    if at % BLOCK > BLOCK - 7:  # no room for a header: the chunk begins in the next block
        at += BLOCK - at % BLOCK
        continue
    _, length, kind = struct.unpack_from("<IHB", data, at)
    message += data[at + 7 : at + 7 + length]
    at += 7 + length
    if kind not in (FULL, LAST):
        continue
    record, message = Record.FromString(message), b""
    items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
    if "iteration_s" in items:
        steps[items["_step"]] = items["iteration_s"]
    for part in (record.run.config, record.config):
        config |= {item.key: json.loads(item.value_json) for item in part.update}
print(json.dumps([config, steps]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trackers")
    write_ddp_job(path / "runs" / "job", Truth(iterations=ITERATIONS))
    assert main(["export", str(path / "runs" / "job"), "--to", "parquet", "-o", str(path / "tables")]) == 0
    return path


def recipe(title: str) -> str:
    (part,) = (part for part in re.split("^## ", PAGE.read_text(), flags=re.MULTILINE) if part.startswith(title))
    (block,) = re.findall(r"^```python\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    assert block.count("\n") <= 11
    return block


def answer(folder: Path, title: str, read: str, environment: dict[str, str]) -> list[object]:
    """Output of a program that runs the recipe, and then reads its log."""
    environment = dict(os.environ) | environment | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", recipe(title) + read]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found: list[object] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_mlflow_has_the_iterations_as_steps_and_the_tables_as_artifacts(folder: Path) -> None:
    pytest.importorskip("mlflow")
    variables = {"MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri()}
    variables |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    params, steps, names, files = answer(folder, "MLflow", READ_MLFLOW, variables)
    table = ringtap.open_job(folder / "runs" / "job").iterations
    assert params == {"ranks": "2", "nodes": "2"}
    assert steps == dict(zip(table["iteration"].astype(str), table["iteration_s"], strict=True))
    known = table.select_dtypes(["float64", "Float64"]).dropna(axis=1, how="all")
    assert names == sorted(known.columns)
    assert files == sorted(f"tables/{path.name}" for path in (folder / "tables").iterdir())


def test_wandb_offline_has_the_iterations_as_steps(folder: Path) -> None:
    pytest.importorskip("wandb")
    variables = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_CONSOLE": "off"}
    config, steps = answer(folder, "Weights", READ_WANDB, variables)
    table = ringtap.open_job(folder / "runs" / "job").iterations
    assert {name: config[name] for name in ("ranks", "nodes")} == {"ranks": 2, "nodes": 2}
    assert steps == dict(zip(table["iteration"].astype(str), table["iteration_s"], strict=True))
