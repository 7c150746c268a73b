"""Summarizes a run in numbers, which the text and ``--json`` both present."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

import ringtap
from ringtap.analysis.job import flows
from ringtap.analysis.job.collection_status import NOT_ASKED, status
from ringtap.analysis.job.node_aggregation import PARTS
from ringtap.analysis.job.run import Job
from ringtap.analysis.job.stragglers import links, mean_of_sums, slow_iterations, slowest
from ringtap.analysis.job.throughput_and_epochs import summarize_epochs, throughput
from ringtap.analysis.runs.node_records import NodeLogs
from ringtap.analysis.runs.samples_to_iterations import plain
from ringtap.analysis.runs.traffic_classes import CLASSES, TRAINING
from ringtap.core.link_counter_sources import stacked
from ringtap.core.run_directory_schema import MARK, MARKS_JSONL, PACKETS, PACKETS_JSON, REGULAR_SHARE
from ringtap.core.thesis_neural_networks import ring_bytes
from ringtap.core.units import format_change, format_duration

SCHEMA = 1
# largest difference between two byte counts without a warning
DISAGREEMENT = 0.02
_FROM_SOCKETS = ("retransmissions", "retransmitted_bytes", "ce_marked")
_FROM_COUNTERS = (
    *("segments_retransmitted", "nic_drops", "queue_drops", "pause_frames", "ecn_marks", "cnp_sent", "cnp_handled"),
)
_INFINIBAND = ("infiniband_tx_bytes", "infiniband_rx_bytes")
_NODE_MEANS = ("cpu_busy_cores", "cpu_job_cores", "cpu_other_cores", "cpu_steal_cores", "gpu_utilization_pct")
# by how much parts may exceed the iteration: ranks end the first and the last one at different times, and DDP's times
# are by a clock that may be slewed by 500 ppm
_MAX_EXCESS = 0.01
_SHARDED = "ZeroRedundancyOptimizer"
# fewer bytes than this are not compared
_FEW_BYTES = 10_000


def summarize(job: Job) -> dict[str, Any]:
    """Return all numbers of a run as plain values; None if not known."""
    data: dict[str, Any] = {"schema": SCHEMA, "ringtap": ringtap.__version__, "run": _run(job)}
    phases = job.phases.to_dict("records")
    data["training_phases"] = [{str(name): plain(value) for name, value in row.items()} for row in phases]
    data["iterations"] = _times(job)
    data["throughput"] = throughput(
        *(job.logs.printed, job.logs.given, job.logs.run.info.get("batch")),
        *(job.logs.work.world_size, data["run"]["steps"], data["iterations"]["mean_s"]),
    )
    data["epochs"] = summarize_epochs(job.logs.printed, job.logs.given)
    data["phases"] = _phases(job)
    data["parts"] = _parts(job)
    data["bytes"] = _bytes(job)
    data["nccl"] = _nccl(job)
    data["demand"] = _demand(job, data["nccl"])
    data["byte_accounts"] = _byte_accounts(job)
    data["congestion"] = _congestion(job)
    data["nodes"] = _nodes(job)
    data["diagnosis"] = job.diagnosed
    data["slowest"] = slowest(job)
    data["links"] = links(job)
    data["slow_iterations"] = slow_iterations(job)
    data["captures"] = _captures(job)
    data["nccl_ras"] = _nccl_ras(job)
    data["marks"] = [{"at_s": (at_ns - job.logs.window_ns[0]) / 1e9, "text": text} for at_ns, text in read_marks(job)]
    data["not_collected"] = _not_collected(job)
    data["warnings"] = [*_log_warnings(job), *_byte_warnings(data), *_capture_warnings(job)]
    data["warnings"] += [*_clock_warnings(job, data), *_sample_warnings(job)]
    return data


def mean_of(table: pd.DataFrame, name: str, rows: Any = None) -> float | None:
    """Return the mean of a column; None if the table lacks the column, the rows or their values."""
    if name not in table or not len(table):
        return None
    values = table[name] if rows is None else table[name].iloc[rows]
    number: float | None = plain(values.mean())
    return number


def _run(job: Job) -> dict[str, Any]:
    info = job.logs.run.info
    run_status, why = status(info, job.logs.nodes, job.logs.work.missing_ranks)
    created = info.get("created_ns")
    begin, end = job.logs.window_ns
    seconds = created // 10**9 if isinstance(created, int) else None
    stamp = None if seconds is None else datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    work = job.logs.work
    return {
        "directory": str(job.path),
        "status": run_status,
        "why": why,
        "argv": [str(word) for word in info.get("argv") or []],
        "created_utc": stamp.strftime("%Y-%m-%d %H:%M:%S UTC") if stamp else "",
        "nodes": list(job.logs.nodes),
        "ranks": int(work.processes["rank"].nunique()),
        "missing_ranks": work.missing_ranks,
        "steps": work.steps,
        "seconds": (end - begin) / 1e9 if end > begin else None,
    }


def _times(job: Job) -> dict[str, Any]:
    table = job.logs.work.iterations
    seconds = table["iteration_s"].to_numpy(np.float64)[job.logs.measured]
    item: dict[str, Any] = {"count": len(table), "measured": len(seconds)}
    item["warm_up"] = len(table) - len(seconds)
    item["skipped"] = int(table["skipped"].sum()) if len(table) else 0
    item["restarts"] = int(table["generation"].max()) if len(table) else 0
    for name in ("backwards", "optimizers"):
        counts = table[name].iloc[job.logs.measured]
        usual = (counts == counts.median()).mean() >= REGULAR_SHARE  # else there is no usual number
        item[name] = plain(counts.median() if usual else counts.mean()) if len(seconds) else None
    names = ("mean_s", "median_s", "p99_s", "min_s", "max_s", "std_s")
    if not len(seconds):
        return item | dict.fromkeys(names)
    std = float(seconds.std(ddof=1)) if len(seconds) > 1 else None
    values = (seconds.mean(), np.median(seconds), np.percentile(seconds, 99), seconds.min(), seconds.max(), std)
    return item | {name: plain(value) for name, value in zip(names, values, strict=True)}


def _phases(job: Job) -> dict[str, Any]:
    table = job.logs.work.iterations
    item: dict[str, Any] = {"source": job.logs.work.source, "why": job.logs.work.why}
    for name in ("compute_s", "communication_s", "exposed_s", "exposed_least_s", "overlap_s", "unattributed_s"):
        item[name] = mean_of(table, name, job.logs.measured)
    return item


def _parts(job: Job) -> dict[str, Any]:
    """Return the parts of an iteration, means over the ranks, which add up to ``iteration_s``.

    They are of the iterations of which all parts are known. By Horovod's timeline, the optimizer step is not separable.
    Parts that take longer than the iteration are refused: ``why`` says so.
    """
    sums = job.logs.rank_sums
    parts: dict[str, Any] = dict.fromkeys(("iteration_s", *PARTS)) | {"why": ""}
    if not len(sums):
        return parts
    of_ranks = pd.DataFrame({name: mean_of_sums(sums, f"whole_{name}") for name in ("iteration_s", *PARTS)}).dropna()
    if not len(of_ranks):
        whole_s = mean_of(job.logs.work.iterations, "iteration_s", job.logs.measured)
        return parts | {"iteration_s": whole_s, "exposed_s": mean_of(job.ranks, "exposed_s")}
    below = of_ranks["unattributed_s"] < -_MAX_EXCESS * of_ranks["iteration_s"]
    if below.any():
        row = of_ranks[below].iloc[0]
        spent_s = float(row["iteration_s"] - row["unattributed_s"])
        recorded = f"forward and backward passes and optimizer steps of {format_duration(spent_s)}"
        why = f"rank {of_ranks[below].index[0]} has {recorded} in an iteration of {format_duration(row['iteration_s'])}"
        return parts | {"why": f"{why}: passes ran at the same time, or were recorded in the wrong iteration"}
    found = {name: float(of_ranks[name].mean()) for name in ("iteration_s", *PARTS)}
    excess_s = sum(found[name] for name in PARTS) - found["iteration_s"]
    assert abs(excess_s) <= 1e-6 * found["iteration_s"], f"parts of an iteration exceed it by {excess_s} s"
    return parts | found


def _bytes(job: Job) -> dict[str, Any]:
    """Return the payload per iteration by class over all nodes; of the whole recording if iterations are too few."""
    too_short = job.logs.is_too_short
    has, table = len(job.logs.work.iterations) > 0 and not too_short, job.iterations
    result: dict[str, Any] = {"per": "iteration" if has else "run", "too_short": too_short, "classes": {}}
    for kind in (*CLASSES, flows.UNCLASSIFIED):
        by_sockets, by_packets = _class_means(job, kind, table if has else None)
        is_comparable = job.logs.captured.not_captured.get(kind, 0) <= DISAGREEMENT
        names = f"packet_{kind}_bytes", f"{kind}_bytes"
        difference = None
        if is_comparable and has:
            difference = _difference_in(table.iloc[job.logs.measured], *names)
        elif is_comparable:
            difference = _difference(by_packets, by_sockets)
        item = {"sockets": by_sockets, "packets": by_packets, "difference": difference}
        mine = job.logs.traffic.flows[job.logs.traffic.flows["traffic_class"] == kind]
        result["classes"][kind] = item | {"flows": len(mine) if job.logs.traffic.nodes else None}
    covered = table["training_bytes"].iloc[job.logs.measured].notna().sum() if has and job.logs.traffic.nodes else None
    result["iterations"] = plain(covered)
    captured = [
        table[f"packet_{kind}_bytes"].iloc[job.logs.measured].notna().sum() for kind in job.logs.captured.by_class
    ]
    result["captured_iterations"] = plain(max(captured)) if has and captured else None
    every_s, median_s = job.logs.traffic.every_s, job.logs.work.iterations["iteration_s"].median()
    result["sampled_every_s"] = plain(every_s)
    result["uncertain_share"] = job.logs.uncertain_share
    # growth between two samples is spread evenly: both borders of an iteration are uncertain by half a period
    result["resolution_share"] = plain(every_s / median_s) if every_s and has and median_s else None
    return result


def _class_means(job: Job, kind: str, table: pd.DataFrame | None) -> tuple[float | None, float | None]:
    """Return the bytes of a class by sockets and by packets: means per iteration; without a table, of the run."""
    if table is not None:
        return mean_of(table, f"{kind}_bytes", job.logs.measured), mean_of(
            table, f"packet_{kind}_bytes", job.logs.measured
        )
    flow_table, by_packets = job.logs.traffic.flows, job.logs.captured.by_class.get(kind)
    by_sockets = None
    if kind in CLASSES and job.logs.traffic.nodes:
        by_sockets = float(flow_table.loc[flow_table["traffic_class"] == kind, "payload_bytes"].sum())
    # of a job whose iterations are too few, captured packets are counted only within the iterations
    of_all = by_packets is not None and not len(job.logs.work.iterations)
    return by_sockets, float(by_packets.sum()) if by_packets is not None and of_all else None


def _difference(value: float | None, against: float | None) -> float | None:
    if value is None or against is None or against < _FEW_BYTES:
        return None
    return value / against - 1


def _difference_in(table: pd.DataFrame, name: str, against: str) -> float | None:
    """Return the difference of two columns' means over the rows that have both."""
    if name not in table or against not in table:
        return None
    both = table[table[name].notna() & table[against].notna()]
    return _difference(mean_of(both, name), mean_of(both, against))


