"""Batch scripts in pieces: plain bash, for a command here and for plans in `ringtap.slurm.arrays`."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

import ringtap
from ringtap.slurm.paths import SubmitPaths
from ringtap.slurm.request import Environment, Request, Resources
from ringtap.slurm.sites import Site

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_KILL_WAIT_S = 30  # Slurm's default, which a site may change


def quote(text: str | Path) -> str:
    """Quote a text as one word of bash on one line, whatever it contains."""
    word = str(text)
    if not _CONTROL.search(word):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return "$'" + _CONTROL.sub(lambda match: f"\\{ord(match.group()):03o}", escaped) + "'"


def print_script(text: str) -> None:
    """Print a script byte by byte; on a terminal, control and invisible characters are shown as escapes."""
    if sys.stdout.isatty():
        print(text, end="")
    else:
        sys.stdout.buffer.write(text.encode(errors="surrogateescape"))


def words(command: Iterable[str | Path]) -> str:
    """Quote a command line for bash."""
    return " ".join(map(quote, command))


def header(resources: Resources, site: Site, further: Iterable[str] = ()) -> str:
    """Return the first lines: the origin of the script, and the directives of sbatch.

    Slurm's output goes to its default ``slurm-<job>.out`` in the folder that the script is submitted from: another name
    would be expanded together with that of the folder, whose ``%`` and ``\\`` are then misread.

    Args:
        resources: the resources asked for.
        site: the site.
        further: more directives, as after ``#SBATCH``.
    """
    signal = f"B:USR1@{resources.stop_before_s}" if resources.stop_before_s else None
    asked = {
        "job-name": resources.job_name,
        "account": resources.account,
        "time": resources.time,
        "nodes": resources.nodes,
        "ntasks-per-node": resources.tasks_per_node,
        "cpus-per-task": resources.cpus_per_task,
        "gpus-per-node": resources.gpus_per_node,
        "mem": resources.mem,
        "signal": signal,
    }
    lines = [
        "#!/bin/bash",
        f"# Written by ringtap {ringtap.__version__} for the site {site.name}. It may be changed and submitted again,",
        "# from the folder that it lies in and with a new run directory: sbatch job.sh",
    ]
    for name, value in asked.items():
        if value is not None and name not in resources.drop:
            lines.append(f"#SBATCH --{name}={_directive(str(value))}")
    for text in (*further, *resources.sbatch):
        lines.append(f"#SBATCH {text if text.startswith('-') else '--' + text}")
    lines.append(
        "# shellcheck disable=SC2016,SC2317,SC2329 # words mean what they say; functions are called by the steps"
    )
    return "\n".join(lines) + "\n"


def _directive(value: str) -> str:
    """Quote a value as sbatch reads it on a line of a script."""
    if re.fullmatch(r"[\w.,:/@=+%-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def places(paths: SubmitPaths, folder: Path) -> str:
    """Shell lines that set TAP_RUN and TAP_STATE, define ``note``, and change to the job's folder."""
    return f"""
export TAP_RUN={quote(paths.run)}  # the run directory: on a file system that all nodes share
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
export TAP_STATE=$TAP_RUN/{paths.states.relative_to(paths.run)}/${{job:-$SLURM_JOB_ID}}  # what this job says of itself
rm -f -- "$TAP_STATE".*
note() {{ printf '%(%s)T %s\\n' -1 "$*" >>"$TAP_STATE"; }}
cd -- {quote(folder)} || exit
"""


def modules(site: Site, environment: Environment) -> str:
    """Shell line that loads the modules; empty where there are none."""
    chosen = {name.partition("/")[0]: name for name in (*site.modules, *environment.modules)}
    return f"\nmodule load {words(chosen.values())} || exit\n" if chosen else ""


