"""Writes the verdict on a job: the main cause and its cost, what is left without it, and the next step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringtap.analysis.job.iteration_budget import (
    BUFFERS,
    BUSY_PROCESSORS,
    LOSS,
    MIN_SHARE,
    NETWORK_STALL,
    OTHER_TRAFFIC,
    SLOW_LINK,
    SLOW_RANK,
    SLOWER_NETWORK,
    SLOWER_WHOLE,
    STALL,
    UNEVEN,
    UNUSED_INTERFACE,
    WHOLE,
    WHOLE_STALL,
    WORK,
)
from ringtap.core.units import counted, format_duration, format_rate, format_size

Cause = Mapping[str, Any]
_WITHIN = {
    "compute": "compute (forward and backward pass)",
    "optimizer": "the optimizer step",
    "backward": "the backward pass",
    "elsewhere": "loading data or other code outside of the passes",
    "outside": "the forward pass, loading data or other code outside of the backward pass",
}
_PARTS = {
    "compute": "compute",
    "backward": "backward pass",
    "optimizer": "optimizer step",
    "elsewhere": "outside of these: loading data, Python",
    "outside": "outside of these: forward pass, loading data, Python",
    SLOW_RANK: "waiting for rank {rank}, which is slow",
    BUSY_PROCESSORS: "waiting for rank {rank}, which waits for a processor",
    STALL: "stalls of {who}: {within}",
    OTHER_TRAFFIC: "waiting for other traffic",
    LOSS: "waiting for lost segments",
    SLOW_LINK: "waiting for a slow interface",
    UNUSED_INTERFACE: "waiting for an interface while a faster one is not used",
    BUFFERS: "waiting for room in socket buffers",
    SLOWER_NETWORK: "a network that was slower for a while, cause not known",
    NETWORK_STALL: "stalls of the network, cause not known",
    SLOWER_WHOLE: "what some iterations take longer for a while, cause not known",
    WHOLE_STALL: "stalls of a rank or of the network, cause not known",
    WHOLE: "computation and exchange, not told apart",
    UNEVEN: "waiting for whichever rank is last",
    "bandwidth": "the gradients' bytes at the rate of the interfaces",
    "network": "the rest of the exchange: latency, processing, causes not known",
}
_FEWER_BYTES = {"ddp": "a communication hook such as fp16_compress_hook", "horovod": "compression=hvd.Compression.fp16"}
_LARGER_MESSAGES = {
    "ddp": "larger buckets (bucket_cap_mb of DistributedDataParallel)",
    "horovod": "more fusion (HOROVOD_FUSION_THRESHOLD, HOROVOD_CYCLE_TIME)",
}
# work with this share of an iteration bounds it
_MAIN_SHARE = 0.5
# a cause in fewer iterations is named if it has this share of the mean iteration
_OFTEN, _RARE_SHARE = 3, 0.1
# what is there in all iterations is named where the network takes so much beside the bytes and, if it is traffic, where
# it has so much of the training's payload
_MAY_COST = _MUCH_TRAFFIC = 0.1
# other programs that keep so many more processors busy on a node than on the others are named
_OTHER_CORES = 0.5
# ranks that wait for a processor for this share of an iteration share it with others
_RUN_DELAY_SHARE = 0.1
_MORE_PROCESSORS = "run fewer ranks, threads (OMP_NUM_THREADS) or programs on a node, or give the job more processors"
_LEAST_SHOWN_S = 0.05
_UNEXPLAINED = "nothing that was recorded says why"


def verdict(diagnosis: Mapping[str, Any]) -> list[str]:
    """Return the verdict in a few sentences; ``diagnosis`` is from `ringtap.analysis.job.diagnosis.diagnosis_of`."""
    if diagnosis["why"]:
        return [f"Why an iteration takes this long cannot be told: {diagnosis['why']}."]
    causes, iteration_s = named(diagnosis), diagnosis["iteration_s"]
    if not causes:
        about = _nothing_longer if diagnosis["source"] == WHOLE else _healthy
        lines = _without_cost(diagnosis) or about(diagnosis)
        if waits := _run_delays(diagnosis):
            rest = (line.replace("No ", "No other ", 1) for line in lines if not line.startswith("Next:"))
            lines = [f"Ranks {waits}.", f"Next: {_MORE_PROCESSORS}.", *rest]
        return [*lines, *_unknown(diagnosis)]
    first, *others = (_SENTENCES[cause["name"]](cause) for cause in causes)
    lines = [f"{first}.", *(f"Also: {sentence[0].lower()}{sentence[1:]}." for sentence in others)]
    left_s = iteration_s - sum(cause["seconds"] for cause in causes)
    least = "at least " if any(cause["is_at_most"] for cause in causes) else ""
    without = f"Without {'these' if others else 'it'} an iteration would take {least}{format_duration(left_s)}"
    known = diagnosis["iterations"], diagnosis["of"]
    some = "" if known[0] == known[1] else f" (mean of the {known[0]} of {known[1]} iterations whose times are known)"
    lines.append(f"{without} instead of {format_duration(iteration_s)}{some}.")
    lines.append(f"Next: {_STEPS[causes[0]['name']](causes[0])}.")
    if waits := _run_delays(diagnosis):
        lines.append(f"Besides, ranks {waits}: {_MORE_PROCESSORS}.")
    return [*lines, *_unknown(diagnosis)]


def _run_delays(diagnosis: Mapping[str, Any]) -> str:
    """Return that the ranks wait for processors, if it is long, else nothing."""
    delay_s = diagnosis["run_delay_s"]
    share = 0.0 if delay_s is None else delay_s / diagnosis["iteration_s"]
    if share < _RUN_DELAY_SHARE:
        return ""
    waits = f"wait for a processor for {format_duration(delay_s)} ({share:.0%}) of an iteration (median)"
    return f"{waits}, which other threads or programs use, or which is slow to wake"


def named(diagnosis: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the causes to name: 2 % of an iteration, or 10 % if they came once or twice, and not by chance."""
    return [
        cause
        for cause in diagnosis["causes"]
        if cause["share"] >= (MIN_SHARE if cause["iterations"] >= _OFTEN else _RARE_SHARE)
        and (cause["low_s"] is None or cause["low_s"] > 0)
    ]