def _demand(job: Job, nccl: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare equation 3.1 with the bytes that the ranks' sockets sent; ``nccl`` is what NCCL's logs say."""
    count = job.logs.work.world_size
    sums = job.logs.rank_sums.sum(numeric_only=True)
    synced, syncs = (plain(mean_of_sums(sums.to_frame().T, name).iloc[0]) for name in ("synced_bytes", "syncs"))
    sent = mean_of(job.ranks, "sent_bytes")
    why = ""
    if job.logs.work.comm_hook:
        why = f"gradients are exchanged by the communication hook {job.logs.work.comm_hook}"
    elif any(
        _SHARDED in str(what)
        for what in job.logs.work.phases.loc[job.logs.work.phases.index == job.logs.work.phase, "what"]
    ):
        why = f"{_SHARDED} sends parameters, too"
    elif past := _transports_past_tcp(nccl):
        why = f"NCCL sends by {', '.join(past)}, past TCP"
    expected = ring_bytes(synced, count) if synced and count > 1 and not why else None
    return {
        "gradient_bytes": job.logs.work.gradient_bytes,
        "ranks": count,
        "synchronisations": syncs,
        "synchronised_bytes": synced,
        "expected_bytes": expected,
        "sent_bytes": sent,
        "difference": _difference(sent, expected),
        "why": why,
        "equation": "thesis, equation 3.1: 2(N-1)/N times the gradients' bytes, per rank and synchronisation",
    }


def _byte_accounts(job: Job) -> list[dict[str, Any]]:
    rows = pd.concat([part["accounts"].read() for part in job.logs.parts])
    result = []
    for row in rows.to_dict("records"):
        item: dict[str, Any] = {str(name): plain(value) for name, value in row.items()}
        sides = {"nic_difference": "nic_payload_bytes", "packets_difference": "packet_payload_bytes"}
        for name, side in sides.items():
            item[name] = _difference(item.pop(f"{side}_of_both"), item.pop(f"socket_bytes_with_{side}"))
        payload = item["nic_payload_bytes"]
        moved = None if payload is None else payload + (item["retransmitted_bytes"] or 0)
        item["overhead_share"] = _difference(item["nic_bytes"], moved)
        result.append(item)
    return result


def _congestion(job: Job) -> dict[str, Any]:
    table, nodes = job.iterations, job.logs.of_nodes
    if len(table) and not job.logs.is_too_short:
        part = table.iloc[job.logs.measured]
        item: dict[str, Any] = {name: mean_of(part, name) for name in (*_FROM_SOCKETS, *_FROM_COUNTERS)}
        return item | {"per": "iteration", "queue_backlog_bytes": plain(part["queue_backlog_bytes"].max())}
    item = {name: plain(nodes[f"{name}_sum"].sum(min_count=1)) for name in _FROM_COUNTERS}
    for name in _FROM_SOCKETS:
        item[name] = float(job.logs.traffic.flows[name].sum()) if job.logs.traffic.nodes else None
    backlog = plain(nodes["largest_backlog_bytes"].max()) if len(nodes) else None
    return item | {"per": "run", "queue_backlog_bytes": backlog}


def _nodes(job: Job) -> list[dict[str, Any]]:
    table = job.logs.of_nodes.reindex(list(job.logs.nodes))
    result = []
    for name, node in job.logs.nodes.items():
        item = {"node": name, "cpus": plain((node.info.get("before") or {}).get("cpus"))}
        item |= {column: plain(table.at[name, column]) for column in (*_NODE_MEANS, *_INFINIBAND)}
        item["memory_available_bytes"] = plain(table.at[name, "least_memory_bytes"])
        error_ns = node.clock.error_ns
        item |= {"clock_error_s": None if error_ns is None else error_ns / 1e9, "clock_reference": node.clock.reference}
        result.append(item | {"clock_steps": len(node.clock.steps)})
    return result


def _captures(job: Job) -> list[dict[str, Any]]:
    result = []
    for name, found in job.logs.captured.packets.items():
        facts = job.logs.nodes[name].json(PACKETS_JSON, PACKETS)
        item = {"node": name, "packets": int(found.flows["packets"].sum()), "without_tcp": found.others}
        result.append(item | {"dropped": found.dropped, "tool": facts.get("tool") or "", "filter": facts.get("filter")})
    return result


def _nccl(job: Job) -> list[dict[str, Any]]:
    from ringtap.analysis.job.nccl_log import read_nccl

    read = (node.read(name, read_nccl) for node in job.logs.nodes.values() for name in node.names("nccl/*.log"))
    return [found for found in read if found is not None]


def _transports_past_tcp(nccl: list[dict[str, Any]]) -> list[str]:
    """Return the transports that NCCL's logs name, unless one of them is TCP."""
    found = {"/".join(transport.split("/")[:2]) for item in nccl for transport in item["links"].values()}
    return [] if "NET/Socket" in found else sorted(found)


def _nccl_ras(job: Job) -> dict[str, Any]:
    from ringtap.analysis.job.nccl_ras import answers, read_ras, state_text

    nodes = job.logs.nodes.values()
    ranks = [item for node in nodes for item in read_ras(node)]
    begin_ns = job.logs.window_ns[0]
    texts = [state_text(item, begin_ns) for item in ranks]
    return {"answers": sum(map(answers, nodes)), "ranks": ranks, "texts": texts}


def read_marks(job: Job) -> list[tuple[int, str]]:
    """Return the time in ns and the text of each mark that somebody set while watching."""
    lines = NodeLogs(job.path).lines(MARKS_JSONL, MARK)
    t_ns = np.array([line["t_ns"] for line in lines], np.int64)
    reference = next((node.clock for name, node in job.logs.nodes.items() if node.clock.reference == name), None)
    times_ns = t_ns if reference is None else reference.unstepped(t_ns)
    return [(at_ns, line.get("text", "")) for at_ns, line in zip(times_ns.tolist(), lines, strict=True)]


def _not_collected(job: Job) -> list[dict[str, Any]]:
    """List missing parts of the run with reasons; equal entries of several nodes are one."""
    table = job.collectors
    rows = table[~table["state"].isin(("ok",))]
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows.to_dict("records"):
        key = (str(row["collector"]), str(row["state"]), str(row["reason"]), str(row["remedy"]))
        found.setdefault(key, []).append(str(row["node"]))
    items = [
        {"what": what, "state": state, "why": why, "remedy": remedy, "nodes": names}
        for (what, state, why, remedy), names in found.items()
    ]
    known = {str(name) for name in table["collector"]}
    for item in job.logs.run.info.get("not_collected") or []:
        if isinstance(item, dict) and str(item.get("what", "")) not in known:
            what, why = str(item.get("what", "")), str(item.get("why", ""))
            items.append({"what": what, "state": "absent", "why": why, "remedy": "", "nodes": []})
    return sorted(items, key=lambda item: item["why"] == NOT_ASKED)


def _log_warnings(job: Job) -> Iterable[str]:
    torn = sorted({*job.logs.run.torn, *(f"nodes/{name}" for node in job.logs.nodes.values() for name in node.torn)})
    if torn:
        more = f" and {len(torn) - 2} more" if len(torn) > 2 else ""
        yield f"{', '.join(torn[:2])}{more} end in a torn record, which was dropped"
    for node in job.logs.nodes.values():
        yield from dict.fromkeys(node.problems)
        if node.clock.steps:
            yield _clock_step_warning(node)
    if job.logs.work.why and job.logs.work.source != "none":
        yield job.logs.work.why


def _clock_step_warning(node: NodeLogs) -> str:
    """Describe the clock steps of a node during the run and the figures that they leave uncertain."""
    steps = node.clock.steps
    by = ", ".join(format_change(step.step_ns / 1e9) for step in steps[:3]) + (", …" if len(steps) > 3 else "")
    text = f"the clock of {node.name} was set during the run ({by}): times are those that it would have shown otherwise"
    text += "; DDP's times of the iterations in which it was set are left out"
    if node.captures:
        text += ", and packets of the seconds in which it was set may be counted in a wrong iteration"
    return text


def _byte_warnings(data: dict[str, Any]) -> Iterable[str]:
    covered, measured = data["bytes"]["iterations"], data["iterations"]["measured"]
    if covered is not None and covered < measured:
        yield f"socket logs cover {covered} of {measured} iterations: bytes and retransmissions are means of these"
    captured = data["bytes"]["captured_iterations"]
    if captured is not None and captured < measured:
        yield f"packets of {captured} of {measured} iterations were kept: their bytes are means of these"
    for account in data["byte_accounts"]:
        where = f"{account['node']} {account['interfaces'] or account['path']} {account['direction']}"
        for name, side in (("nic_difference", "interface counters"), ("packets_difference", "packets")):
            if account[name] is not None and abs(account[name]) > DISAGREEMENT:
                yield f"{where}: {side} and sockets disagree by {account[name]:+.1%}"
    for capture in data["captures"]:
        if capture["dropped"]:
            yield f"the capture on {capture['node']} dropped {capture['dropped']} packets: its bytes are too low"
        elif capture["dropped"] is None:
            yield f"the capture on {capture['node']} does not say how many packets it dropped"


def _capture_warnings(job: Job) -> Iterable[str]:
    share = job.logs.captured.not_captured.get(TRAINING, 0)
    if share > DISAGREEMENT:
        has_all = all(found.has_loopback and found.has_network for found in job.logs.captured.packets.values())
        remedy = "" if has_all else " (--interface any captures them all)"
        yield f"{share:.0%} of the training payload passes no captured interface{remedy}"
    for name, found in job.logs.captured.packets.items():
        above = sorted(stacked(job.logs.nodes[name].info.get("before") or {}))
        if above and not found.copies and (found.flows["interface"] == "any").any():
            yield (
                f"the capture on {name} is of all interfaces, and no packet was recognized as a copy: what passes "
                f"{', '.join(above)} may count twice (--interface NIC captures one)"
            )


def _clock_warnings(job: Job, data: dict[str, Any]) -> Iterable[str]:
    found = job.logs.work.processes
    with_ranks = set(found["node"]) if len(job.logs.work.iterations) else set()
    unknown = sorted(name for name in with_ranks if job.logs.nodes[name].clock.error_ns is None)
    if len(with_ranks) > 1 and unknown:
        names = ", ".join(unknown)
        yield f"clock offsets of {names} were not measured: times of ranks on different nodes are compared as they are"
    errors = [job.logs.nodes[name].clock.error_ns for name in with_ranks]
    known = [error for error in errors if error is not None]
    exposed = data["phases"]["exposed_least_s"]
    if len(with_ranks) > 1 and known and data["slowest"] and data["slowest"]["by_s"] is not None:
        error_s = 2 * max(known) / 1e9
        if error_s > data["slowest"]["by_s"]:
            yield (
                f"the clocks' error ({format_duration(error_s)}) exceeds what ranks differ by "
                f"({format_duration(data['slowest']['by_s'])}): which rank is slowest is not certain"
            )
        if exposed is not None and error_s > exposed > 0:
            yield f"the clocks' error ({format_duration(error_s)}) exceeds the least exposed communication of a rank"


def _sample_warnings(job: Job) -> Iterable[str]:
    table = job.collectors
    missed = table[table["missed_samples"].fillna(0) > 0]
    if len(missed):
        counts = [
            f"{node} {', '.join(f'{row.collector} {row.missed_samples}' for row in rows.itertuples())}"
            for node, rows in missed.groupby("node")
        ]
        yield f"samples were missed ({'; '.join(counts)}): what was counted there is spread over longer gaps"
