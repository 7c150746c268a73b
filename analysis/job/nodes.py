"""Independent reading of each node's logs, in this process or in those of an executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ringtap.analysis.runs.node_logs import NodeLogs
from ringtap.errors import UsageError

T = TypeVar("T")


def each_node(
    workers: Executor | None, nodes: Mapping[str, NodeLogs], read: Callable[..., T], *columns: Iterable[Any]
) -> Iterator[tuple[str, T]]:
    """Read every node and yield the results in the order of the nodes; problems are added to the logs in ``nodes``.

    Args:
        workers: processes that read; None for this one.
        nodes: the nodes' logs.
        read: a module-level function that takes a node's logs, opened anew, and that node's value of each column.
        *columns: further arguments, one value per node each.
    """
    found = (workers.map if workers else map)(partial(_read, read), [logs.path for logs in nodes.values()], *columns)
    for (name, logs), (result, problems, torn) in zip(nodes.items(), found, strict=True):
        logs.problems += [problem for problem in problems if problem not in logs.problems]
        logs.torn += torn
        yield name, result


def _read(read: Callable[..., T], path: Path, *arguments: Any) -> tuple[T, list[str], list[str]]:
    if not path.is_dir():
        raise UsageError(f"{path} is not there for the workers: they need the file system that it lies on")
    logs = NodeLogs(path)
    return read(logs, *arguments), logs.problems, logs.torn
