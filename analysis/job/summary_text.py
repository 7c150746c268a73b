"""Writes the summary of a run as text, from the numbers of `ringtap.analysis.job.summary.summarize`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ringtap.analysis.job.iteration_budget import SLOW_RANK
from ringtap.analysis.job.stragglers import SLOWER
from ringtap.analysis.job.verdict import parts_rows, verdict
from ringtap.core.run_directory_schema import NOT_NEEDED
from ringtap.core.terminal_escaping import one_line, text_table
from ringtap.core.units import counted, format_duration, format_rate, format_size

# interfaces with fewer bytes are not listed
_FEW_BYTES = 1000
_MAX_PHASES = 8
_MAX_RAS = 8
_MAX_EPOCHS = 20
_EPOCH_HEADS = {
    "epoch": "epoch",
    "epoch_s": "time in s",
    "cumulative_s": "since the start in s",
    "samples_per_s": "samples/s",
    "loss": "loss",
    "accuracy": "accuracy",
    "validation_loss": "validation loss",
    "validation_accuracy": "validation accuracy",
}
# smaller uncertain or unattributed shares are not mentioned
_SURE = 0.01
_NO_VALUE = "not measured"
# parts of an iteration
PARTS = {
    "compute_s": "compute",
    "exposed_s": "exposed communication",
    "optimizer_s": "optimizer step",
    "unattributed_s": "not attributed",
}
# nothing times its forward passes
_PARTS_OF_HOROVOD = {"compute_s": "backward pass", "unattributed_s": "forward pass, and not attributed"}
_PLAIN = {"training": "training", "cross": "cross traffic", "other": "other", "unclassified": "owner not known"}


@dataclass(frozen=True)
class Table:
    """A table within the text: column heads and rows of cells."""

    heads: list[str]
    rows: list[list[str]]


def answer(data: dict[str, Any]) -> list[str]:
    """Return the answer in a few lines: the verdict, and the parts of an iteration."""
    if data["iterations"]["mean_s"] is None and data["run"]["status"] == "failed":
        why = f"The job failed before an iteration was recorded: {data['run']['why']}."
        return [why, "Next: look for the error in what the job printed."]
    if data["iterations"]["mean_s"] is None:
        return ["Where the time goes is not known: no whole iteration was recorded."]
    lines = [*verdict(data["diagnosis"]), _parts(data)]
    return lines[::-1] if data["diagnosis"]["why"] else lines


def _parts(data: dict[str, Any]) -> str:
    mean_s = data["iterations"]["mean_s"]
    begin = f"An iteration takes {format_duration(mean_s)} (mean)"
    if len(data["training_phases"]) > 1 and (phase := shown_phase(data)) is not None:
        begin = f"An iteration of phase {phase['phase']} takes {format_duration(mean_s)} (mean)"
    table = parts_table(data)
    if table is None and any(item["cause"] == SLOW_RANK for item in data["diagnosis"]["unknown"]):
        return f"{begin}."  # the verdict says why no more is known
    if table is None:
        why = data["parts"]["why"] or data["phases"]["why"] or "no rank timed its phases"
        return f"{begin}; where its time goes is not known, for {why}."
    shares = ", ".join(f"{share} {words}" for words, _, share in table.rows)
    return f"{begin}: {shares} ({'rank 0' if data['phases']['source'] == 'timeline' else 'means over the ranks'})."


def parts_table(data: dict[str, Any]) -> Table | None:
    """Return a table of the parts of an iteration; None if none is known."""
    parts = data["parts"]
    names = PARTS | (_PARTS_OF_HOROVOD if data["phases"]["source"] == "horovod" else {})
    known = [(words, parts[name]) for name, words in names.items() if parts[name] is not None]
    if not known:
        return None
    rows = [[words, format_duration(value), f"{value / parts['iteration_s']:.1%}"] for words, value in known]
    return Table(["part", "mean over the ranks", "of the iteration"], rows)


def _slowest_link(data: dict[str, Any]) -> list[str]:
    found = data["links"]
    if len(data["run"]["nodes"]) < 2:
        return []
    if found["slowest"] is None:
        return [f"Which link is slowest is not known: {found['why']}."]
    row = found["rows"][found["slowest"]]
    rate, others = f"{format_rate(row['rate_bps'])} while it has data to send", format_rate(found["others_bps"])
    if row["capacity_bps"]:
        rate += f" ({row['rate_bps'] / row['capacity_bps']:.0%} of what its interface can send)"
    where = f"{row['source']} → {row['destination']}"
    if found["stands_out"]:
        return [f"The slowest link is {where}: {rate}, the others {others} (median)."]
    return [f"No link stands out: the slowest is {where} with {rate}, the others {others}."]


def _budget(data: dict[str, Any]) -> list[str | Table]:
    rows = parts_rows(data["diagnosis"])
    if not rows:
        return []
    count = counted(data["diagnosis"]["iterations"], "iteration")
    heads = [f"mean of {count}", "time", "95 % interval", "of the iteration"]
    return [Table(heads, [list(row) for row in rows])]


def sections(data: dict[str, Any]) -> list[tuple[str, list[str | Table]]]:
    """Return titles and contents of the non-empty sections after the answer, for the terminal and the report."""
    found: tuple[tuple[str, Sequence[str | Table]], ...] = (
        ("", _run(data)),
        ("Training phases", _training_phases(data)),
        ("Time", _time(data)),
        ("Epochs", _epochs(data["epochs"])),
        ("Parts of an iteration", _budget(data)),
        ("Slowest rank", _slowest(data)),
        ("Slow iterations", _slow(data)),
        ("Network", [*_network(data), *_slowest_link(data)]),
        ("Congestion", _congestion(data)),
        ("Nodes", _nodes(data)),
        ("NCCL", _nccl(data)),
        ("Marks", [f"{mark['at_s']:.1f} s  {mark['text']}" for mark in data["marks"]]),
        ("Not collected", _not_collected(data)),
        ("Warnings", data["warnings"]),
    )
    return [(title, list(items)) for title, items in found if items]


def describe(data: dict[str, Any]) -> list[str]:
    """Return the lines of a run's text; ``data`` is from `ringtap.analysis.job.summary.summarize`."""
    lines = [*map(one_line, answer(data)), ""]
    for title, items in sections(data):
        lines += ["", title] if title else []
        for number, item in enumerate(items):
            if isinstance(item, Table):
                # an empty line separates a second table from the first
                repeated = any(isinstance(other, Table) for other in items[:number])
                text = [*[""] * repeated, *text_table([item.heads, *item.rows])]
            else:
                text = [item]
            lines += [f"  {one_line(line)}" if title else one_line(line) for line in text]
    return lines