def parts_rows(diagnosis: Mapping[str, Any]) -> Sequence[tuple[str, str, str, str]]:
    """Return the rows of a table of the parts: words, time, half of the interval, and share of the iteration."""
    rows = []
    for part in diagnosis["parts"]:
        rank = part.get("rank")
        who, within = "all ranks" if rank is None else f"rank {rank}", _WITHIN.get(part.get("within") or "", "")
        words = _PARTS[part["name"]].format(rank=rank, who=who, within=within)
        seconds = round(part["seconds"], 9) + 0.0  # rounding errors are below, and no part is -0
        half_s = 0.0 if part["high_s"] is None else round(part["high_s"] - part["seconds"], 9)
        interval = f"± {format_duration(half_s)}" if half_s > 0 else "-"
        rows.append((words, format_duration(seconds), interval, f"{part['share']:.1%}"))
    return rows


def _unknown(diagnosis: Mapping[str, Any]) -> list[str]:
    by_why: dict[str, list[str]] = {}
    told = {cause["name"] for cause in named(diagnosis)}
    for item in diagnosis["unknown"]:
        if item["cause"] not in told:
            by_why.setdefault(item["why"], []).append(item["cause"])
    return [f"Cannot be told: {', '.join(names)} ({why})." for why, names in by_why.items()]


def _cost(cause: Cause) -> str:
    """Return the cost of a cause: of the mean iteration and, unless it is there throughout, of each one that has it.

    In a running job, ``since`` says in words when it began.
    """
    about = "at most " if cause["is_at_most"] else "about " if cause["is_computed"] else ""
    since = cause.get("since", "")
    which = "an iteration" if since else "the mean iteration"
    mean = f"{about}{format_duration(cause['seconds'])} ({cause['share']:.0%}) of {which}"
    if cause["is_throughout"]:
        return f"{mean} {since}".rstrip()
    when = since or f"from {_at(cause, 'from')} to {_at(cause, 'to')} s"
    when = f"{counted(cause['iterations'], 'iteration')} {when}"
    if cause["each_s"] is not None:
        return f"{mean}, {format_duration(cause['each_s'])} (median) in {when}"
    return f"{mean}, {format_duration(cause['seconds'] * cause['of'] / cause['iterations'])} in each of {when}"