def python(site: Site, environment: Environment) -> str:
    """Shell lines for Python. They define ``enter``, which activates the environment, and create it where asked."""
    if environment.python is not None:
        # not resolved: an environment's interpreter is a link out of it
        return f"""
# Python, and what is installed beside it
enter() {{ export PATH={quote(Path(environment.python).parent)}:"$PATH"; }}
enter
"""
    wheels = "" if environment.wheels is None else f" --find-links {quote(environment.wheels)}"
    wanted = "" if environment.requirement is None else f" --requirement {quote(environment.requirement)}"
    return f"""
# Python: an environment on every node's own disk, made without the internet
enter() {{
    # shellcheck source=/dev/null
    source "$SLURM_TMPDIR/env/bin/activate"
}}
make_environment() {{
    : "${{SLURM_TMPDIR:?is not set: jobs have no folder of their own on this node, so use --python}}"
    {site.make_environment} "$SLURM_TMPDIR/env" >/dev/null &&
        enter &&
        pip install --quiet --disable-pip-version-check --no-index{wheels} ringtap{wanted}
}}
export -f enter make_environment
srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 bash -c make_environment || exit
enter || exit
"""


def rendezvous(site: Site) -> str:
    """Shell lines for the rendezvous of the ranks: MASTER_ADDR, MASTER_PORT, the interface that the site names."""
    text = """
# Where the ranks meet: on the first node, at a port that no other job has
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 10000 * 2))  # the next one is free, for Horovod
export MASTER_ADDR MASTER_PORT
"""
    if site.interface:
        name = quote(site.interface)
        text += f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}\n"
    return text


def recording(collect: str, every: str) -> str:
    """Options of ringtap run and ringtap capture for what is recorded."""
    return f"--collect {quote(collect)} --every {quote(every)}"


def agent_step(options: str, keep: tuple[str, ...]) -> str:
    """Step beside the job: it records each node, and at the end copies the files to keep from its disk.

    Both are one step because no further step starts in a cancelled job. Sets ``agents`` to the PID of its srun.

    Args:
        options: result of `recording`.
        keep: patterns below $SLURM_TMPDIR.
    """
    kept = f"\n    keep {words(keep)}" if keep else ""
    copying = _KEEP if keep else ""
    exported = "beside keep" if keep else "beside"
    return f"""
# Beside the job, one task a node: records it until told to end (SIGTERM), whatever becomes of the recording.
# Slurm ends with a step what was started in it, so this one waits for the recording of its node to be complete.
beside() {{
    [ "$SLURM_PROCID" != 0 ] || echo "$SLURM_STEP_ID" >"$TAP_STATE.agents"
    trap 'told=yes' TERM
    enter || exit
    node=$TAP_RUN/nodes/$(uname -n)
    python -m ringtap.cli capture --join "$TAP_RUN" {options} &
    for _ in {{1..200}}; do
        if [ -e "$node/node.json" ] || ! kill -0 $! 2>/dev/null; then break; fi
        sleep 0.1
    done
    if [ -e "$node/node.json" ]; then echo yes; else echo no; fi
    wait $! || [ "$told" ] || echo "the recording of $(uname -n) failed; the job goes on" >&2
    until [ "$told" ]; do sleep 1; done
    wait
    for _ in {{1..100}}; do
        [ ! -e "$node/DONE" ] || break
        sleep 0.1
    done{kept}
}}
{copying}export -f enter {exported}
exec 3< <(exec srun --overlap --cpu-bind=none --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \\
    --ntasks-per-node=1 bash -c beside)
agents=$!

# It comes first, or its work would be done in the job's own step; the job waits half a minute for it at most
recorded=0
for ((answers = 0; answers < SLURM_JOB_NUM_NODES; answers++)); do
    read -r -t 30 -u 3 answer || break
    if [ "$answer" = yes ]; then recorded=$((recorded + 1)); fi
done
note "recording $recorded of $SLURM_JOB_NUM_NODES nodes"
"""