def _run(data: dict[str, Any]) -> list[str]:
    run, iterations = data["run"], data["iterations"]
    nodes = len(run["nodes"])
    who = counted(run["ranks"], "rank") if run["ranks"] else ""
    where = f"{who} on {counted(nodes, 'node')}" if who else counted(nodes, "node")
    what = f"{counted(iterations['count'], 'iteration')} in" if iterations["count"] else "no iterations,"
    why = f": {run['why']}" if run["why"] else ""
    seconds = "a time that is not known" if run["seconds"] is None else format_duration(run["seconds"])
    lines = [f"{run['directory']}: {where}, {what} {seconds}; {run['status']}{why}"]
    if not run["steps"]:
        lines.append("No optimizer step was recorded, so bytes are those of the whole recording.")
    elif not iterations["count"]:
        lines.append(
            f"{counted(run['steps'], 'step')} of the optimizer {'was' if run['steps'] == 1 else 'were'} recorded. An "
            "iteration lasts from the end of one to the end of the next, so there is none, and bytes are those of the "
            "whole recording."
        )
    return lines


def _training_phases(data: dict[str, Any]) -> list[str | Table]:
    """Describe the phases of the training, if there are several or if a step is not part of an iteration."""
    found, row = data["training_phases"], shown_phase(data)
    lines: list[str | Table] = []
    if row is None:
        return lines
    if len(found) > 1:
        lines.append(f"{len(found)} phases; all that follows is of phase {row['phase']} (--phase N).")
        listed = sorted(found, key=lambda one: (not one["shown"], -(one["iterations_s"] or 0), one["phase"]))
        rows = [_phase_cells(one) for one in sorted(listed[:_MAX_PHASES], key=lambda one: int(one["phase"]))]
        lines.append(Table(["phase", "ranks", "steps", "iterations", "median", "time", "optimizers"], rows))
        if len(found) > _MAX_PHASES:
            lines.append(f"{len(found) - _MAX_PHASES} more phases, which took less time, are in --json.")
    others = [str(other["phase"]) for other in found if other["is_concurrent"] and not other["shown"]]
    if row["is_concurrent"]:
        who = f"phases {', '.join(others[:_MAX_PHASES])}" if len(others) > 1 else f"phase {others[0]}"
        lines.append(f"Other processes, not ranks of its process group, trained at the same time: {who}.")
    if row["mode"] == "round":
        lines.append(f"An iteration is a round of the optimizers: {row['what']}.")
    elif row["mode"] == "most frequent optimizer":
        lines.append(f"The optimizers make no regular rounds, so each step of one is an iteration: {row['what']}.")
    if row["stretches"] > row["starts"]:
        span = f"{format_duration(row['iteration_min_s'])} to {format_duration(row['iteration_max_s'])}"
        times = f"; its iterations take {span}" if row["iterations"] else ""
        lines.append(f"The phase has {row['stretches']} stretches, each with an optimizer of its own{times}.")
    left_out = [(other["left_out"], other["phase"]) for other in found if other["left_out"]]
    lines += [
        f"{counted(count, 'recorded step')} of phase {phase} {'is' if count == 1 else 'are'} in no whole iteration."
        for count, phase in left_out[:_MAX_PHASES]
    ]
    return lines


