"""Measures how network traffic slows down distributed deep learning.

Read runs and captures:

    open_job        open a job's run directory: iterations, ranks, flows, counters as tables
    open_sweep      open a sweep's run directory: points, series, fits
    open_run        open either of them
    read_captures   read packet captures: conversations, rates, packets
    read_structure  find the iterations and the pattern of training in captures
    compare_runs    put jobs, or the series of sweeps, side by side
    utc             convert the times of a table to UTC

Analyze measurements:

    CongestionModel        fit t = A·exp(B/(C−BW)^n); the result is a FitResult
    find_curve_point       find the load at which congestion begins on the fitted curve, with an interval
    find_congestion_point  find it among the measured loads, as the thesis does
    compare                compare two samples of iteration times
    quantile_interval      estimate a median or another quantile, with an interval
    demand                 calculate the bytes that an iteration sends
    plot                   draw all of these on your own axes
    write_report           write the report of a run, or of a table of iteration times, into a folder

Send traffic and measure:

    FlowPlan   describe cross traffic: which flow starts when, where to and how large
    receiver   receive flows within a block
    send       send the flows of a plan
    run_sweep  measure a sweep: iteration times under each load of cross traffic
    testbed    build a virtual testbed of hosts and links within a block

Predict without a network:

    simulate   simulate a workload's iterations on a network, with cross traffic
    whatif     calculate iteration times for other orders of tensors
    schedule   find the time shifts with which jobs share links

Mark iterations:

    step  mark the end of an iteration in a program whose steps ringtap cannot detect

Wrong arguments and bad files raise UsageError, failed measurements MeasurementError; both are a RingtapError. A run
or a capture that can be read only in part gives a RingtapWarning. Longer work logs to the logger "ringtap".
"""

from __future__ import annotations

import sys as _sys

from ringtap.core.errors import MeasurementError, RingtapError, RingtapWarning, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ringtap.agents.sweep.conductor import run_sweep
    from ringtap.agents.testbed.start_testbed import testbed
    from ringtap.analysis.compare.run_comparison import compare_runs
    from ringtap.analysis.job.run import Job, open_job
    from ringtap.analysis.model.bytes_per_iteration import demand
    from ringtap.analysis.model.congestion_point import find_congestion_point
    from ringtap.analysis.model.congestion_point_on_curve import find_curve_point
    from ringtap.analysis.model.fit import CongestionModel, FitResult
    from ringtap.analysis.notebook_formatting import utc
    from ringtap.analysis.pcap.captured_traffic import Traffic
    from ringtap.analysis.pcap.scan_captures import read_captures
    from ringtap.analysis.plots import figures_on_axes as plot
    from ringtap.analysis.report.write import write_report
    from ringtap.analysis.statistics.quantiles import quantile_interval
    from ringtap.analysis.statistics.two_sample import compare
    from ringtap.analysis.structure.capture_streams import read_structure
    from ringtap.analysis.sweeps.sweep import Sweep, open_run, open_sweep
    from ringtap.predictions import schedule, simulate, whatif
    from ringtap.traffic import FlowPlan, receiver, send

__version__ = "0.2.0"
__all__ = [
    "CongestionModel",
    "FitResult",
    "FlowPlan",
    "Job",
    "MeasurementError",
    "RingtapError",
    "RingtapWarning",
    "Sweep",
    "Traffic",
    "UsageError",
    "__version__",
    "compare",
    "compare_runs",
    "demand",
    "find_congestion_point",
    "find_curve_point",
    "open_job",
    "open_run",
    "open_sweep",
    "plot",
    "quantile_interval",
    "read_captures",
    "read_structure",
    "receiver",
    "run_sweep",
    "schedule",
    "send",
    "simulate",
    "step",
    "testbed",
    "utc",
    "whatif",
    "write_report",
]

# public name -> its module, imported on first use: agents run without NumPy
_MODULES = {
    "CongestionModel": "ringtap.analysis.model.fit",
    "FlowPlan": "ringtap.traffic",
    "FitResult": "ringtap.analysis.model.fit_result",
    "Job": "ringtap.analysis.job.run",
    "Sweep": "ringtap.analysis.sweeps.sweep",
    "Traffic": "ringtap.analysis.pcap.captured_traffic",
    "compare": "ringtap.analysis.statistics.two_sample",
    "compare_runs": "ringtap.analysis.compare.run_comparison",
    "demand": "ringtap.analysis.model.bytes_per_iteration",
    "find_congestion_point": "ringtap.analysis.model.congestion_point",
    "find_curve_point": "ringtap.analysis.model.congestion_point_on_curve",
    "open_job": "ringtap.analysis.job.run",
    "open_run": "ringtap.analysis.sweeps.sweep",
    "open_sweep": "ringtap.analysis.sweeps.sweep",
    "plot": "ringtap.analysis.plots.figures_on_axes",
    "quantile_interval": "ringtap.analysis.statistics.quantiles",
    "read_captures": "ringtap.analysis.pcap.scan_captures",
    "read_structure": "ringtap.analysis.structure.capture_streams",
    "receiver": "ringtap.traffic",
    "run_sweep": "ringtap.agents.sweep.conductor",
    "schedule": "ringtap.predictions",
    "send": "ringtap.traffic",
    "simulate": "ringtap.predictions",
    "testbed": "ringtap.agents.testbed.start_testbed",
    "utc": "ringtap.analysis.notebook_formatting",
    "whatif": "ringtap.predictions",
    "write_report": "ringtap.analysis.report.write",
}


def step() -> None:
    """Mark the end of an iteration of a training loop whose steps ringtap cannot detect by itself.

    For loops without PyTorch's optimizers: JAX, NumPy, a simulation. Under ``ringtap run`` the moment is recorded, and
    the marks count as this process's iterations; without it the call does nothing. Never raises.
    """
    hook = _sys.modules.get("ringtap_hook")
    if hook is not None:
        hook.mark()


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name not in _MODULES:
        from ringtap.core.errors import did_you_mean

        hint = "" if name.startswith("_") else did_you_mean(name, __all__)
        raise AttributeError(f"module 'ringtap' has no attribute {name!r}" + (f": {hint.strip()}" if hint else ""))
    import importlib

    try:
        module = importlib.import_module(_MODULES[name])
    except ImportError as error:
        from ringtap.core import installation

        said = installation.missing(error)
        if said is None:
            raise
        raise ImportError(f"ringtap.{name} cannot be used: {said}", name=error.name) from None
    found = globals()[name] = module if name == "plot" else getattr(module, name)
    return found
