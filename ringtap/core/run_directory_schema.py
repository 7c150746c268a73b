"""Declares the files of a run directory: names, shapes, columns and version; ports (docs/reference/run-directory.md).

Writers and readers take them from here. The recording hook, which must run without ringtap, repeats some; a test
compares them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from ringtap.core.append_only_logs import EACH, INTEGER, NUMBER, Field
from ringtap.core.json_validation import BPS, COUNT, NAME, NS, PATH, Number, Shape, Text
from ringtap.core.untrusted_files import RUN_JSON as RUN_JSON  # noqa: PLC0414 (its place for others)

SCHEMA = 1  # version of run directories
EVERY, EVERY_S = "100ms", 0.1  # usual period of collectors

# receivers of cross traffic: ringtap traffic, iperf3
TRAFFIC_PORT, IPERF3_PORT = 5001, 5201
CROSS_PORTS = (TRAFFIC_PORT, IPERF3_PORT)
NCCL_RAS_PORT = 28028  # of questions to NCCL's RAS service, unless NCCL_RAS_ADDR has another one
# command lines of processes that send or receive cross traffic
CROSS_COMMAND = re.compile(
    r"\biperf3?\b|\bringtap(?:\.cli|-traffic\.pyz)? (?:traffic|send|serve)\b|\bringtap\.trafficgen\b"
)

# so begin a collector's remedies for what a machine without such a device, or a job without such a library, does not
# need
NOT_NEEDED = "nothing"

# in a run directory
POINTS_JSONL = "points.jsonl"
REJECTED_JSONL = "rejected.jsonl"
EXPECTED_JSONL = "expected.jsonl"  # iterations of a sweep's series by their message graphs
MARKS_JSONL = "marks.jsonl"
SHARED_JSONL = "shared.jsonl"  # points of jobs that share links
REPORT_HTML, REPORT_JSON = "report/report.html", "report/report.json"  # of a sweep or a job

# output of the job, where ringtap took it: of a sweep's ranks, and of a submitted job
JOB_OUTPUTS = ("nodes/*/log/job*.out", "submit/slurm-*.out")

SERIES = "series"  # folder of a sweep that holds the runs of its series
PARTS = "parts"  # folder of a submitted sweep that holds a sweep of each series

# in a node's folder
NODE_JSON = "node.json"
AGENT_LOG = "log/agent.log"
HOOK_LOADED = ".hook-loaded"  # pids of the processes that imported torch or Horovod, one a line
INNER_RUNS = ".inner-runs"  # run directories of `ringtap run` within the job, one a line
NIC_REC = "nic/nic.rec"
LINKS_JSONL = "nic/links.jsonl"
SOCKETS_REC = "sockets/sockets.rec"
OWNERS_JSONL = "sockets/owners.jsonl"
QDISC_REC = "qdisc/qdisc.rec"
HOST_REC = "host/host.rec"
PROCESSES_REC = "host/processes.rec"
RUN_DELAY = "run_delay_s"  # its column with the time in which a main thread waited for a processor
PROCESSES_JSONL = "host/processes.jsonl"
NCCL_RAS = "nccl-ras"
NCCL_RAS_REC = f"{NCCL_RAS}/communicators.rec"
NCCL_RAS_JSONL = f"{NCCL_RAS}/ranks.jsonl"
PACKETS_JSON = "packets/packets.json"
# of a sweep's packets at one load: their sockets, and the captures' facts; ``part`` is the number of the load step
CAPTURED_SOCKETS, CAPTURED_JSON = "packets/{part}-sockets.rec", "packets/{part}-*.json"
# of a capture around slow iterations: a line for each span of time whose packets were kept
WINDOWS_JSONL = "packets/{stem}-windows.jsonl"
PACKETS_RING = "packets/.ring"  # its files that are not decided yet
PACKET_DISORDER_NS = 1_000_000_000  # packets of a capture are in order of time but for less than this
CLOCK_JSON = "clock/clock.json"
PINGS_REC = "clock/pings.rec"
SERVER_JSON = "clock/server.json"

# a shape lists what a reader relies on
_WORDS = (str, None)
ACKNOWLEDGED = "acknowledged"  # instead of counters of the cross traffic: each point has its rate
SIMULATED = "simulated"  # likewise, of a simulation; its traffic kinds begin with it
_COUNTER = {
    **{"node": NAME, "nic": str, "direction": Text("rx|tx", "rx or tx")},
    **{"source?": Text("nic|ethtool|infiniband", "nic, ethtool or infiniband"), "port?": NAME},
}
_SHARE = Number(0, 1e6)
_SECONDS = Number(0, 1e9)
_BATCH = Number(1, 2**53, whole=True)
# what series of a model may differ in beside the cross traffic
VARIANTS = ("transport", "collective", "topology")
_PLAN: Shape = {
    "name?": str,
    "scale?": Number(1e-9, 1e9),
    "capacity_bps?": Number(1, 1e18),
    "topology?": {"hosts?": ([str], None), "workers?": ([str], None), "mtu?": (Number(68, 2**20, whole=True), None)},
    "models?": [
        {
            **{"name": NAME, "title?": str, "parameters?": Number(1, 2**53, whole=True), "batch?": (_BATCH, None)},
            **dict.fromkeys((f"{name}?" for name in VARIANTS), (NAME, Text("", "an empty text"))),
        }
    ],
    "traffic?": [NAME],
    "loads?": [Number(0, 1e3)],
    "jobs?": [{"name": NAME, "workers": [NAME]}],
    "offsets?": list,
}
RUN: Shape = {
    "schema": int,
    "kind?": str,
    "ringtap?": str,
    "argv?": [str],
    "created_ns?": NS,
    "seed?": (int, None),
    "report?": bool,
    "status?": str,
    "why?": _WORDS,
    "key?": _WORDS,
    "job?": _WORDS,
    "next_start?": _WORDS,
    "batch?": (_BATCH, None),
    "reference?": (NAME, Text("", "an empty text"), None),
    "not_collected?": ([{"what": str, "why": str}], None),
    "plan?": (_PLAN, None),
    "lab?": ({"links?": ([{"asked_bps?": (BPS, None), "measured_bps?": (BPS, None)}], None)}, None),
    "precheck?": ([{"kind": str, "share_of_capacity?": (_SHARE, None), "required_share?": (_SHARE, None)}], None),
    "bottleneck?": (
        {
            "cross?": ([_COUNTER], _COUNTER, Text(f"{ACKNOWLEDGED}|{SIMULATED}", "the name of a source"), None),
            "total?": ([_COUNTER], _COUNTER, Text(SIMULATED, f"the text {SIMULATED}"), None),
            "mtu?": (Number(68, 2**20, whole=True), None),
        },
        None,
    ),
    "capture?": (
        {
            "interfaces": {str: [str]},
            "hosts": {str: {"training": str, "cross": str, "training_nic": str, "cross_nic": str}},
        },
        None,
    ),
    "calibration?": ({"host?": (dict, None)}, None),
    "simulated?": (dict, None),
    "settings?": (
        {
            "collectors?": ([str], None),
            "recorders?": ([str], None),
            "named?": ([str], None),
            "every_s?": (Number(1e-6, 1e6), None),
            "options?": ({str: {str: str}}, None),
        },
        None,
    ),
}
POINT: Shape = {
    "series": NAME,
    "model": NAME,
    "traffic": NAME,
    **dict.fromkeys((f"{name}?" for name in VARIANTS), (NAME, Text("", "an empty text"))),
    "directory": PATH,
    "requested_bps": BPS,
    "window_start_ns": NS,
    "window_end_ns": NS,
    "step?": COUNT,
    "iterations?": COUNT,
    "late_share?": (Number(0, 1), None),
    "ended?": _WORDS,
    "cut?": ([str], None),
    "others?": ([str], None),
    "cross_bps?": (BPS, None),
    "cross_why?": _WORDS,
    "total_bps?": (BPS, None),
    "iperf_streams?": COUNT,
    "packets_start_ns?": NS,
    "packets_end_ns?": NS,
    "packets_why?": _WORDS,
    # on links, in an iteration without cross traffic
    "link_payload_bytes?": {str: Number(-(2**53), 2**53)},
    "link_iterations?": Number(1, 2**53, whole=True),
    "link_why?": _WORDS,
}
# a series as its message graphs have it, without cross traffic
EXPECTED: Shape = {
    "series": NAME,
    "why?": _WORDS,
    **dict.fromkeys(("iteration_s?", "first_message_s?", "compute_s?", "latency_s?"), _SECONDS),
    "critical_messages?": COUNT,
    "links?": [{"link": str, "payload_bytes": COUNT, "header_bytes": COUNT, "critical_s": _SECONDS}],
}
# a point of jobs that share links: each alone, or all together
ALONE = "alone"
_JOB_SHARE: Shape = {"intercept": Number(0), "slope": Number(0), "priority": COUNT, "congestion_control": str}
SHARED: Shape = {
    "step": COUNT,
    "offset": NAME,
    "window_start_ns": NS,
    "window_end_ns": NS,
    "late_share?": (Number(0, 1), None),
    "score?": (Number(-1e6, 1), None),
    **{"cut?": ([str], None), "others?": ([str], None)},
    "clocks?": ({str: {"offset_ns": Number(-(2**61), 2**61), "error_ns": Number(0, 2**62)}}, None),
    # of free jobs: from when on a rule gives them their shares, cost of changing these, reason of no prediction
    "rule_ns?": NS,
    "share_changes?": {"ticks": COUNT, "seconds": _SECONDS, "cpu_s": _SECONDS},
    "predicted_why?": str,
    "ports": [
        {
            **{"node": NAME, "nic": str, "direction": Text("rx|tx", "rx or tx")},
            **{"link?": str, "rate_bps?": Number(1, 2**53), "jobs?": [NAME]},
        }
    ],
    "jobs": [
        {
            **{"name": NAME, "directory": PATH, "shift_s?": (_SECONDS, None), "period_s?": (_SECONDS, None)},
            "begin_shift_s?": _SECONDS,
            **{"predicted_s?": (_SECONDS, None), "predicted_begin_ns?": [NS], "mltcp_phases?": [Number(0, 1)]},
            **{"share?": _JOB_SHARE, "path?": COUNT},
        }
    ],
}
_NIC = {
    "mtu?": (COUNT, None),
    "speed?": (Number(-1, 2**53), None),
    "driver?": _WORDS,
    "addresses?": ([str], None),
}
_LINK = {"below?": ([str], None), "qdisc?": _WORDS, "rate_bps?": (BPS, None), "index?": (COUNT, None)}
_FACTS: Shape = {
    **dict.fromkeys(("host?", "kernel?", "machine?", "python?"), _WORDS),
    "cpus?": (COUNT, None),
    "memory_bytes?": (COUNT, None),
    "nics?": ({str: _NIC}, None),
    "links?": ({str: _LINK}, None),
    "sysctls?": ({str: _WORDS}, None),
}
_OFFSET = Number(-(2**61), 2**61)
_STEP = {"t_ns?": NS, "mono_ns?": NS, "mono_before_ns?": NS, "step_ns?": Number(-(2**61), 2**61, whole=True)}
_JOB = {"pid?": COUNT, "rank?": (int, None), "exit_code?": (int, None), "began_ns?": NS, "ended_ns?": (NS, None)}
_COLLECTOR = {
    "state?": str,
    "reason?": _WORDS,
    "remedy?": _WORDS,
    "missed_samples?": (COUNT, None),
    "class?": str,
    "every_s?": (Number(0, 1e9), None),
}
NODE: Shape = {
    "status?": str,
    "why?": _WORDS,
    "agent?": ({"began_ns?": NS, "ended_ns?": (NS, None)}, None),
    "jobs?": [_JOB],
    "collectors?": ({str: _COLLECTOR}, None),
    "before?": (_FACTS, None),
    "after?": (_FACTS, None),
    "clock_steps?": ([_STEP], None),
    "disk?": ({"bytes?": COUNT, "bytes_per_hour?": COUNT, "limit_bytes?": COUNT}, None),
}
_LINE = {
    "offset_ns": (_OFFSET, None),
    "error_ns?": (Number(0, 2**62), None),
    "drift_ppm?": (Number(-1e6, 1e6), None),
    "t0_ns?": (NS, None),
    "from_ns?": (NS, None),
    "t_ns?": NS,
    **dict.fromkeys(("mono_ns?", "from_mono_ns?", "to_mono_ns?"), (NS, None)),
}
CLOCK: Shape = {
    "reference?": (NAME, Text("", "an empty text"), None),
    "fit?": (_LINE, None),
    "segments?": ([_LINE], None),
    "measurements?": ([_LINE], None),
    "steps?": ([_STEP], None),
    "boot_id?": _WORDS,
    "adjtimex?": (dict, None),
}
SERVER: Shape = {
    "port?": (Number(0, 65535, whole=True), None),
    "addresses?": [str],
    "token?": Text("(?:[0-9a-f]{2})*", "hexadecimal digits"),
    "boot_id?": _WORDS,
    "why?": _WORDS,
}
PACKETS: Shape = {
    "tool?": _WORDS,
    "filter?": _WORDS,
    "interface?": _WORDS,
    "files?": [NAME],
    "begin_ns?": NS,
    "end_ns?": NS,
    "ended?": _WORDS,
    "deleted_files?": (COUNT, None),
    "deleted_bytes?": (COUNT, None),
    "windows?": (COUNT, None),
    "dropped_by_kernel?": (COUNT, None),
    "dropped_by_interface?": (COUNT, None),
}
WINDOW: Shape = {"begin_ns": NS, "end_ns": NS, "missing_until_ns?": NS}
OWNER: Shape = {"inode": COUNT, "pid?": (COUNT, None), "rank?": (int, None), "command?": ([str], str, None)}
LINK_STATE: Shape = {
    **{"t_ns": NS, "mono_ns?": NS, "nic": str, "up?": bool, "carrier": bool},
    **{"operstate?": _WORDS, "carrier_changes": (COUNT, None)},
}
# a change of what NCCL's RAS service says of a rank of a communicator
RAS_RANK: Shape = {
    **{"t_ns": NS, "communicator": str, "size": COUNT, "rank": COUNT, "host": str, "pid": int, "state": str},
    **{"operations?": COUNT, "most_operations?": COUNT},
}
RAS_ANSWERS = "answers"  # its state at first, and again after another one
RAS_BEHIND = "behind"  # it has launched fewer collectives than others, as at the answer before
PROCESS: Shape = {"pid": COUNT, "parent?": (int, None), "rank?": (int, None), "command?": ([str], str, None)}
BUCKETS: Shape = {"t_ns": NS, "module?": int, "bucket_bytes?": ([COUNT], None), "comm_hook?": str}
MARK: Shape = {"t_ns": NS, "text?": str}
# a line of a rank's profile; one of kind "ranges" lists the collectives that PyTorch's profiler timed, each as a list
PROFILE_LINE: Shape = {"kind": str, "ranges?": [list]}
# a line for each optimizer of a process: its class, and the numbers of its parameters
OPTIMIZER: Shape = {
    "optimizer": COUNT,
    "t_ns?": NS,
    "class": str,
    "tensors?": COUNT,
    "elements?": COUNT,
    "trained?": COUNT,
}
PROFILE_RANGE: Shape = {"name": str, "begin_ns": NS, "length_ns": NS, "size_bytes": (COUNT, None)}
# the first columns of every sampled log
TIME_FIELDS = (Field("t_ns", "<i8", "ns", "time"), Field("mono_ns", "<i8", "ns", "time"))

# cross traffic: a flow's state in logs, the protocol's header before each flow, and what figures of both sides share
FLOW_STATES = {"finished": 0, "unfinished": 1, "failed": 2}
FLOW_HEADER_BYTES = 16
LOAD_BIN_NS = 100_000_000  # offered, achieved and delivered load
MISSED_NS = 1_000_000  # a flow that starts later than this missed its slot
# upper ends of the usual size classes for completion times (pFabric and its successors)
SIZE_CLASSES_BYTES = (100_000, 10_000_000, None)

# points of a sweep: limits that the sweep applies and that the report or the fit repeats
REQUIRED_SHARE = 0.88  # of the requested rate, which the generator alone must reach
# quiet windows had at most 2.1 % of late samples, windows with visibly wrong times 4 to 17 % (docs/method/points.md)
MAX_LATE_SHARE = 0.03
MERGE_SHARE = 0.01  # loads closer than this share of capacity are one point
MIN_FIT_LOADS, MIN_CONGESTION_LOADS = 3, 4  # numbers of different loads
MIN_RISE = 1.2  # heaviest over lightest time, below which the curve is flat

# columns that readers compute with, and the types that they may have
_TIMES = dict.fromkeys(("t_ns", "mono_ns"), frozenset({"<i8"}))
_SAMPLED = ("nic", "sockets", "qdisc", "host", "infiniband", "ethtool", "gpu", NCCL_RAS, "packets", "clock")
# ``kind`` of a step record: a step that AMP skipped, and a mark of ``ringtap.step()``; 0 is a step
SKIPPED_RECORD, MARK_RECORD = 1, 2
# more steps of one optimizer in a row are iterations of their own, although other optimizers step before and after them
MAX_STEPS_IN_A_ROW = 16
# share of the rounds of several optimizers that must have the same steps, so that a round is an iteration
REGULAR_SHARE = 0.9
STEP_COLUMNS = dict.fromkeys(("step", "optimizer", "start_ns", "end_ns", "start_mono_ns", "end_mono_ns"), INTEGER)
# logs of the passes of a process, beside its step log, by the source of their times
PASS_LOGS = {"ddp": ".ddp.rec", "horovod": ".horovod.rec"}
PASS_COLUMNS = dict.fromkeys(
    (
        *("iteration", "module", "forward_start_ns", "backward_start_ns", "backward_end_ns", "comm_start_ns"),
        *("comm_end_ns", "forward_ns", "backward_ns", "comm_ns", "overlap_ns"),
    ),
    INTEGER,
)
# of the events of torch.profiler's traces: what a GPU runs
GPU_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
# those of PyTorch before 1.11; annotations were operators there
FORMER_CATEGORIES = {
    "Operator": "cpu_op", "Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Runtime": "cuda_runtime",
}  # fmt: skip
NIC_COUNTERS = ("bytes", "packets", "errors", "drops")  # of each interface, in each direction
_COLUMNS = {
    NIC_REC: _TIMES | dict.fromkeys((f"{EACH}{way}_{what}" for way in ("rx", "tx") for what in NIC_COUNTERS), INTEGER),
    SOCKETS_REC: _TIMES
    | dict.fromkeys(("family", "state", "cookie", "inode"), INTEGER)
    | dict.fromkeys(("sport", "dport"), frozenset({"V2"}))
    | dict.fromkeys(("source", "destination"), frozenset({"V16"})),
    QDISC_REC: _TIMES
    | dict.fromkeys(("interface", "handle", "parent", "backlog_bytes", "backlog_packets", "drops"), INTEGER),
    PROCESSES_REC: _TIMES | {"pid": INTEGER, "cpu_s": NUMBER},
}


def pass_source(name: str) -> str:
    """Return the source of the times in a log of passes, one of `PASS_LOGS`, by its name; empty for other logs."""
    return next((source for source, suffix in PASS_LOGS.items() if name.endswith(suffix)), "")


def columns_of(path: Path) -> Mapping[str, frozenset[str]] | None:
    """Return the columns that a record file of a node must have, by its name; None: none in particular."""
    folder = path.parent.name
    if folder == "steps":
        return PASS_COLUMNS if pass_source(path.name) else STEP_COLUMNS
    return _COLUMNS.get(f"{folder}/{path.name}", _TIMES if folder in _SAMPLED else None)