def shown_phase(data: dict[str, Any]) -> dict[str, Any] | None:
    """Return the phase that the numbers describe; None if no steps were recorded."""
    return next((row for row in data["training_phases"] if row["shown"]), None)


def _phase_cells(row: dict[str, Any]) -> list[str]:
    ranks, size = row["ranks"], row["world_size"]
    who = f"{ranks} of {size}" if size > 1 else f"pid {row['pid']}" if size == 1 else str(ranks)
    times = (
        "-" if row[name] is None else format_duration(row[name]) for name in ("iteration_median_s", "iterations_s")
    )
    return [str(row["phase"]), who, str(row["steps"]), str(row["iterations"]), *times, row["what"]]


def _time(data: dict[str, Any]) -> list[str]:
    item, phases = data["iterations"], data["phases"]
    if item["mean_s"] is None:
        return []
    shown = {name: format_duration(item[f"{name}_s"]) for name in ("median", "mean", "p99", "max")}
    spread = "mean {mean}, p99 {p99}, longest {max}".format(**shown)
    lines = [f"An iteration takes {shown['median']} (median; {spread})."]
    if item["warm_up"]:
        lines.append(
            f"Over {counted(item['measured'], 'iteration')}; {item['warm_up']} of warm-up "
            f"{'is' if item['warm_up'] == 1 else 'are'} left out here and below."
        )
    unmarked, phase = data["run"]["steps"] - item["count"], shown_phase(data)
    if phase is not None and unmarked == phase["stretches"]:
        first = "the first step" if unmarked == 1 else f"the first step of {unmarked} stretches"
        lines.append(f"Nothing marks the beginning of {first} ({counted(data['run']['steps'], 'step')} in all).")
    if item["restarts"]:
        again = counted(item["restarts"], "time")
        lines.append(f"The ranks began again {again}: the job was started again, or joined another process group.")
    if item["skipped"]:
        lines.append(f"Mixed precision skipped the optimizer in {item['skipped']} of them.")
    if item["backwards"] and item["backwards"] > 1:
        lines.append(_backwards(item, data["demand"]["synchronisations"]))
    return [*lines, _throughput(data["throughput"]), *_phases(phases, item["mean_s"])]


