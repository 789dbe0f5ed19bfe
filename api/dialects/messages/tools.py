"""The tools of a Messages request: the caller's own, and those that Anthropic defines.

Anthropic's tools of the second kind run at the caller (`bash`, the text editor, `memory`), where
only the schema is Anthropic's: it is served (`client_tools`). Or they run at Anthropic's servers:
they are a permission, and not a demand, so they are left out and reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from api.dialects.messages.client_tools import DEFINITIONS, ClientToolType
from api.generation.protocol import RequestModel
from api.generation.tools import NO_PARAMETERS, Tool, ToolName

# A type of Anthropic's is a family and the date of a version.
_DATED = re.compile(r"([a-z][a-z0-9_]{0,60}?)(_\d{8})?", re.ASCII)
# Families that run at Anthropic's servers, or whose schema depends on a screen.
HOSTED_FAMILIES = (
    "advisor",
    "browser_toolset",
    "code_execution",
    "computer",
    "computer_toolset",
    "mcp_toolset",
    "tool_search_tool_bm25",
    "tool_search_tool_regex",
    "web_fetch",
    "web_search",
)
_SEARCH = "tool_search_tool"


class CacheControl(RequestModel):
    """Accepted everywhere, without effect: nothing needs to be marked to be cached."""

    type: Literal["ephemeral"]
    ttl: str | None = None
    scope: str | None = None  # a tenant's prefixes stay its own


class _OfferedTool(RequestModel):
    """The members that all tools of the caller have."""

    cache_control: CacheControl | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: Annotated[list[str], Field(fail_fast=True)] | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None

    @property
    def is_for_the_model(self) -> bool:
        """Returns whether the model itself may call the tool, and not only its programs."""
        return self.allowed_callers is None or "direct" in self.allowed_callers

    def left_out(self) -> Iterator[str]:
        """Yields the names of the members without effect."""
        if self.input_examples:
            yield "tools.input_examples"
        if self.allowed_callers is not None and self.allowed_callers != ["direct"]:
            yield "tools.allowed_callers"


class CustomTool(_OfferedTool):
    """A tool of the caller's."""

    type: Literal["custom"] | None = None  # first: its error is the one to read
    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None

    def offered(self, param: str) -> Tool:
        """Returns the tool as prompts and grammars have it. Raises InvalidParameter."""
        return Tool(
            name=self.name,
            description=self.description,
            parameters=self.input_schema or NO_PARAMETERS,
            strict=bool(self.strict),
            param=param,
            schema_param=f"{param}.input_schema",
        )


class ClientTool(_OfferedTool):
    """A tool that runs at the caller and whose schema Anthropic publishes."""

    type: ClientToolType
    name: ToolName
    max_characters: int | None = None  # of a file's view, which the caller cuts

    def offered(self, param: str) -> Tool:
        """Returns the tool as prompts and grammars have it."""
        definition = DEFINITIONS[self.type]
        return Tool(
            name=self.name,
            description=definition.description,
            parameters=definition.parameters,
            strict=bool(self.strict),
            param=param,
            schema_param=param,
        )


class HostedTool(RequestModel):
    """A tool that runs at Anthropic's servers; its other members are not read."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[
        str,
        Field(
            pattern=r"^[a-z][a-z0-9_]{0,60}$",
            json_schema_extra={"not": {"enum": ["custom", *DEFINITIONS]}},
        ),
    ]
    name: str | None = None

    @property
    def family(self) -> str:
        """Returns its type without the version."""
        found = _DATED.fullmatch(self.type)
        return found[1] if found else self.type

    @property
    def is_search(self) -> bool:
        """Returns whether it finds tools that are not loaded."""
        return self.family.startswith(_SEARCH)

    def left_out(self) -> Iterator[str]:
        """Yields the name to report: of a family that is known, its own."""
        yield f"tools.{self.family}" if self.family in HOSTED_FAMILIES else "tools"


# Paths of errors have these tags: no member has such a name.
_CUSTOM, _CLIENT, _HOSTED = "custom tool", "client tool", "hosted tool"


def _kind(tool: Any) -> str:
    """Returns which model a tool is read as; CustomTool explains unknown types."""
    kind = tool.get("type") if isinstance(tool, Mapping) else getattr(tool, "type", None)
    if isinstance(kind, str):
        if kind in DEFINITIONS:
            return _CLIENT
        found = _DATED.fullmatch(kind)
        if found and (found[2] or found[1] in HOSTED_FAMILIES):
            return _HOSTED
    return _CUSTOM


ToolDefinition = Annotated[
    Annotated[CustomTool, Tag(_CUSTOM)]
    | Annotated[ClientTool, Tag(_CLIENT)]
    | Annotated[HostedTool, Tag(_HOSTED)],
    Discriminator(_kind),
]


class ToolChoiceAuto(RequestModel):
    """The model decides."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class ToolChoiceAny(RequestModel):
    """At least one call."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class ToolChoiceTool(RequestModel):
    """A call of this one."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class ToolChoiceNone(RequestModel):
    """No call."""

    type: Literal["none"]


ToolChoice = Annotated[
    ToolChoiceAuto | ToolChoiceAny | ToolChoiceTool | ToolChoiceNone,
    Field(discriminator="type"),
]


def left_out_tools(tools: Iterable[ToolDefinition]) -> Iterator[str]:
    """Yields the name of each tool and member that the model does not see."""
    for tool in tools:
        yield from tool.left_out()
