"""Measures how much there is to read: `make stats`. Another checkout is measured by

    python -m tools.stats --root DIR

Prints markdown tables: files and lines of each room, how much code each module with routes
reaches by its imports, and what is very small or very long. The files are parsed, not imported.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PRODUCT = ("api", "worker", "shared")
ROOMS = (*PRODUCT, "tools", "bench", "tests")
FRONTEND = ("api", "shared")  # what a route can import
HTTP_METHODS = {"get", "post", "put", "patch", "delete", "head", "options", "api_route"}
COMPILED = {".lua", ".cpp", ".h"}
LONG_FUNCTION = 70  # lines
LAST_TEST_RUN = ".pytest_cache/last-run"  # a line, written by `make test` and `make test-fast`


@dataclass(frozen=True)
class Module:
    """One Python file. `path` is relative to the root, `imports` are dotted names."""

    path: Path
    num_lines: int
    imports: frozenset[str]
    functions: dict[str, int]  # number of lines by "path:line name"
    num_tests: int  # test functions, each counted once however often it is parametrised
    has_routes: bool


def read_modules(root: Path) -> dict[str, Module]:
    """Parses the Python files of all rooms. Returns them by their dotted names."""
    modules = {}
    for room in ROOMS:
        for path in sorted((root / room).rglob("*.py")):
            relative = path.relative_to(root)
            name = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            modules[name] = _parse(path.read_text(), relative)
    return modules


def _parse(source: str, path: Path) -> Module:
    nodes = list(ast.walk(ast.parse(source)))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    is_test_file = path.parts[0] == "tests" and path.name.startswith("test_")
    return Module(
        path,
        len(source.splitlines()),
        frozenset(name for node in nodes for name in _imported_names(node)),
        {f"{path}:{f.lineno} {f.name}": (f.end_lineno or 0) - f.lineno + 1 for f in functions},
        sum(is_test_file and f.name.startswith("test_") for f in functions),
        any(_is_route(decorator) for f in functions for decorator in f.decorator_list),
    )


def _imported_names(node: ast.AST) -> list[str]:
    """Returns the names of an import statement, `a.b.name` for `from a.b import name`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _is_route(decorator: ast.expr) -> bool:
    """Returns whether a decorator is like `@router.get("/health")`."""
    return (
        isinstance(decorator, ast.Call)
        and isinstance(decorator.func, ast.Attribute)
        and isinstance(decorator.func.value, ast.Name)
        and decorator.func.value.id.endswith("router")
        and decorator.func.attr in HTTP_METHODS
    )


def imported_modules(name: str, modules: dict[str, Module]) -> set[str]:
    """Returns the names of those of `modules` that the module `name` itself imports."""
    found = set()
    for imported in modules[name].imports:
        while imported and imported not in modules:
            imported = imported.rpartition(".")[0]
        found.add(imported)
    return found - {name, ""}


def closure(name: str, modules: dict[str, Module]) -> set[str]:
    """Returns `name` and the names of all of `modules` that it imports, directly or indirectly.

    Imports inside functions and under TYPE_CHECKING count: a reader follows them, too. The
    `__init__` of a package counts where it is imported itself.
    """
    reached, unread = {name}, [name]
    while unread:
        new = imported_modules(unread.pop(), modules) - reached
        reached |= new
        unread += new
    return reached


def in_rooms(modules: dict[str, Module], rooms: Sequence[str]) -> dict[str, Module]:
    """Returns those of `modules` whose files are in one of `rooms`, at any depth."""
    return {n: m for n, m in modules.items() if m.path.parts[0] in rooms}


def room_rows(root: Path, modules: dict[str, Module]) -> Iterator[tuple[object, ...]]:
    """Yields a row for each room, and for each folder of `api`."""
    for room in ROOMS:
        yield _room_row(room, root, modules)
        if room == "api":
            top = [m.num_lines for m in modules.values() if m.path.parent == Path("api")]
            yield "`api/*.py`", len(top), sum(top), 0, 0
            for folder in sorted({m.path.parts[1] for m in in_rooms(modules, ["api"]).values()}):
                if not folder.endswith(".py"):
                    yield _room_row(f"api/{folder}", root, modules)
    totals = [_room_row(room, root, modules)[1:] for room in PRODUCT]
    yield " + ".join(f"`{room}`" for room in PRODUCT), *map(sum, zip(*totals, strict=True))


def _room_row(room: str, root: Path, modules: dict[str, Module]) -> tuple[str, int, int, int, int]:
    """Returns the room's name, its Python files and lines, its Lua and C++ files and lines."""
    python = [m.num_lines for m in modules.values() if Path(room) in m.path.parents]
    compiled = [p for p in (root / room).rglob("*") if p.suffix in COMPILED]
    num_lines = sum(len(path.read_text().splitlines()) for path in compiled)
    return f"`{room}`", len(python), sum(python), len(compiled), num_lines


def closure_rows(modules: dict[str, Module]) -> Iterator[tuple[object, ...]]:
    """Yields a row for each module with routes: its file, files and lines of its closure."""
    frontend = in_rooms(modules, FRONTEND)
    for name, module in frontend.items():
        if module.has_routes:
            reached = closure(name, frontend)
            yield f"`{module.path}`", len(reached), sum(frontend[n].num_lines for n in reached)


def shape_rows(root: Path, modules: dict[str, Module]) -> Iterator[tuple[object, ...]]:
    """Yields what is very small, very long, and how many tests there are."""
    product = in_rooms(modules, PRODUCT)
    num_importers = Counter(i for name in product for i in imported_modules(name, product))
    single = [name for name, number in num_importers.items() if number == 1]
    yield "files that exactly one other imports", len(single)
    longest = max(product.values(), key=lambda module: module.num_lines)
    yield "lines of the longest file", f"{longest.num_lines} (`{longest.path}`)"
    functions = {n: length for m in product.values() for n, length in m.functions.items()}
    where, length = max(functions.items(), key=lambda item: item[1])
    yield "lines of the longest function", f"{length} (`{where}`)"
    long = sum(length > LONG_FUNCTION for length in functions.values())
    yield f"functions of more than {LONG_FUNCTION} lines", long
    yield "test functions", sum(module.num_tests for module in modules.values())
    last_run = root / LAST_TEST_RUN
    if last_run.exists():
        yield "last run of the tests", last_run.read_text().strip()


def _print_table(head: Sequence[str], rows: Iterator[tuple[object, ...]]) -> None:
    print(f"| {' | '.join(head)} |")
    print("| --- |" + " ---: |" * (len(head) - 1))
    for row in rows:
        cells = (f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row)
        print(f"| {' | '.join(cells)} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints how much there is to read.")
    parser.add_argument("--root", type=Path, default=Path(), help="a checkout (default: here)")
    root = parser.parse_args().root
    modules = read_modules(root)
    _print_table(
        ("room", "Python files", "lines", "Lua, C++ files", "lines"), room_rows(root, modules)
    )
    _print_table(("import closure of", "files", "lines"), closure_rows(modules))
    _print_table(("`api`, `worker`, `shared`; tests", "now"), shape_rows(root, modules))


if __name__ == "__main__":
    main()