def _backwards(item: dict[str, Any], synchronised: float | None) -> str:
    """Describe the backward passes of an iteration, if it has several."""
    count = f"{item['backwards']:.3g} backward passes per iteration"
    if item["optimizers"] > 1:
        return f"{count}, for {item['optimizers']:.0f} optimizers."
    if synchronised is not None and synchronised < item["backwards"] - 0.5:
        return f"Gradients are accumulated: {count}, {synchronised:.3g} of them synchronised."
    return f"{count}: gradients are accumulated, or the optimizer asks for several passes."


def _throughput(item: dict[str, Any]) -> str:
    if item["samples_per_s"] is None:
        return f"Samples/s are not known: {item['why']}."
    samples = counted(item["batch"], "sample")
    return f"Throughput: {_rate(item['samples_per_s'])} samples/s ({counted(item['ranks'], 'rank')}, {samples} each)."


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:,.{1 if samples_per_s < 1000 else 0}f}"


def _epochs(item: dict[str, Any]) -> list[str | Table]:
    """Describe the epochs that the job printed, and the time to an accuracy."""
    rows = item["rows"]
    if not rows:
        return []
    lines: list[str | Table] = [f"{counted(len(rows), 'epoch')}, as printed in {item['source']}."]
    if item["samples_per_s"] is not None:
        lines.append(f"By these prints the job made {_rate(item['samples_per_s'])} samples/s.")
    target, found = item["target_accuracy"], item["target"]
    if found is not None:
        seconds = found["cumulative_s"]
        after = "" if seconds is None else f", after {format_duration(seconds)}"
        accuracy = f"{found['validation_accuracy']:.3f}"
        what = "Best validation accuracy" if target is None else f"Validation accuracy of {target:g} reached"
        lines.append(f"{what}: {accuracy} in epoch {found['epoch']}{after}.")
    elif target is not None:
        lines.append(f"Validation accuracy of {target:g} not reached: {item['why']}.")
    if len(rows) > _MAX_EPOCHS:
        lines.append(f"The last {_MAX_EPOCHS} epochs (--json has all):")
    shown = {name: heads for name, heads in _EPOCH_HEADS.items() if any(row[name] is not None for row in rows)}
    cells = [[_epoch_cell(name, row[name]) for name in shown] for row in rows[-_MAX_EPOCHS:]]
    return [*lines, Table(list(shown.values()), cells)]


def _epoch_cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "epoch":
        return str(value)
    return f"{value:,.2f}" if name == "samples_per_s" else f"{value:.3f}"


def _phases(phases: dict[str, Any], iteration_s: float) -> list[str]:
    if phases["source"] == "none":
        return [f"Compute and communication: {_NO_VALUE}, for {phases['why']}."]
    lines = []
    if phases["compute_s"] is not None:
        what = "Backward pass (" if phases["source"] == "horovod" else "Compute (forward and backward pass, "
        lines.append(f"{what}longest rank): {format_duration(phases['compute_s'])}.")
    if phases["communication_s"] is not None:
        hidden, exposed = phases["overlap_s"], phases["exposed_s"]
        spans = format_duration(phases["communication_s"])
        lines.append(
            f"Communication spans {spans}: {format_duration(hidden)} hidden behind "
            f"the backward pass, {format_duration(exposed)} exposed ({exposed / iteration_s:.1%} of the iteration)."
        )
        least = phases["exposed_least_s"]
        if least is not None and exposed > 0 and (exposed - least) > 0.01 * iteration_s:
            lines.append(
                f"Of what is exposed {format_duration(exposed - least)} is waiting for the last rank (mean over the "
                f"ranks), {format_duration(least)} remains for the network."
            )
    if (rest := phases["unattributed_s"]) is not None and rest > _SURE * iteration_s:
        share = f"{rest / iteration_s:.1%} of the iteration"
        what = "loading data, Python, waiting or communication outside of DDP"
        if phases["source"] == "horovod":
            what = "forward pass, loading data, Python, communication outside of Horovod's optimizer"
        lines.append(f"Not attributed: {format_duration(rest)} ({share}; {what}).")
    return lines


