"""The tools of a Responses request: their JSON, and the functions as which a model knows them.

A client runs all tools that are served. To the model each is a function: a namespace's tools have
its name before theirs, and a custom tool has one parameter, `input`. What OpenAI runs itself
(`HOSTED`) is a permission that a model need not use: it is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    ConfigDict,
    Field,
    TypeAdapter,
    WrapValidator,
)

from api.generation.protocol import OnlyFalse, RequestModel, at_the_object
from api.generation.tools import MAX_TOOLS, ToolName

HOSTED = (
    *("web_search", "web_search_2025_08_26"),
    *("web_search_preview", "web_search_preview_2025_03_11"),
    *("file_search", "code_interpreter", "image_generation", "mcp", "programmatic_tool_calling"),
    *("computer", "computer_use", "computer_use_preview"),
)
NO_HOSTED = "OpenAI's servers run this tool; here only the client's own tools are served"
_Hosted = Literal[HOSTED]  # type: ignore[valid-type]
_Callers = Annotated[list[Literal["direct"]], WrapValidator(at_the_object)]


class FunctionTool(RequestModel):
    """A function. Only the defaults of `allowed_callers` and `async` are served."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None  # results are not checked
    allowed_callers: _Callers | None = None
    is_async: OnlyFalse | None = Field(None, alias="async")
    defer_loading: bool | None = None  # every tool is shown to the model


class CustomTextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class CustomGrammarFormat(RequestModel):
    """Text that a grammar admits."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


_CustomFormat = Annotated[CustomTextFormat | CustomGrammarFormat, Field(discriminator="type")]


class CustomTool(RequestModel):
    """A tool whose input is text."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: _CustomFormat | None = None
    allowed_callers: _Callers | None = None
    is_async: OnlyFalse | None = Field(None, alias="async")
    defer_loading: bool | None = None  # every tool is shown to the model


class NamespaceTool(RequestModel):
    """Tools under one name."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[
        list[Annotated[FunctionTool | CustomTool, Field(discriminator="type")]],
        Field(fail_fast=True, max_length=MAX_TOOLS),
    ]


class LocalShellTool(RequestModel):
    """A shell of the client, whose commands are lists of arguments."""

    type: Literal["local_shell"]


class ShellTool(RequestModel):
    """A shell: the client's where its environment is local."""

    type: Literal["shell"]
    environment: dict[str, Any] | None = None
    allowed_callers: _Callers | None = None


class ApplyPatchTool(RequestModel):
    """Changes of the client's files."""

    type: Literal["apply_patch"]
    allowed_callers: _Callers | None = None


class ToolSearchTool(RequestModel):
    """A search for further tools: the client's where `execution` is "client"."""

    type: Literal["tool_search"]
    execution: Literal["server", "client"] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class HostedTool(RequestModel):
    """A tool that OpenAI runs. It is left out, and any member is accepted."""

    model_config = ConfigDict(extra="allow")

    type: _Hosted


ResponseTool = Annotated[
    FunctionTool
    | CustomTool
    | NamespaceTool
    | LocalShellTool
    | ShellTool
    | ApplyPatchTool
    | ToolSearchTool
    | HostedTool,
    Field(discriminator="type"),
]


def left_out_of(tools: Sequence[RequestModel], name: str) -> Iterator[str]:
    """Yields the names of the parts of tools, the member `name`, that the model does not see."""
    for tool in tools:
        payload = tool_payload(tool)
        if is_hosted(payload):
            yield f"{name}.{payload['type']}"
        if isinstance(tool, NamespaceTool):
            yield from left_out_of(tool.tools, name)
        for member in ("defer_loading", "output_schema"):
            if payload.get(member):
                yield f"{name}.{member}"


def is_hosted(tool: Mapping[str, Any]) -> bool:
    """Returns whether OpenAI's servers would run a tool, given as JSON."""
    if tool.get("type") == "shell":
        environment = tool.get("environment")
        return isinstance(environment, Mapping) and environment.get("type") != "local"
    if tool.get("type") == "tool_search":
        return tool.get("execution") != "client"
    return tool.get("type") in HOSTED


ResponseTools = Annotated[list[ResponseTool], Field(fail_fast=True, max_length=MAX_TOOLS)]


_TOOLS: TypeAdapter[list[ResponseTool]] = TypeAdapter(ResponseTools)


class ToolChoiceNamed(RequestModel):
    """One call of this tool."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ToolChoiceBuiltin(RequestModel):
    """One call of the tool of this type, which the client runs."""

    type: Literal["local_shell", "shell", "apply_patch", "tool_search"]


class ToolChoiceHosted(RequestModel):
    """One call of a hosted tool: it cannot be served."""

    model_config = ConfigDict(extra="allow")

    type: _Hosted


class AllowedTool(RequestModel):
    """A tool that may be called. Further members, as of its definition, change nothing."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str | None = None
    namespace: str | None = None


class ToolChoiceAllowed(RequestModel):
    """Calls of some tools, by their names; `required`: at least one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        ToolChoiceNamed | ToolChoiceBuiltin | ToolChoiceHosted | ToolChoiceAllowed,
        Field(discriminator="type"),
    ]
)


def tools_of(payloads: Sequence[Mapping[str, Any]]) -> Sequence[RequestModel]:
    """Returns tools that were kept as JSON."""
    return _TOOLS.validate_python(payloads)


def tool_payload(tool: RequestModel) -> dict[str, Any]:
    """Returns a tool as JSON, as it was sent."""
    return tool.model_dump(by_alias=True, exclude_none=True)
