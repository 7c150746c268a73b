"""Secrets of command lines and environments are masked by their names; what is no secret stays readable."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ringtap.agents.sweep.sweep_estimate import resolved
from ringtap.core.secret_masking import is_secret, mask_text, mask_variables, mask_words
from ringtap.core.sweep_plans.sweep_plan import load_plan

pytestmark = pytest.mark.computes

SECRETS = [
    *("--token", "--hf-token", "--hf_token", "-token", "--authToken", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"),
    *(
        "--password",
        "--passwd",
        "--db-password",
        "MLFLOW_TRACKING_PASSWORD",
        "MYSQL_PWD",
        "DB_PASS",
        "PASS",
        "--pass",
        "--passphrase",
    ),
    *("--api-key", "--api_key", "--apikey", "--wandb.api_key", "WANDB_API_KEY", "OPENAI_API_KEY", "COMET_API_KEY"),
    *("AWS_SECRET_ACCESS_KEY", "AZURE_STORAGE_KEY", "NEPTUNE_API_TOKEN", "--client-secret", "GITHUB_TOKEN"),
]
NO_SECRETS = [
    *("--tokenizer", "--max-tokens", "--num_tokens", "--token-file", "--pad-token", "--eos_token", "--tokens"),
    *("PWD", "OLDPWD", "--key", "--sort-key", "--password-file", "--compass", "--passes", "--secretary", "PATH"),
    *("TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "--keyboard", "--monkey", ""),
]


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)
    assert mask_words(["job", f"{name}=s3cret with = and blanks", "next"]) == ["job", f"{name}=***", "next"]
    if name.startswith("-"):
        assert mask_words(["job", name, "-s3cret", "next"]) == ["job", name, "***", "next"]
        assert mask_words(["job", name, "--next"]) == ["job", name, "--next"]
    for text in (f"cd /x; {name}=s3cret job --lr 1", f"cd /x; {name}='s3 cret' job --lr 1"):
        assert mask_words(["sh", "-c", text])[2] == f"cd /x; {name}=*** job --lr 1"
    assert mask_variables({name: "s3cret"}) == {name: "***"}


@pytest.mark.parametrize("name", NO_SECRETS)
def test_names_of_what_is_no_secret(name: str) -> None:
    assert not is_secret(name)
    words = ["job", name, "512", f"{name}=512", f"a {name}=512; b {name} 512"]
    assert mask_words(words) == words


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("export WANDB_API_KEY=abc && torchrun t.py", "export WANDB_API_KEY=*** && torchrun t.py"),
        ("t.py --token abc --lr 0.1", "t.py --token *** --lr 0.1"),
        ('t.py --password "a b" -x', "t.py --password *** -x"),
        ("mpirun -x HF_TOKEN=abc -x PATH t.py", "mpirun -x HF_TOKEN=*** -x PATH t.py"),
        ("git clone https://user:abc@example.org/x", "git clone https://user:***@example.org/x"),
        ("open http://127.0.0.1:9465/#q0vXnV3kY2wJb1tC8mZsE5rLhT7uPaKd", "open http://127.0.0.1:9465/#***"),
        ("open http://127.0.0.1:9465/#node=S0 x#q0vXnV3kY2wJb1tC8mZsE5rLhT7uPaKd",) * 2,
        ("tcp://10.0.0.1:29500", "tcp://10.0.0.1:29500"),
        ("curl -H 'Authorization: Bearer abc.d-f' x", "curl -H 'Authorization: Bearer ***' x"),
        ('curl --header="authorization:Basic dXNlcjpw" x', 'curl --header="authorization:Basic ***" x'),
        ("Authorization: token abc; PROXY-AUTHORIZATION: abc", "Authorization: token ***; PROXY-AUTHORIZATION: ***"),
        ("curl -H 'X-Api-Key: abc' -H 'PRIVATE-TOKEN: abc'", "curl -H 'X-Api-Key: ***' -H 'PRIVATE-TOKEN: ***'"),
        ("curl -H 'Cookie: a=abc; b=def' x", "curl -H 'Cookie: ***' x"),
        ("with Bearer abcdefgh in it", "with Bearer *** in it"),
        ("the bearer of news", "the bearer of news"),
        ("git clone https://ghp_abc@github.com/x", "git clone https://***@github.com/x"),
        ("git clone https://ghp_abc:x-oauth-basic@github.com/x", "git clone https://***@github.com/x"),
        ("pip install git+https://ghp_abc:@github.com/x", "pip install git+https://***@github.com/x"),
        ("git clone ssh://git@github.com/x http://a.b/x@y", "git clone ssh://git@github.com/x http://a.b/x@y"),
        ("cd x; PASS=abc t.py --pass abc", "cd x; PASS=*** t.py --pass ***"),
        ("--filter tcp:80 --host a:1 max_tokens: 12", "--filter tcp:80 --host a:1 max_tokens: 12"),
        ("t.py --use-auth-token --lr 0.1", "t.py --use-auth-token --lr 0.1"),
    ],
)
def test_secrets_within_a_text(text: str, masked: str) -> None:
    assert mask_text(text) == masked
    assert mask_words(text.split())[:1] == masked.split()[:1]


def test_no_secret_of_a_jobs_command_line_is_in_its_run_directory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    owners = run / "nodes/here/sockets/owners.jsonl"
    # until it is recorded whose the connection is
    (tmp_path / "t.py").write_text(
        "import pathlib, socket, time\na = socket.create_server(('127.0.0.1', 0))\n"
        "b = socket.create_connection(a.getsockname())\nc, _ = a.accept()\n"
        f"owners = pathlib.Path({str(owners)!r})\n"
        "for number in range(600):\n    b.send(b'x' * 1000)\n    c.recv(1000)\n    time.sleep(0.05)\n"
        "    if number >= 30 and owners.exists() and '--api-key' in owners.read_text():\n        break\n"
    )
    shell = ["sh", "-c", 'WANDB_API_KEY=pineapple-2 "$@"', "sh", sys.executable, "t.py"]
    job = ["env", "HF_TOKEN=pineapple-1", *shell]
    job += ["--token", "pineapple-3", "--api-key=pineapple-4", "--lr", "0.25"]
    command = [sys.executable, "-m", "ringtap.cli", "run", "-o", str(run), "--node", "here", "--", *job]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = [path for path in run.rglob("*") if path.is_file()]
    assert [str(path) for path in files if b"pineapple" in path.read_bytes()] == []
    assert json.loads((run / "run.json").read_text())["argv"][-2:] == ["--lr", "0.25"]
    (one,) = json.loads((run / "nodes/here/node.json").read_text())["jobs"]
    assert one["command"][-5:] == ["--token", "***", "--api-key=***", "--lr", "0.25"]
    assert "--api-key=***" in owners.read_text()


PLAN = """
[sweep]
name = "secret"
loads = [0.0]
capacity = "1gbit"
traffic = ["iperf"]

