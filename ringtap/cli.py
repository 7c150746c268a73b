"""Implements the ``ringtap`` command: imports a verb's module, and turns errors into one sentence and an exit code.

Exit codes: 0 done; 1 the job or the measurement failed; 2 usage or bad input; 130 interrupted. ``ringtap run`` and
``ringtap testbed exec`` pass on the wrapped command's own code.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import itertools
import os
import sys
import warnings
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NoReturn

import ringtap
from ringtap.core.errors import RingtapError, RingtapWarning, UsageError, did_you_mean, failure_message
from ringtap.core.terminal_escaping import discard_output, fill_standard_descriptors, guarded, one_line

if TYPE_CHECKING:
    from pathlib import Path

    from ringtap.core.flow_plan_format import Operation

_ABOUT = """\
Say whether the network slows your training job, which part of it does, and what
you can do about it.

  ringtap run -o runs/one -- torchrun --nproc-per-node 2 train.py   record a job
  ringtap analyze runs/one                               say where its time goes
  ringtap report runs/one                             write a page with figures"""
# heading -> verb -> (module with register(subparsers, name, summary), or empty if the verb has SUB_VERBS; one line for
# --help); only the module of the called verb is imported
GROUPS = {
    "Learn these": {
        "doctor": ("ringtap.doctor", "what can be recorded here, and how to get the rest"),
        "run": ("ringtap.agents.commands", "wrap a training job and record what it and the network do"),
        "live": ("ringtap.analysis.commands.live", "watch a run that is being written"),
        "analyze": ("ringtap.analysis.commands.analyze", "why a job is slow, and where its time goes"),
        "report": ("ringtap.analysis.commands.report", "turn a run into figures, tables and one HTML page"),
        "compare": ("ringtap.analysis.commands.compare", "put jobs, or the series of sweeps, side by side"),
        "sweep": ("ringtap.agents.commands", "step cross traffic under training jobs and measure"),
    },
    "From packets": {
        "flows": ("ringtap.analysis.commands.flows", "conversations and rates of packet captures, at memory speed"),
        "structure": (
            "ringtap.analysis.commands.structure",
            "a training job's iterations, ring and volume, from packets",
        ),
        "packets": (
            "ringtap.analysis.commands.packets_to_pcapng",
            "cut an iteration, a sweep's point or a time out of captures",
        ),
    },
    "From a curve": {
        "fit": ("ringtap.analysis.commands.fit", "fit t = A*exp(B/(C-BW)^n) to a CSV of points"),
        "predict": (
            "ringtap.analysis.commands.predict",
            "iteration time at a load, or the load that a slowdown allows",
        ),
        "demand": ("ringtap.analysis.commands.demand", "network demand of a training iteration"),
    },
    "Without a network": {
        "workload": ("", "what a training job computes and sends, on networks you lack"),
        "whatif": (
            "ringtap.workload.commands.whatif_transfer_order",
            "iteration times under other orders of the tensors",
        ),
        "schedule": (
            "ringtap.workload.commands.schedule",
            "which jobs may share a link, and with which time shifts",
        ),
    },
    "Send and build": {
        "traffic": ("", "cross traffic: plan, serve, send, verify"),
        "testbed": ("ringtap.agents.testbed.commands", "the virtual testbed: up, exec, status, down"),
        "record": ("ringtap.agents.commands", "record this node without a job"),
    },
    "Slurm": {
        "submit": ("ringtap.slurm.submit_command", "run a wrapped command or a sweep as a Slurm job"),
        "status": ("ringtap.slurm.status", "how a run, a sweep or a submitted job stands"),
        "merge": ("ringtap.slurm.merge_sweep_parts", "put the parts of a submitted sweep together"),
        "bundle": ("ringtap.slurm.bundle", "gather what a cluster without internet lacks"),
    },
    "Other": {
        "export": ("ringtap.analysis.commands.export", "write the tables of a run for other programs"),
        "completion": ("ringtap.completion", "print a script with which bash, zsh or tcsh completes commands"),
    },
}
VERBS = {name: entry for verbs in GROUPS.values() for name, entry in verbs.items()}
# command -> its verbs of earlier versions, and what they are called now
_RENAMED = {
    "ringtap": {"capture": "record", "collect": "merge", "lab": "testbed"},
    "ringtap traffic": {"bundle": "zipapp"},
}
# what other programs call a command -> the command
_MEANT = {"start": "run", "launch": "run", "exec": "run", "profile": "run", "watch": "live", "plot": "report"}
# verb -> options of earlier versions, and what they are called now
_RENAMED_OPTIONS = {
    **{verb: {"--scheduler": "--dask"} for verb in ("analyze", "flows", "report")},
    "testbed": {"--lab": "--testbed", "--rate": "--capacity"},
    "traffic": {"--line-rate": "--capacity"},
    "whatif": {"--bandwidth": "--capacity"},
    "workload": {"--rate": "--capacity"},
}
# verb -> sub-verb -> (module with register(subparsers, name, summary), one line for --help), loaded as late
SUB_VERBS = {
    "workload": {
        "new": ("ringtap.workload.commands.new", "write the workload of a profiled run, a model, or a transformer"),
        "show": ("ringtap.workload.commands.show", "what a workload computes and sends"),
        "scale": (
            "ringtap.workload.commands.scale",
            "change the number of workers, the batch, the model or the processors",
        ),
        "lower": ("ringtap.workload.commands.lower", "turn collectives into messages, and count their bytes"),
        "simulate": ("ringtap.workload.commands.simulate", "iteration times on a network, against cross traffic"),
        "export": ("ringtap.workload.commands.export", "write the input of another simulator or benchmark"),
        "import": (
            "ringtap.workload.commands.import_simulator_result",
            "read the result of another simulator from its log",
        ),
    },
    "traffic": {
        "plan": (
            "ringtap.trafficgen.commands.plan",
            "write a flow plan: which flow starts when, where to and how large",
        ),
        "serve": (
            "ringtap.trafficgen.commands.serve",
            "receive flows and discard their data, until SIGINT or SIGTERM",
        ),
        "send": ("ringtap.trafficgen.commands.send", "send the flows of a plan, each at its time"),
        "verify": (
            "ringtap.analysis.commands.traffic_verify",
            "compare a flow plan with what was sent and captured",
        ),
        "calibrate": (
            "ringtap.trafficgen.commands.calibrate",
            "measure this host's launch lateness and throughput ceiling over loopback; takes 10 s",
        ),
        "zipapp": (
            "ringtap.trafficgen.commands.zipapp",
            "write the traffic generator as one file that any Python from 3.10 on runs, with nothing installed",
        ),
    },
}

_SUBMIT = (
    "ringtap submit --print --site narval --account def-me --nodes 2 --gpus-per-node 4 --tasks-per-node 4 "
    "--time 3:00:00 -- python train.py"
)
_RUN = (
    "ringtap run -o runs/mine -- torchrun --nproc-per-node 2 examples/scale_model.py --iterations 40 "
    "--compute-s 0.1 0.15"
)
# command without "ringtap" -> examples that end its help, from the blocks of pages that tests run
EXAMPLES = {
    "doctor": ("ringtap doctor",),
    "run": (_RUN,),
    "live": ("ringtap live runs/mine", "ringtap live --plain runs/watched"),
    "analyze": ("ringtap analyze runs/mine",),
    "report": ("ringtap report runs/fast",),
    "compare": ("ringtap compare runs/small runs/large",),
    "sweep": ("ringtap sweep examples/demo.toml --dry-run",),
    "flows": (
        "ringtap flows examples/ring.pcap.gz",
        "ringtap flows examples/ring.pcap.gz --outbound 10.77.0.2 --rates rates.parquet --bin 10ms",
    ),
    "structure": ("ringtap structure examples/ring.pcap.gz",),
    "packets": (
        "ringtap packets runs/job --iteration 12 -o iteration12.pcapng",
        "ringtap packets examples/ring.pcap.gz --from +10s --to +11s -o second.pcapng",
    ),
    "fit": ("ringtap fit examples/points.csv --capacity 25gbit -o fit.json",),
    "predict": (
        "ringtap predict --fit fit.json --load 18gbit",
        "ringtap predict --fit fit.json --slowdown 1.5",
    ),
    "demand": ("ringtap demand --model vgg16 --workers 4 --iteration 370ms",),
    "workload new": (
        "ringtap workload new --model vgg16 --workers 8 -o vgg16",
        "ringtap workload new --run runs/small -o small",
    ),
    "workload show": ("ringtap workload show vgg",),
    "workload scale": ("ringtap workload scale vgg --workers 64 --compute 0.5x -o vgg64",),
    "workload lower": ("ringtap workload lower --collective ring --workers 8 --bytes 1MB --json",),
    "workload simulate": (
        "ringtap workload simulate vgg16 --capacity 25gbit --loads 0:0.8:0.2",
        "ringtap workload simulate vgg --capacity 25gbit --cross load40 --cross load80",
    ),
    "workload export": ("ringtap workload export vgg --to goal -o vgg.goal",),
    "workload import": ("ringtap workload import astra-sim.log --workload vgg --capacity 25gbit",),
    "whatif": ("ringtap whatif resnet50 --capacity 25gbit --latency 10us --loads 0:0.9:0.1",),
    "schedule": ("ringtap schedule vgg resnet --capacity 40gbit --figure circles.svg",),
    "traffic plan": (
        "ringtap traffic plan --kind consistent --load 10gbit --duration 2s --to 10.0.0.1:5001 --seed 1 -o web.plan",
    ),
    "traffic serve": ("ringtap traffic serve --bind 127.0.0.1:5001",),
    "traffic send": ("ringtap traffic send web.plan --log sent.rec",),
    "traffic verify": ("ringtap traffic verify web.plan --sent sent.rec -o verified",),
    "traffic calibrate": ("ringtap traffic calibrate",),
    "traffic zipapp": ("ringtap traffic zipapp -o ringtap-traffic.pyz",),
    "testbed up": ("ringtap testbed up --capacity 250mbit",),
    "testbed exec": ("ringtap testbed exec S0 -- ip -brief addr",),
    "testbed status": ("ringtap testbed status",),
    "testbed down": ("ringtap testbed down --all",),
    "record": ("ringtap record -o runs/second --duration 1s",),
    "submit": (_SUBMIT,),
    "status": ("ringtap status runs/two-models",),
    "merge": ("ringtap merge runs/two-models",),
    "bundle": ("ringtap bundle --site narval -o bundle",),
    "export": (
        "ringtap export runs/job --to parquet -o tables",
        "ringtap export runs/job --to perfetto -o job.pftrace.gz",
    ),
    "completion": ("ringtap completion bash",),
}

# their verbs multiply no large matrices: the threads that BLAS starts as it is imported, one per core, would only spin
_WITHOUT_BLAS_THREADS, _BLAS_THREADS = ("ringtap.analysis.", "ringtap.workload."), "OPENBLAS_NUM_THREADS"
_UNWRITABLE = (errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC)


# of more choices than these, none is listed
_MOST_LISTED = 12


class Parser(argparse.ArgumentParser):
    """Argument parser that reports wrong arguments in one sentence, with the nearest right one."""

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        raise UsageError(f"{message} (see {self.prog} --help)")

    def format_help(self) -> str:
        """Return the help, which ends with examples."""
        examples = EXAMPLES.get(self.prog.removeprefix("ringtap "), ())
        folded = [wrap(f"  {example}", 76, subsequent_indent="      ", break_on_hyphens=False) for example in examples]
        lines = [" \\\n".join(some) for some in folded]
        return super().format_help() + "\n".join(["\nexamples:", *lines, ""] if lines else [])

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; an option that is not known is refused with the nearest one of its command."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser, name = self._parser_of(options), unknown[0].partition("=")[0]
            if not name.startswith("-"):
                parser.error(f"{name!r} is one argument too many")
            if name == "--":
                parser.error("no command goes here: ringtap run -- COMMAND starts a job")
            if name in parser._option_string_actions:
                parser.error(f"{name} comes after the command")
            # all options begin alike, and one of another beginning is no near one
            bare = {known.lstrip("-"): known for known in parser._option_string_actions}
            hint = did_you_mean(name.lstrip("-"), bare, "--").rstrip()
            parser.error(f"there is no option {name}" + f": {hint}" * bool(hint))
        return options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse the arguments; an option of an earlier version, or with its value before the command, is refused."""
        actions = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        commands = actions[0].choices if actions else {}
        before = list(itertools.takewhile(lambda argument: argument not in commands, args or ()))
        is_option = before[:1] and before[0].startswith("-") and before[0] not in self._option_string_actions
        if is_option and not before[-1].startswith("-") and len(before) < len(args or ()):
            commands[args[len(before)]].error(f"{before[0]} comes after the command")
        renamed = _RENAMED_OPTIONS.get(self.prog.partition(" ")[2].partition(" ")[0], {})
        for argument in itertools.takewhile(lambda argument: argument != "--", args or ()):
            name = argument.partition("=")[0]
            if renamed.get(name) in self._option_string_actions:
                self.error(f"there is no option {name}: it is {renamed[name]} now")
        return super().parse_known_args(args, namespace)

    def _parser_of(self, options: argparse.Namespace) -> Parser:
        """Return the parser of the verb, or of its sub-verb, that was called."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and (verb := getattr(options, action.dest)):
                parser: Parser = action.choices[verb]
                return parser._parser_of(options)
        return self

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        listed = f"choose {', '.join(known)}" if len(known) <= _MOST_LISTED else ""
        hint = (did_you_mean(value, known) or listed).rstrip()
        name = "/".join(action.option_strings) or action.metavar or action.dest
        what = f"{name}: {value!r} is not known"
        if isinstance(action, argparse._SubParsersAction):
            what = f"there is no command {value!r}"
            renamed, meant = _RENAMED.get(self.prog, {}), _MEANT if self.prog == "ringtap" else {}
            hint = f"did you mean {meant[value]!r}?" if value in meant else hint
            hint = f"it is {renamed[value]} now" if value in renamed else hint
        raise argparse.ArgumentError(None, f"{what}: {hint}" if hint else what)


def build_parser(verb: str | None, sub_verb: str | None = None) -> argparse.ArgumentParser:
    """Return the argument parser; it has only the arguments of the named verb and sub-verb."""
    return _build({verb}, {sub_verb}, argparse.SUPPRESS)


def build_whole_parser() -> argparse.ArgumentParser:
    """Return the argument parser with the arguments of every verb and sub-verb; imports all their modules."""
    return _build(set(VERBS), {name for verbs in SUB_VERBS.values() for name in verbs}, "what to do")


def _build(asked: Set[str | None], asked_below: Set[str | None], verbs_help: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog="ringtap",
        usage="ringtap COMMAND ...",
        description=f"{_ABOUT}\n\n{_overview()}",
        epilog="In Python: help(ringtap)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(read_segments=_read_segments, read_operations=_read_operations, write_replay=_write_replay)
    parser.add_argument("--version", action="version", version=f"ringtap {ringtap.__version__}")
    subparsers = parser.add_subparsers(prog="ringtap", dest="verb", metavar="COMMAND", required=True, help=verbs_help)
    for name, (module, summary) in VERBS.items():
        if name not in asked:
            subparsers.add_parser(name, add_help=False)
        elif name in SUB_VERBS:
            _add_sub_verbs(subparsers, name, summary, asked_below)
        else:
            importlib.import_module(module).register(subparsers, name, summary)
    return parser


def _add_sub_verbs(subparsers: Any, verb: str, summary: str, asked: Set[str | None]) -> None:
    """Add a verb whose sub-verbs have modules of their own; only the arguments of the asked one are built."""
    parser = subparsers.add_parser(verb, help=summary, description=summary, allow_abbrev=False)
    verbs = parser.add_subparsers(dest=f"{verb}_verb", metavar="COMMAND", required=True)
    for name, (module, text) in SUB_VERBS[verb].items():
        if name in asked:
            importlib.import_module(module).register(verbs, name, text)
        else:
            verbs.add_parser(name, help=text, add_help=False)


def _read_segments(path: Path) -> Iterator[tuple[int, tuple[str, int, str, int], int]]:
    """Read a capture for ``traffic plan``, whose package must not import the analysis."""
    from ringtap.analysis.pcap.read_payload_packets import read_segments

    return read_segments(path)


def _read_operations(path: Path) -> Sequence[Operation]:
    """Read a workload for ``traffic plan``, whose package must not import those of workloads."""
    from ringtap.workload.workload_to_flow_plan import read_operations

    return read_operations(path)


def _write_replay(
    operations: Sequence[Operation], nodes: Sequence[str], iterations: int, name: str, path: Path, force: bool
) -> None:
    """Write the flow plan of a workload for ``workload export``, whose package must not import that of plans."""
    from ringtap.core.flow_plan_file import write_plan
    from ringtap.trafficgen.plans.registry import make_plan

    given = {"from": [name], "node": [*nodes], "iterations": iterations}
    write_plan(make_plan("workload", given, read_operations=lambda _: operations), path, force)


def _overview() -> str:
    """Return the commands under their headings, for ``ringtap --help``."""
    width = max(map(len, VERBS))
    lines = []
    for heading, verbs in GROUPS.items():
        lines += [f"{heading}:", *(f"  {name:{width}}  {text}" for name, (_, text) in verbs.items()), ""]
    return "\n".join([*lines, "ringtap help COMMAND says more about a command, with its options."])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return its exit code."""
    fill_standard_descriptors()
    with guarded(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RingtapWarning)  # the commands print what these say, where it belongs
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    words = [argument for argument in arguments if not argument.startswith("-")]
    verb, sub_verb = (*words[:2], None, None)[:2]
    options = None
    try:
        with _blas_threads_limited(verb, sub_verb):
            options = build_parser(verb, sub_verb).parse_args(arguments)
            code = int(options.handler(options))
        sys.stdout.flush()
        return code
    except RingtapError as error:
        print(f"ringtap: {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except ImportError as error:
        from ringtap.core.installation import missing

        said = missing(error)
        if said is None:
            raise
        print(f"ringtap: {said}", file=sys.stderr)
        return UsageError.exit_code
    except KeyboardInterrupt:
        print("ringtap: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        discard_output()
        return 0
    except OSError as error:
        if error.filename is None and error.errno not in _UNWRITABLE:
            raise
        return _system_failure(error)


@contextmanager
def _blas_threads_limited(verb: str | None, sub_verb: str | None) -> Iterator[None]:
    """Have BLAS start no threads in a verb that starts no job, unless the user says how many."""
    module, _ = SUB_VERBS.get(verb or "", {}).get(sub_verb or "") or VERBS.get(verb or "", ("", ""))
    if _BLAS_THREADS in os.environ or not module.startswith(_WITHOUT_BLAS_THREADS):
        yield
        return
    os.environ[_BLAS_THREADS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_BLAS_THREADS, None)  # main may run in a program


def _system_failure(error: OSError) -> int:
    """Print the error of a file that cannot be used, or of standard output; return the exit code."""
    if error.filename is not None:
        print(f"ringtap: {one_line(failure_message(error))}", file=sys.stderr)
        return UsageError.exit_code
    discard_output()
    print(f"ringtap: the output cannot be written: {error.strerror}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
