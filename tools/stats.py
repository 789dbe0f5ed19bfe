"""Measures how much there is to read: `make stats`. Another checkout is measured by

    python -m tools.stats --root DIR

Prints markdown tables: files and lines of each room, the reading paths of a chat, how much code
each module with routes reaches by its imports, and very small or very long parts. The files are
parsed, not imported. `--check` compares the reading paths with their limits, as `make lint` does.
`--table` prints their table alone, for docs/ARCHITECTURE.md.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
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
class ReadingPath:
    """What a reader of one part of a plain chat request reads, from `first` on.

    A plain chat has messages of text and asks for nothing else. `until`: the modules with which the
    other part begins; they are not entered. A file that several use counts in each.
    """

    name: str
    first: tuple[str, ...]
    until: tuple[str, ...]
    max_files: int
    max_lines: int

    def modules(self, modules: dict[str, Module]) -> set[str]:
        """Returns the names of its modules."""
        left_out = {*self.until, *DESCRIBES}
        return set().union(*(closure(name, modules, left_out) for name in self.first))


# Read to make the OpenAPI document: no request runs them.
DESCRIBES = ("api.http.openapi", "api.dialects.chat.response_schemas")
CHAT_PATHS = (
    ReadingPath(
        "request -> job",
        first=("api.dialects.chat.routes", "api.jobs.admission"),
        until=(
            "api.dialects.chat.formatter",
            "api.generation.formatter",
            "api.jobs.service",
            "api.jobs.generation_response",
        ),
        max_files=36,
        max_lines=6595,
    ),
    ReadingPath(
        "log -> SSE",
        first=("api.jobs.relay", "api.jobs.stream_response", "api.dialects.chat.formatter"),
        until=("api.jobs.admission",),
        max_files=25,
        max_lines=4945,
    ),
    ReadingPath(
        "log -> JSON",
        first=("api.jobs.generation_response", "api.dialects.chat.formatter"),
        until=("api.jobs.admission",),
        max_files=27,
        max_lines=5175,
    ),
)
ON_DEMAND = "api.on_demand"  # whose PARTS name the modules imported when a request needs them


@dataclass(frozen=True)
class Module:
    """One Python file. `path` is relative to the root, `imports` are dotted names."""

    path: Path
    num_lines: int
    imports: frozenset[str]
    functions: dict[str, int]  # number of lines by "path:line name"
    num_tests: int  # test functions, each counted once however often it is parametrised
    has_routes: bool
    texts: frozenset[str]  # its string literals


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
        frozenset(
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ),
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


def closure(name: str, modules: dict[str, Module], left_out: Collection[str] = ()) -> set[str]:
    """Returns `name` and the names of all of `modules` that it imports, directly or indirectly, not
    through those of `left_out`.

    Imports inside functions and under TYPE_CHECKING count: a reader follows them, too. The
    `__init__` of a package counts where it is imported itself.
    """
    reached, unread = {name}, [name]
    while unread:
        new = imported_modules(unread.pop(), modules) - reached - set(left_out)
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


def path_rows(modules: dict[str, Module]) -> Iterator[tuple[object, ...]]:
    """Yields a row for each reading path of a chat, for all together, and for each part that is
    loaded on demand: what it adds to them."""
    frontend = in_rooms(modules, FRONTEND)
    all_of_them: set[str] = set()
    for path in CHAT_PATHS:
        reached = path.modules(frontend)
        all_of_them |= reached
        yield path.name, *_size(reached, frontend)
    yield "all", *_size(all_of_them, frontend)
    for name in on_demand(frontend):
        yield f"on demand: `{name}`", *_size(closure(name, frontend) - all_of_them, frontend)


def on_demand(modules: dict[str, Module]) -> list[str]:
    """Returns the modules that `api.on_demand` loads by name."""
    if ON_DEMAND not in modules:
        return []
    return sorted(text for text in modules[ON_DEMAND].texts if text in modules)


def _size(names: Collection[str], modules: dict[str, Module]) -> tuple[int, int]:
    return len(names), sum(modules[name].num_lines for name in names)


def too_long(modules: dict[str, Module]) -> list[str]:
    """Returns a sentence for each reading path that is longer than its limits."""
    frontend, found = in_rooms(modules, FRONTEND), []
    for path in CHAT_PATHS:
        files, lines = _size(path.modules(frontend), frontend)
        if files > path.max_files or lines > path.max_lines:
            found.append(
                f"the reading path '{path.name}' has {files} files and {lines:,} lines; "
                f"its limits are {path.max_files} and {path.max_lines:,}"
            )
    return found


def path_table(modules: dict[str, Module]) -> str:
    """Returns the table of the two paths for docs/ARCHITECTURE.md.

    Lines are rounded up to hundreds, so that not every change makes it stale.
    """
    frontend = in_rooms(modules, FRONTEND)
    rows = ["| reading path of a chat | files | lines, at most |", "| --- | ---: | ---: |"]
    all_of_them: set[str] = set()
    sizes = []
    for path in CHAT_PATHS:
        reached = path.modules(frontend)
        all_of_them |= reached
        sizes.append((path.name, *_size(reached, frontend)))
    for name, files, lines in (*sizes, ("all", *_size(all_of_them, frontend))):
        rows.append(f"| {name} | {files} | {-(-lines // 100) * 100:,} |")
    return "\n".join(rows) + "\n"


def shape_rows(root: Path, modules: dict[str, Module]) -> Iterator[tuple[object, ...]]:
    """Yields very small and very long parts, and the number of tests."""
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
    parser.add_argument("--check", action="store_true", help="fail if a reading path is too long")
    parser.add_argument("--table", action="store_true", help="print the reading paths alone")
    options = parser.parse_args()
    root: Path = options.root
    modules = read_modules(root)
    if options.check:
        raise SystemExit("\n".join(f"penstock: {fault}" for fault in too_long(modules)) or 0)
    if options.table:
        print(path_table(modules), end="")
        return
    _print_table(
        ("room", "Python files", "lines", "Lua, C++ files", "lines"), room_rows(root, modules)
    )
    if CHAT_PATHS[0].first[0] in modules:
        _print_table(("reading path of a chat", "files", "lines"), path_rows(modules))
    _print_table(("import closure of", "files", "lines"), closure_rows(modules))
    _print_table(("`api`, `worker`, `shared`; tests", "now"), shape_rows(root, modules))


if __name__ == "__main__":
    main()
