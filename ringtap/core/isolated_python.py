"""Builds the commands of ringtap's own Python processes, which import no module from the current folder.

``python -m`` and ``python -c`` put the current folder first on the path: a file of somebody's project, such as
select.py, would then take the place of a module of the standard library. The option -P is unknown before Python 3.11,
and PYTHONSAFEPATH would reach the jobs that these processes start.
"""

from __future__ import annotations

LEAVE_FOLDER_OUT = "import sys; sys.path[:] = sys.path[not sys.path[0]:]"
RUN_MODULE = f'{LEAVE_FOLDER_OUT}; import runpy; runpy.run_module(sys.argv.pop(1), None, "__main__", True)'


def python_command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module as ``python -m`` does, but for the current folder.

    Args:
        python: the interpreter, of any version that ringtap or its hook runs on.
        module: the module.
        *arguments: its arguments.
    """
    return [python, "-c", RUN_MODULE, module, *arguments]


def short_command(words: list[str]) -> list[str]:
    """Return a command as it would be with ``python -m``, for people and for patterns."""
    place = words.index(RUN_MODULE) if RUN_MODULE in words else 0
    return [*words[: place - 1], "-m", *words[place + 1 :]] if place else words
