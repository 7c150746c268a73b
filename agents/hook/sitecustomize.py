"""Starts ringtap's recorder in a job's processes, and then runs the sitecustomize that it shadows.

At start-up, Python imports a module of this name from the first folder of its path that has one. The supervisor puts
this folder on a job's PYTHONPATH and names the run in RINGTAP_RUN; without that variable nothing is loaded. The
recorder is the package ``ringtap_hook`` beside this file: standard library only, and nothing newer than Python 3.8,
because the job's interpreter is not ringtap's. This file is valid for Python 3.6, which would else print an error at
each start; it then loads nothing.
"""

import os
import sys


def _arm() -> None:
    """Load the recorder if the job is to be recorded; failures go to the run directory, not to the job."""
    if not os.environ.get("RINGTAP_RUN"):
        return
    try:
        from importlib import import_module

        import_module("ringtap_hook").arm()
    except Exception:  # the package logs its own failures; here it could not be loaded
        pass


def _run_next() -> None:
    """Execute the sitecustomize that Python would have found without this one, under its own name."""
    from importlib.machinery import PathFinder

    here = os.path.dirname(os.path.realpath(__file__))
    folders = [os.path.realpath(folder or os.curdir) for folder in sys.path]
    # Search only later folders: a sitecustomize in an earlier one has run already, and has loaded this one.
    first = folders.index(here) + 1 if here in folders else 0
    later = [folder for folder, real in zip(sys.path[first:], folders[first:]) if real != here]
    spec = PathFinder.find_spec("sitecustomize", later)
    if spec is None or spec.loader is None:
        return
    from importlib._bootstrap import module_from_spec  # importlib.util's own, without the 2.5 ms of its import

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    _arm()
    # Run it last, and do not catch its exceptions: Python reports them as it would without this module.
    _run_next()
