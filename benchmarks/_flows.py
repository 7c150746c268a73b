"""Many flows: the number of 1 kB flows that one worker finishes per second, and of flows open at the same time."""

from __future__ import annotations

from _context import Bench
from _namespaces import Route
from _processes import BenchmarkError
from _ringtap import Receiver, free_port, read_sent, send, write_plan

_SIZE_BYTES = 1000
# The kernel sends a connection's first ten segments at once, 640 kB over loopback. The rest is paced, which keeps the
# flow open for seconds, until all others have started.
_PACED_BYTES, _PACING_BPS = 1_000_000, 800_000
_PATIENCE_S = 20


def measure_rate(bench: Bench, route: Route, connections: str, repeat: int) -> None:
    """Offer more flows than can finish, on kept connections or with one connection each; count those that finish."""
    offered = bench.settings.kept_offered if connections == "kept" else bench.settings.new_offered
    length_s, port, log = bench.settings.offer_s, free_port(), bench.path("rate.rec")
    gap_ns = 1e9 / offered
    starts = (int(number * gap_ns) for number in range(int(offered * length_s)))
    plan = write_plan(
        bench.path("rate.plan"), f"{route.address}:{port}", length_s, ((start, _SIZE_BYTES) for start in starts)
    )
    with bench.sample("flow rate", route=route.name, connections=connections, repeat=repeat) as figures:
        arguments = ["--log", log, "--workers", 1, "--connections", connections, "--patience", f"{_PATIENCE_S}s"]
        with Receiver(bench.processes, route, port, "--workers", 1):
            sent = send(bench.processes, route, plan, *arguments, timeout_s=length_s + _PATIENCE_S)
        flows = read_sent(log, "intended_start_ns", "finish_ns", "state")
        ends = [finish for _, finish, state in flows if state == 0]
        if not ends:
            raise BenchmarkError("no flow finished")
        figures["flows_per_s"] = len(ends) / ((max(ends) - min(start for start, _, _ in flows)) / 1e9)
        figures |= {"offered_per_s": offered, "finished": len(ends), "planned": len(flows)}
        figures["cpu_s"] = sent.cpu_s


def measure_concurrent(bench: Bench) -> None:
    """Start all flows at once, paced; count in the log how many finished, and how many were open at one instant."""
    route, port, log, wanted = bench.routes[0], free_port(), bench.path("many.rec"), bench.settings.concurrent
    with bench.sample("concurrent flows", wanted=wanted) as figures:
        plan = write_plan(
            bench.path("many.plan"), f"{route.address}:{port}", 1.0, [(0, _PACED_BYTES)] * wanted, _PACING_BPS
        )
        arguments = ["--log", log, "--max-connections", wanted, "--patience", f"{_PATIENCE_S}s"]
        with Receiver(bench.processes, route, port, "--max-connections", wanted + 100):
            send(bench.processes, route, plan, *arguments, timeout_s=_PATIENCE_S)
        spans = [
            (first_byte, finish)
            for first_byte, finish, state in read_sent(log, "first_byte_ns", "finish_ns", "state")
            if state == 0
        ]
        figures |= {"finished": len(spans), "open_at_once": _most_open(spans)}
        if figures["open_at_once"] != wanted:
            raise BenchmarkError(f"{figures['open_at_once']} flows were open at one instant, not {wanted}")


def _most_open(spans: list[tuple[int, int]]) -> int:
    """Return the largest number of spans that contain one instant; a span does not contain its end."""
    events = sorted([(first, 1) for first, _ in spans] + [(finish, -1) for _, finish in spans])
    most = now = 0
    for _, step in events:
        now += step
        most = max(most, now)
    return most
