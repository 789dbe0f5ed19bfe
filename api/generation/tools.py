"""The tools of a request, and which of them the model may call.

A tool that a conversation finds on its way (by a search, by a `tool_addition`) is defined where it
is found, and not in the list at the prompt's beginning: so the prefix of the earlier turns lasts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from shared.messages import InvalidParameter

MAX_TOOLS = 1024
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
# The parameters of a function that takes none.
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. `param` and `schema_param` name it, and the schema of its
    parameters, in errors: `tools.0.function`, `tools.0.function.parameters`."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]  # a JSON schema of an object
    strict: bool
    param: str
    schema_param: str

    def __post_init__(self) -> None:
        if self.parameters.get("type", "object") != "object":
            raise InvalidParameter(f"{self.schema_param}.type", "must be 'object'")

    def definition(self) -> dict[str, Any]:
        """Returns the definition for chat templates."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.parameters}}

    def announcement(self, *, is_known: bool) -> str:
        """Returns the text that announces the tool within a conversation.
        `is_known`: the prompt has its definition already."""
        text = f"The tool '{self.name}' is available"
        if is_known:
            return f"{text}."
        return f"{text}: {json.dumps(self.definition(), ensure_ascii=False)}"


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a request lets the model do with its tools.

    `tools` are listed at the prompt's beginning; messages may define others. `callable` are those
    that the model may call: none when it must not call any. `is_restricted`: a choice keeps it from
    others. `must_call`: the answer is one call or more. `parallel`: more than one call to a turn.
    `any_arguments`: the grammar keeps calls to their names, and not to the tools' schemas.
    """

    tools: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    must_call: bool = False
    parallel: bool = True
    is_restricted: bool = False
    any_arguments: bool = False

    @property
    def is_enforced(self) -> bool:
        """Returns whether the text has to be kept to a grammar for this to hold."""
        restricted = self.is_restricted or not self.parallel
        strict = any(tool.strict for tool in self.callable)
        return self.must_call or (bool(self.callable) and (restricted or strict))


class Toolbox:
    """The tools of one request, by name. Makes the ToolUse of its choice among them."""

    def __init__(
        self, tools: Iterable[Tool], *, parallel: bool, listed: Sequence[Tool] | None = None
    ) -> None:
        """`listed`: the tools at the prompt's beginning, where those are others than `tools`.

        Raises InvalidParameter for two tools of one name.
        """
        self._tools: dict[str, Tool] = {}
        self._parallel = parallel
        for tool in tools:
            if tool.name in self._tools:
                raise InvalidParameter(f"{tool.param}.name", "is the name of another tool")
            self._tools[tool.name] = tool
        self._listed = tuple(self._tools.values() if listed is None else listed)

    def use(self, choice: Literal["none", "auto", "required"]) -> ToolUse:
        """Returns the use of any tool. With "none" they are not shown to the model either: what it
        does not know it cannot call. Raises InvalidParameter."""
        if choice == "none":
            return ToolUse()
        if choice == "required":
            self._check_any()
        return ToolUse(
            self._listed,
            tuple(self._tools.values()),
            must_call=choice == "required",
            parallel=self._parallel,
        )

    def use_one(self, name: str, param: str) -> ToolUse:
        """Returns the use of the tool `name`. It is called once, also where calls may be parallel,
        as at OpenAI and vLLM: clients read the first call as the answer. Raises InvalidParameter.
        """
        tool = self._named(name, param)
        return ToolUse(self._listed, (tool,), must_call=True, parallel=False)

    def use_some(self, names: Sequence[tuple[str, str]], *, must_call: bool) -> ToolUse:
        """Returns the use of the tools with these names, each with its param. All tools are shown
        to the model. Raises InvalidParameter."""
        allowed = {self._named(name, param).name for name, param in names}
        may_call = tuple(tool for tool in self._tools.values() if tool.name in allowed)
        is_restricted = len(may_call) < len(self._tools)
        return ToolUse(self._listed, may_call, must_call, self._parallel, is_restricted)

    def _named(self, name: str, param: str) -> Tool:
        self._check_any()
        if name not in self._tools:
            raise InvalidParameter(param, "must be the name of one of 'tools'")
        return self._tools[name]

    def _check_any(self) -> None:
        if not self._tools:
            raise InvalidParameter("tool_choice", "is only allowed when 'tools' are given")