def _at(cause: Cause, end: str) -> str:
    """Return when a cause begins or ends, with the interval where it is known and longer than the last digit."""
    at_s, low_s, high_s = (cause[f"{end}_{name}"] for name in ("s", "low_s", "high_s"))
    half_s = 0.0 if low_s is None else max(at_s - low_s, high_s - at_s)
    return f"{at_s:.1f} ± {half_s:.1f}" if half_s >= _LEAST_SHOWN_S else f"{at_s:.1f}"


def _slow_rank(cause: Cause) -> str:
    here, usual = format_duration(cause["here_s"]), format_duration(cause["usual_s"])
    who = f"Rank {cause['rank']} (node {cause['node']}) makes the others wait"
    return f"{who}: {_cost(cause)}; {_WITHIN[cause['within']]} takes it {here}, the others {usual}"


def _busy_processors(cause: Cause) -> str:
    here, usual = format_duration(cause["run_delay_s"]), format_duration(cause["usual_run_delay_s"])
    who = f"Rank {cause['rank']} (node {cause['node']}) has to wait for a processor"
    return f"{who}: {_cost(cause)}; it waits {here} for one in each, the others {usual}"


def _stall(cause: Cause) -> str:
    who = "All ranks stall" if cause["rank"] is None else f"Rank {cause['rank']} (node {cause['node']}) stalls"
    here, usual = format_duration(cause["here_s"]), format_duration(cause["usual_s"])
    return f"{who}: {_cost(cause)}; {_WITHIN[cause['within']]} takes {here} in them, usually {usual}"


def _slow_link(cause: Cause) -> str:
    return f"The interface {cause['nic']} of {cause['node']} is slow: {_cost(cause)}; it {_rates(cause)}"


def _rates(cause: Cause) -> str:
    rate, usual = format_rate(cause["rate_bps"]), format_rate(cause["usual_bps"])
    return f"carries at most {rate} of payload, the others {usual}"


def _unused_interface(cause: Cause) -> str:
    rate, faster = format_rate(cause["rate_bps"]), format_rate(cause["usual_bps"])
    rates = f"{cause['nic']} carries at most {rate} of payload, {cause['faster_nic']} {faster}"
    return f"{_unused(cause)}: {_cost(cause)}; {rates}"


def _unused(cause: Cause) -> str:
    return f"The exchange uses {cause['nic']} of {cause['node']}, although {cause['faster_nic']} is faster"


def _other_traffic(cause: Cause) -> str:
    what = "Iterations with other traffic take longer" if cause["is_whole"] else "Other traffic slows the exchange"
    return f"{what}: {_cost(cause)}; it has {format_rate(cause['rate_bps'])}, mostly {_ends(cause)}"


def _loss(cause: Cause) -> str:
    what = "Iterations with loss take longer" if cause["is_whole"] else "Loss slows the exchange"
    lost = f"{cause['lost_segments']:.3g} segments are lost in each of them"
    return f"{what}: {_cost(cause)}; {lost}, mostly {_ends(cause)}"


def _full_buffers(cause: Cause) -> str:
    return f"Full socket buffers slow the exchange: {_cost(cause)}; most often that of {_whose_buffer(cause)}"


def _whose_buffer(cause: Cause) -> str:
    by_receiver = cause["node"] == cause["destination"]
    receives, sends = "{destination}, which receives from {source}", "{source}, which sends to {destination}"
    return (receives if by_receiver else sends).format_map(cause)


def _ends(cause: Cause) -> str:
    return f"from {cause['source']} to {cause['destination']}"


_SENTENCES: dict[str, Callable[[Cause], str]] = {
    SLOW_RANK: _slow_rank,
    BUSY_PROCESSORS: _busy_processors,
    STALL: _stall,
    OTHER_TRAFFIC: _other_traffic,
    LOSS: _loss,
    SLOW_LINK: _slow_link,
    UNUSED_INTERFACE: _unused_interface,
    BUFFERS: _full_buffers,
    SLOWER_NETWORK: lambda cause: f"The exchange takes longer for a while: {_cost(cause)}; {_UNEXPLAINED}",
    NETWORK_STALL: lambda cause: f"The network stalls: {_cost(cause)}; {_UNEXPLAINED}",
    SLOWER_WHOLE: lambda cause: f"Iterations take longer for a while: {_cost(cause)}; {_UNEXPLAINED}",
    WHOLE_STALL: lambda cause: f"Iterations stall: {_cost(cause)}; {_UNEXPLAINED}",
}


