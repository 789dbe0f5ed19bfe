"""Docstrings of functions are like one another."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PRODUCT = ("api", "worker", "shared", "penstock", "tools")
VERB = re.compile(r"[A-Z][a-z]+s\b")


def docstrings() -> Iterator[tuple[str, str]]:
    """Yields the place and the docstring of every function of the product.

    Constructors document parameters only, properties what they are: as attributes.
    """
    for path in (path for room in PRODUCT for path in (REPOSITORY / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_property = any("property" in ast.unparse(d) for d in node.decorator_list)
                docstring = ast.get_docstring(node)
                if docstring and node.name != "__init__" and not is_property:
                    yield f"{path.relative_to(REPOSITORY)}:{node.lineno} {node.name}", docstring


def test_docstrings_of_functions_begin_with_a_verb_in_the_third_person() -> None:
    found = list(docstrings())
    assert len(found) > 1000
    assert [place for place, docstring in found if not VERB.match(docstring)] == []