def _slowest(data: dict[str, Any]) -> list[str]:
    found, ranks = data["slowest"], data["run"]["ranks"]
    if found is None and ranks < 2:
        return []
    if found is None:
        few = counted(data["iterations"]["measured"], "iteration")
        return [f"Which rank is slowest is not known: {few} of {ranks} ranks are too few to tell it from chance."]
    where = f"rank {found['rank']} (node {found['node']})"
    by = "" if found["by_s"] is None else f", by {format_duration(found['by_s'])} (median)"
    often = f"in {found['iterations']} of {counted(found['of'], 'iteration')}{by}"
    how = "its last gradient was ready last" if found["by"] == "last gradient ready" else "its step ended last"
    if not found["certain"]:
        error = format_duration(found["clock_error_s"])
        return [f"Not certain: {where} came last {often}, but clocks compare to within {error} only."]
    if found["by_chance"]:
        chance = f"chance alone gives {found['share_by_chance']:.0%}"
        return [f"No rank stands out: {where} came last most often, {often}; {chance}."]
    if not found["stands_out"]:
        share = "" if found["by_share"] is None else f"; that is {found['by_share']:.1%} of an iteration"
        return [f"No rank costs much: {where} came last most often, {often}{share}."]
    lines = [f"R{where[1:]} is the slowest: {how} {often}."]
    lines += [f"What differs on it: {_versus(item, 'the others')}." for item in found["differences"]]
    if not found["differences"]:
        lines.append("Nothing that was recorded differs on it.")
    return lines


def _versus(item: dict[str, Any], rest: str) -> str:
    here, others = (_value(item[name], item["unit"]) for name in ("here", "others"))
    return f"{item['what']} {here}, {rest} {others}"


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return format_duration(value)
    return format_size(value) if unit == "bytes" else f"{value:.3g}"


def _slow(data: dict[str, Any]) -> list[str]:
    found = data["slow_iterations"]
    if found is None or found["mean_s"] < SLOWER * found["usual_s"]:
        return []
    slow, usual = format_duration(found["mean_s"]), format_duration(found["usual_s"])
    lines = [f"The slowest {found['iterations']} take {slow} (mean), the faster half {usual}."]
    lines += [f"What differs in them: {_versus(item, 'usually')}." for item in found["differences"]]
    return lines


def _network(data: dict[str, Any]) -> list[str | Table]:
    totals, what = data["bytes"], f"per {data['bytes']['per']}"
    what = "of the whole recording" if totals["per"] == "run" else what
    whose = "to and from the ranks recorded here" if data["run"]["missing_ranks"] else "all nodes together"
    per = f"Payload {what}, {whose}"
    rows = [
        [_PLAIN[name], *(_size(item[side]) for side in ("sockets", "packets")), _share(item["difference"])]
        for name, item in totals["classes"].items()
        if item["sockets"] is not None or item["packets"] is not None
    ]
    lines: list[str | Table] = [*_demand(data)]
    if rows:
        lines.append(_without_empty(Table([per, "by sockets", "by packets", "difference"], rows)))
    if totals["resolution_share"] is not None:
        period, share = format_duration(totals["sampled_every_s"]), totals["resolution_share"]
        spread = f"Sockets are sampled every {period}, {share:.0%} of an iteration; in between bytes are spread evenly"
        uncertain = totals["uncertain_share"]
        lines.append(f"{spread}." if uncertain <= _SURE else f"{spread}, so these means are good to ± {uncertain:.1%}.")
    return lines + ([] if totals["too_short"] else _byte_accounts(data["byte_accounts"], totals["per"]))