_KEEP = """\
keep() {
    local pattern path to IFS=
    to=$TAP_RUN/results/$(uname -n)
    shopt -s nullglob globstar
    cd -- "${SLURM_TMPDIR:?is not set: nothing can be kept}" && mkdir -p -- "$to" || return
    for pattern in "$@"; do
        for path in $pattern; do # not quoted: it is a pattern
            cp --recursive --parents --preserve=timestamps -- "$path" "$to/"
        done
    done
}
"""


def job_step(command: Iterable[str], options: str, *, cpus_per_task: int | None, horovod: bool) -> str:
    """Step of the job itself, with every task under ringtap run. Sets ``training`` to the PID of its srun.

    Args:
        command: what each task runs.
        options: result of `recording`.
        cpus_per_task: cores of each: srun does not take them from the batch script by itself.
        horovod: give the ranks Horovod's variables too.
    """
    cores = "" if cpus_per_task is None else f" --cpus-per-task={cpus_per_task}"
    launch = "python -m ringtap.examples.horovod_rank " if horovod else ""
    return f"""
# The job: every task is a rank, and finds its number where torch.distributed looks for it
rank() {{
    [ "$SLURM_PROCID" != 0 ] || echo "$SLURM_STEP_ID" >"$TAP_STATE.job"
    enter || exit
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_STEP_NUM_TASKS
    export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=${{SLURM_STEP_TASKS_PER_NODE%%(*}}
    exec python -m ringtap.cli run --join "$TAP_RUN" {options} -- {launch}"$@"
}}
export -f rank
srun --overlap --kill-on-bad-exit=1{cores} bash -c 'rank "$@"' rank \\
    {words(command)} &
training=$!
"""


AWAIT = """\
await() { # PROCESS; sets code: its exit code
    caught=yes
    while [ "$caught" ]; do # a signal, whose trap says so, ends the waiting and not the process
        caught=''
        wait "$1"
        code=$?
    done
}
"""


def stopping(stop_before_s: int) -> str:
    """The traps, and the functions that signal steps and wait for them."""
    grace_s = max(stop_before_s // 2, 1) if stop_before_s else _KILL_WAIT_S
    return f"""
# Near the time limit Slurm sends SIGUSR1 to this script alone; scancel and the limit itself send SIGTERM to every task
tell() {{ # STEP SIGNAL; by its number, for a signal to srun would kill its tasks
    [ -s "$TAP_STATE.$1" ] && scancel --quiet --signal="$2" "$SLURM_JOB_ID.$(<"$TAP_STATE.$1")" 2>/dev/null
}}
stopped=''
trap 'note "ended $?"' EXIT
trap 'caught=yes stopped=USR1; note stopped USR1; tell job TERM; {{ sleep {grace_s}; tell job KILL; }} &' USR1
trap 'caught=yes stopped=${{stopped:-TERM}}; note stopped TERM' TERM
{AWAIT}"""


FINISH = """
await "$training"
exit_code=$code
tell agents TERM
{ sleep 60; tell agents KILL; } &
await "$agents"
# srun gives the greatest exit code of all ranks, this the one of the rank that failed first
first_code=$(python -m ringtap.slurm.run_json end "$TAP_RUN" "$exit_code" "$stopped") && exit_code=$first_code
exit "$exit_code"
"""


def command_script(request: Request, site: Site, paths: SubmitPaths) -> str:
    """Return the whole script of a command."""
    options = recording(request.collect, request.every)
    resources = request.resources
    return "".join(
        (
            header(resources, site, ["--no-requeue"]),
            places(paths, request.folder),
            stopping(resources.stop_before_s),
            'note "begun on $(uname -n)"\n',
            modules(site, request.environment),
            python(site, request.environment),
            'python -m ringtap.slurm.run_json begin "$TAP_RUN" || exit\n',
            rendezvous(site),
            agent_step(options, request.keep),
            job_step(request.command, options, cpus_per_task=resources.cpus_per_task, horovod=request.horovod),
            FINISH,
        )
    )