def _look_at_rank(cause: Cause) -> str:
    node = cause["node"]
    if (cause["other_cores"] or 0) >= _OTHER_CORES:
        more = f"{cause['other_cores']:.2g} processors more busy than on the other nodes"
        return f"end the other programs on {node}, which keep {more}"
    who = "the ranks do" if cause["rank"] is None else f"rank {cause['rank']} does"
    if cause["within"] == "elsewhere":
        return f"look at what {who} between two iterations: data loading, checkpoints, validation, logging"
    if cause["within"] == "outside":
        return f"look at what {who} before the backward pass: forward pass, data loading, checkpoints, logging"
    if cause["nodes"] == 1 and cause["rank"] is not None:
        return f"compare rank {cause['rank']} with another one of {node}: its batch, its GPU, the processors it may use"
    where = "the nodes with nodes" if node is None else f"{node} with a node"
    return f"compare {where} without this fault: clock rate and temperature, other programs, the rank's batch"


def _free_processor(cause: Cause) -> str:
    if (cause["other_cores"] or 0) >= _OTHER_CORES:
        return _look_at_rank(cause)
    node, rank = cause["node"], cause["rank"]
    return f"look at what else runs on {node} (top), and which processors rank {rank} may use (taskset -p)"


def _look_at_link(cause: Cause) -> str:
    return f"look at {cause['nic']} of {cause['node']}: its speed (ethtool {cause['nic']}) and its limit (tc qdisc)"


def _use_interface(cause: Cause) -> str:
    names = "NCCL_SOCKET_IFNAME for NCCL, --network-interfaces of horovodrun"
    nic = cause["faster_nic"]
    return f"if the nodes reach each other over {nic}, give the job this interface: GLOO_SOCKET_IFNAME={nic} ({names})"


def _enlarge_buffers(cause: Cause) -> str:
    if cause["node"] == cause["destination"]:
        return f"let {cause['node']} use larger buffers (sysctl net.ipv4.tcp_rmem), or look at why it reads late"
    return f"let {cause['node']} use larger buffers: sysctl net.ipv4.tcp_wmem"


def _record_packets(_: Cause) -> str:
    return "record packets around slow iterations: ringtap run --collect default,packets --packets-around-slow p99"


def _look_at_all(_: Cause) -> str:
    return "look at what the ranks do in them (checkpoints, validation, data loading), and at the nodes' load"


_STEPS: dict[str, Callable[[Cause], str]] = {
    SLOW_RANK: _look_at_rank,
    BUSY_PROCESSORS: _free_processor,
    STALL: _look_at_rank,
    OTHER_TRAFFIC: lambda cause: f"move the traffic {_ends(cause)} to another time or another link",
    LOSS: lambda cause: f"look for errors and drops on the way {_ends(cause)}: cables, full queues",
    SLOW_LINK: _look_at_link,
    UNUSED_INTERFACE: _use_interface,
    BUFFERS: _enlarge_buffers,
    SLOWER_NETWORK: _record_packets,
    NETWORK_STALL: _record_packets,
    SLOWER_WHOLE: _look_at_all,
    WHOLE_STALL: _look_at_all,
}


def is_open(diagnosis: Mapping[str, Any]) -> bool:
    """Return True if no cause is named, but one may be there that the records do not tell."""
    is_whole = diagnosis["source"] == WHOLE
    return bool(diagnosis["why"] or (not named(diagnosis) and (is_whole or _without_cost(diagnosis))))