def _demand(data: dict[str, Any]) -> list[str]:
    item, totals = data["demand"], data["bytes"]
    if totals["too_short"]:
        count = counted(data["iterations"]["measured"], "iteration")
        each = format_duration(data["iterations"]["mean_s"])
        every = format_duration(totals["sampled_every_s"])
        short = f"it has {count} of {each}, and sockets are sampled every {every}"
        return [f"The job is too short to say what it moves in an iteration: {short}."]
    if item["sent_bytes"] is None:
        return []
    lines = [f"A rank sends {format_size(item['sent_bytes'])} of payload per iteration."]
    if item["why"]:
        lines.append(f"Equation 3.1 (ring all-reduce) does not say how much it should be: {item['why']}.")
    if item["expected_bytes"] is not None and item["difference"] is not None:
        lines.append(
            f"{format_size(item['synchronised_bytes'])} of gradients per iteration and {item['ranks']} ranks ask for "
            f"{format_size(item['expected_bytes'])} by equation 3.1 (ring all-reduce): {item['difference']:+.2%}."
        )
    return lines


def _byte_accounts(byte_accounts: list[dict[str, Any]], per: str) -> list[str | Table]:
    rows = []
    for account in byte_accounts:
        where = f"{account['node']} {account['interfaces'] or account['path']} {account['direction']}"
        sides = [account[f"{name}_bytes"] for name in ("socket", "packet_payload", "nic_payload", "nic")]
        if max((side for side in sides if side is not None), default=0) < _FEW_BYTES:
            continue
        off = (_share(account[name]) for name in ("packets_difference", "nic_difference", "overhead_share"))
        rows.append([where, *(_size(side) for side in sides), *off])
    if not rows:
        return []
    first = "Interfaces, whole recording" if per == "run" else f"Interfaces, per {per}"
    heads = [first, "sockets", "packets", "counters", "with headers", "packets off", "counters off", "overhead"]
    return [_without_empty(Table(heads, rows))]


def _without_empty(table: Table) -> Table:
    """Return a table without the columns in which nothing is known, such as those of packets in a run without any."""
    kept = [number for number in range(len(table.heads)) if any(row[number] != "-" for row in table.rows)]
    return Table([table.heads[number] for number in kept], [[row[number] for number in kept] for row in table.rows])


def _size(value: float | None) -> str:
    return "-" if value is None else format_size(value)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


def _congestion(data: dict[str, Any]) -> list[str]:
    item = data["congestion"]
    per = "per iteration" if item["per"] == "iteration" else "in all"
    lines = []
    if item["retransmissions"]:
        size = item["retransmitted_bytes"]
        text = "of a size that the records do not give" if size is None else format_size(size)
        lines.append(f"Retransmitted {per}: {item['retransmissions']:.3g} segments, {text}.")
    elif item["retransmissions"] is None and item["segments_retransmitted"]:
        lines.append(
            f"Retransmitted {per}, by all programs of the nodes: {item['segments_retransmitted']:.3g} segments."
        )
    counts = {
        "ce_marked": "packets marked by congested queues (ECN)",
        "queue_drops": "packets dropped in queues",
        "nic_drops": "packets dropped by interfaces",
        "pause_frames": "pause frames",
        "cnp_sent": "congestion notifications sent",
        "cnp_handled": "congestion notifications handled",
    }
    known = [f"{item[name]:.3g} {words}" for name, words in counts.items() if item.get(name)]
    if known:
        lines.append(f"{per.capitalize()}: {', '.join(known)}.")
    if item["queue_backlog_bytes"]:
        lines.append(f"The largest backlog seen in a queue is {format_size(item['queue_backlog_bytes'])}.")
    is_recorded = any(value == 0 for name, value in item.items() if name != "per")
    return lines or ["No sign of it in what was recorded."] * is_recorded


