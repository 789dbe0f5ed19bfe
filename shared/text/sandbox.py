"""The sandbox that chat templates run in: the dialect of transformers, with a bound on loops.

A template is written by the author of the checkpoint, so it gets data and no Python: jinja2's
immutable sandbox, without underscore names on namespaces. The conversation it runs on is written by
the client of a request. The rendering process bounds its memory and time, and is killed for them;
loops and calls of macros, which grow with a conversation, are counted here besides: a count is the
same on every machine, and refuses in a fraction of that time without a process to start anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, TypeVar

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

_Counted = TypeVar("_Counted", nodes.For, nodes.Macro)

MAX_STEPS = 250_000  # passes through a loop's body and calls of macros, in one rendering
MAX_CPU_SECONDS = 3.0  # of one rendering, of its thread: a busy or paused machine refuses nothing
_STEPS_PER_CLOCK_LOOK = 64
BUDGET = "_penstock_step"  # the variable that every rendering must define: a WorkBudget's `step`


class TooMuchWork(TemplateError):
    """A rendering that passed a bound."""


class WorkBudget:
    """Counts the steps of one rendering. To be made on the thread that renders."""

    def __init__(
        self, max_steps: int = MAX_STEPS, max_cpu_seconds: float = MAX_CPU_SECONDS
    ) -> None:
        self._steps_left = max_steps
        self._deadline_s = time.thread_time() + max_cpu_seconds

    def step(self) -> None:
        """Counts a step. Raises TooMuchWork beyond the bounds."""
        self._steps_left -= 1
        late = (
            self._steps_left % _STEPS_PER_CLOCK_LOOK == 0 and time.thread_time() > self._deadline_s
        )
        if self._steps_left < 0 or late:
            raise TooMuchWork("the chat template loops too long over this conversation")


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Compiles chat templates."""

    def __init__(self, now: Callable[[], datetime] = datetime.now) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda format: now().strftime(format)
        self.globals["namespace"] = _TemplateNamespace
        self.globals["dict"] = _TemplateDict()

    def compile_chat(self, source: str) -> Template:
        """Raises jinja2.TemplateSyntaxError."""
        tree = self.parse(source)
        _CountedLoops(self).visit(tree)
        return Template.from_code(self, self.compile(tree), self.make_globals(None))

    def variables_of(self, source: str) -> frozenset[str]:
        """Returns the names that a template reads and does not set. Raises TemplateSyntaxError."""
        return frozenset(find_undeclared_variables(self.parse(source))) - frozenset(self.globals)


class _CountedLoops(NodeTransformer):
    """Lets loops and macros take a step of the budget."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.For:
        return self._counted(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:
        return self._counted(node)

    def _counted(self, node: _Counted) -> _Counted:
        self.generic_visit(node)
        call = nodes.Call(nodes.Name(BUDGET, "load"), [], [], None, None)
        statement = nodes.ExprStmt(call)
        statement.set_lineno(node.lineno, override=True)
        statement.set_environment(self._environment)
        node.body.insert(0, statement)
        return node


class _GenerationTag(Extension):
    """`{% generation %}`: marks the assistant's text, for training; its body renders as is."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _TemplateNamespace(Namespace):
    """jinja2's namespace without underscore names, the way out to CPython's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _TemplateDict:
    """`dict` in templates: makes dictionaries and is not the type itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a chat template may not store {name!r} on a namespace")


class WrittenObject(dict[str, Any]):
    """The object of a JSON text, which `tojson` writes as the text has it.

    A model's arguments so come back with the spaces, the order and the escapes that the model chose
    itself, and its KV cache has them already.
    """

    def __init__(self, value: dict[str, Any], text: str) -> None:
        super().__init__(value)
        self._written = text  # a template reads no name with this underscore


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON as transformers' filter does; jinja2's own escapes for HTML."""
    if isinstance(value, WrittenObject) and (indent, separators) == (None, None) and not sort_keys:
        return value._written
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))
