"""A table of cases inside one test, for cases that take less time than a test costs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Test = Callable[..., Any]


def table(names: str | Sequence[str], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Like `pytest.mark.parametrize`, but the cases are one test, which runs all of them.

    `names` are arguments of the test; a case is the value of the only one, or a value for each.
    Raises the error of a case with a note that names the case, several as an ExceptionGroup. Cases
    share the test's fixtures: none may leave anything in them that another would notice.
    """
    arguments = [names] if isinstance(names, str) else names
    rows = [dict(zip(arguments, _values(case, len(arguments)), strict=True)) for case in cases]
    assert rows, "a table without a case tests nothing"

    def decorate(test: Test) -> Test:
        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def run(*args: Any, **fixtures: Any) -> None:
                errors = []
                for row in rows:
                    try:
                        await test(*args, **fixtures, **row)
                    except Exception as error:
                        errors.append(_named(error, row))
                _raise(errors, len(rows))

        else:

            @functools.wraps(test)
            def run(*args: Any, **fixtures: Any) -> None:
                errors = []
                for row in rows:
                    try:
                        test(*args, **fixtures, **row)
                    except Exception as error:
                        errors.append(_named(error, row))
                _raise(errors, len(rows))

        signature = inspect.signature(test)
        kept = [p for name, p in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate


def _values(case: Any, count: int) -> Sequence[Any]:
    return (case,) if count == 1 else case


def _named(error: Exception, row: dict[str, Any]) -> Exception:
    case = ", ".join(f"{name}={value!r}" for name, value in row.items())
    error.add_note(f"case: {case[:500]}")
    return error


def _raise(errors: Sequence[Exception], num_cases: int) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {num_cases} cases failed", errors)