def _nodes(data: dict[str, Any]) -> list[Table]:
    rows = []
    for node in data["nodes"]:
        cores = [node[f"cpu_{name}_cores"] for name in ("busy", "job", "other")]
        error = node["clock_error_s"]
        reference = node["clock_reference"] == node["node"]
        clock = _NO_VALUE if error is None else "reference" if reference else f"± {format_duration(error)}"
        gpu = node["gpu_utilization_pct"]
        shown = ["-" if value is None else f"{value:.2f}" for value in cores]
        total = "-" if node["cpus"] is None else str(node["cpus"])
        rows.append([node["node"], total, *shown, "-" if gpu is None else f"{gpu:.0f} %", clock])
    heads = ["node", "processors", "busy", "for the job", "for others", "GPU", "clock error"]
    return [_without_empty(Table(heads, rows))] if rows else []


def _nccl(data: dict[str, Any]) -> list[str]:
    lines = []
    for item in data["nccl"]:
        via = ", ".join(f"{nic['name']} ({nic['network']})" for nic in item["interfaces"]) or "no interface named"
        rank = "" if item["rank"] is None else f"rank {item['rank']} of {item['ranks']}, "
        version = item["version"] or "version not logged"
        lines.append(f"{item['host']}: {rank}{version}, network {item['network'] or '-'}, {via}")
        lines += [f"  ring {number}: {' '.join(map(str, ring))}" for number, ring in enumerate(item["rings"][:2])]
        lines += [f"  NCCL warns: {text}" for text in item["warnings"][:3]]
    ras = data["nccl_ras"]
    lines += ras["texts"][:_MAX_RAS]
    if len(ras["texts"]) > _MAX_RAS:
        lines.append(f"RAS: {len(ras['texts']) - _MAX_RAS} more (--json has all).")
    if ras["answers"] and not ras["texts"]:
        lines.append(f"RAS: all ranks answered, and none stayed behind, in {counted(ras['answers'], 'answer')}.")
    return lines


def missing(data: dict[str, Any]) -> list[dict[str, str]]:
    """Return what was not collected, one item per reason: ``what``, ``where``, ``state``, ``why`` and ``remedy``."""
    by_reason: dict[tuple[str, str, str, tuple[str, ...]], list[str]] = {}
    for item in data["not_collected"]:
        key = (item["why"].rstrip("."), item["remedy"].rstrip("."), item["state"], tuple(item["nodes"]))
        by_reason.setdefault(key, []).append(item["what"])
    found = []
    for (why, remedy, state, nodes), what in by_reason.items():
        some = 0 < len(nodes) < len(data["run"]["nodes"])
        where = ", ".join(nodes) if some else ""
        how = "" if state in ("absent", "unavailable") else state
        item = {"what": ", ".join(dict.fromkeys(what)), "where": where, "state": how, "why": why, "remedy": remedy}
        found.append({name: one_line(text) for name, text in item.items()})
    return found


def _not_collected(data: dict[str, Any]) -> list[str]:
    lines, elsewhere = [], []
    for item in missing(data):
        if item["remedy"].startswith(NOT_NEEDED):
            elsewhere.append(item["what"])
            continue
        where = f" on {item['where']}" if item["where"] else ""
        how = f" ({item['state']})" if item["state"] else ""
        remedy = f" ({item['remedy']})" if item["remedy"] else ""
        lines.append(f"{item['what']}{where}{how}: {item['why']}{remedy}")
    if elsewhere:
        lines.append(f"not found on a node, where it may not be needed: {', '.join(dict.fromkeys(elsewhere))}")
    return lines