[cluster]
reach = "local"
workers = ["a", "b"]
cross_from = "a"
cross_to = "b"
most_load = "900mbit"
environment = { HF_TOKEN = "pineapple-1", NCCL_DEBUG = "INFO" }

[[hosts]]
name = "a"
training = "127.0.0.1"
cross = "127.0.0.1"
environment = { COMET_API_KEY = "pineapple-2" }

[[hosts]]
name = "b"
training = "127.0.0.2"
cross = "127.0.0.2"

[[models]]
name = "own"
parameters = 1000
compute = "10ms"
command = ["python3", "t.py", "--password", "pineapple-3", "--lr", "0.25"]
environment = { WANDB_API_KEY = "pineapple-4" }
"""


def test_no_secret_of_a_plan_is_in_what_run_json_keeps_of_it(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    plan = load_plan(tmp_path / "plan.toml")
    item = resolved(plan)
    assert "pineapple" not in json.dumps(item)
    assert item["models"][0]["command"] == ["python3", "t.py", "--password", "***", "--lr", "0.25"]
    assert item["topology"]["environment"] == {"HF_TOKEN": "***", "NCCL_DEBUG": "INFO"}
    assert plan.models[0].command[3] == "pineapple-3"


@pytest.mark.parametrize(
    ("words", "masked"),
    [
        (["curl", "-H", "Authorization: Bearer abc", "x"], ["curl", "-H", "Authorization: Bearer ***", "x"]),
        (
            ["curl", "-H", "Authorization:", "Bearer", "abc", "x"],
            ["curl", "-H", "Authorization:", "Bearer", "***", "x"],
        ),
        (["job", "bearer", "abc", "x"], ["job", "bearer", "***", "x"]),
    ],
)
def test_headers_in_words(words: list[str], masked: list[str]) -> None:
    assert mask_words(words) == masked