def _without_cost(diagnosis: Mapping[str, Any]) -> list[str]:
    """Return what is there in all iterations, so that nothing says what it costs, if it may cost much."""
    rest = next(part["share"] for part in diagnosis["parts"] if part["name"] in ("network", WHOLE))
    lines: list[str] = []
    slow: list[str] = []
    for item in diagnosis["unknown"] if rest >= _MAY_COST else ():
        if item["cause"] == OTHER_TRAFFIC and (item.get("of_training") or 0.0) >= _MUCH_TRAFFIC:
            lines.append(f"there is other traffic of {format_rate(item['rate_bps'])}, mostly {_ends(item)}")
        elif item["cause"] == LOSS and "lost_segments" in item:
            lines.append(f"{item['lost_segments']:.3g} segments are lost in each iteration, mostly {_ends(item)}")
        elif item["cause"] == BUFFERS:
            what = f"Full socket buffers, most often that of {_whose_buffer(item)}, limit the exchange"
            slow += [f"{what}; what that costs cannot be told.", f"Next: {_enlarge_buffers(item)}."]
        elif item["cause"] == UNUSED_INTERFACE:
            slow += [f"{_unused(item)}; what that costs cannot be told.", f"Next: {_use_interface(item)}."]
        elif item["cause"] == SLOW_LINK and "nic" in item:
            slow += [
                f"The interface {item['nic']} of {item['node']} {_rates(item)}; what that costs cannot be told.",
                f"Next: {_look_at_link(item)}.",
            ]
    if not lines:
        return slow
    most = f"at most {rest:.0%} of an iteration, which is what the exchange takes beside its bytes"
    return [
        f"Whether there is a fault cannot be told: {', and '.join(lines)}, and too few iterations are without it.",
        *([] if diagnosis["source"] == WHOLE else [f"It costs {most}."]),
        "Next: record a run without it, and compare: ringtap compare.",
        *slow,
    ]


def _nothing_longer(diagnosis: Mapping[str, Any]) -> list[str]:
    """Return what the lengths of iterations tell in which no cause is named."""
    found = "No cause found: no stretch of iterations is longer than the others, and none stalls."
    line = diagnosis["line"]
    if line is None:
        return [found]
    needs = f"The interfaces need {line['seconds'] / diagnosis['iteration_s']:.0%} of an iteration for its bytes"
    return [found, f"{needs} ({format_size(line['bytes'])} of payload at {format_rate(line['capacity_bps'])})."]


def _healthy(diagnosis: Mapping[str, Any]) -> list[str]:
    """Return what bounds an iteration in which no cause is named."""
    line = diagnosis["line"]
    share = {part["name"]: part["share"] for part in diagnosis["parts"]}
    work, uneven = sum(share.get(name, 0.0) for name in WORK), share[UNEVEN]
    bandwidth, rest = share.get("bandwidth", 0.0), share["network"]
    begin = "No fault found:"
    is_local = diagnosis["nodes"] == 1 and diagnosis["ranks"] > 1
    local = "all ranks are on one node, so no network between nodes is involved"
    if work >= _MAIN_SHARE:
        most = local if is_local else f"a faster network would save at most {bandwidth + rest:.0%}"
        return [f"{begin} the ranks' own work takes {work:.0%} of an iteration{';' if is_local else ','} {most}."]
    if uneven > bandwidth + rest:
        text = f"{begin} waiting for whichever rank is last takes {uneven:.0%} of an iteration."
        return [text, "Next: give the ranks equal work, such as batches of equal length."]
    if line is None:
        text = f"{begin} the exchange after the last gradient takes {rest:.0%} of an iteration"
        return [f"{text}; {local if is_local else 'whether it fills the network cannot be told'}."]
    size, rate = format_size(line["bytes"]), format_rate(line["capacity_bps"])
    if bandwidth >= rest:
        text = f"{begin} the interfaces need {bandwidth:.0%} of an iteration for its bytes"
        step = f"a faster network, or fewer bytes ({_FEWER_BYTES[diagnosis['source']]})"
        simulate = "ringtap workload simulate says what a rate would give"
        return [f"{text} ({size} of payload at {rate}).", f"Next: {step}; {simulate}."]
    text = f"{begin} the exchange after the last gradient takes {bandwidth + rest:.0%} of an iteration"
    needs = f"its bytes need {bandwidth:.0%} at the rate of the interfaces ({size} at {rate})"
    step = f"Next: try {_LARGER_MESSAGES[diagnosis['source']]}."
    return [f"{text}, and {needs}: the rest is latency, processing, or what the records do not show.", step]
