"""Gives the API pages the docstrings to which decorators append descriptions (`analysis/notebook_formatting.py`)."""

import ast
import inspect
from typing import Any

import griffe

_DECORATORS = {"described_table", "documented", "with_section"}


class RuntimeDocstrings(griffe.Extension):
    """Replaces the docstrings in the source of decorated functions and classes by those that ``help`` shows."""

    def on_instance(self, *, node: ast.AST | griffe.ObjectNode, obj: griffe.Object, **_: Any) -> None:
        """Look at the decorators of a function or a class."""
        decorators = getattr(node, "decorator_list", [])
        if obj.docstring and any(
            isinstance(one, ast.Call) and ast.unparse(one.func) in _DECORATORS for one in decorators
        ):
            obj.docstring.value = inspect.getdoc(griffe.dynamic_import(obj.path)) or ""
