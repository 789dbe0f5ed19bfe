"""The tools of a Messages request that the model may call.

A tool with `defer_loading` is offered once the conversation names it: by a `tool_reference` in the
result of a search, by a `tool_addition`, by a call, or by `tool_choice`. It is offered at once if
nothing can find it: Anthropic's own search was to do so, or every tool is deferred.

The prompt lists at its beginning the tools that the request has from its beginning on. One that is
found or added later is defined at that place, and one that is removed stays in the list, with
a sentence at that place: so the prefix of the earlier turns stays the same. Tools found or added
before a summary, and those that only a call or `tool_choice` names, have no such place: they are
listed.
Without any tool in the list the templates would not show how tools are called: then all are listed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from api.dialects.messages.blocks import (
    InlineTool,
    Message,
    ToolAdditionBlock,
    ToolNameReference,
    ToolReferenceBlock,
    ToolRemovalBlock,
    ToolResultBlock,
    ToolUseBlock,
    shown_blocks,
    tool_changes,
)
from api.dialects.messages.protocol import CountTokensRequest
from api.dialects.messages.tools import (
    ClientTool,
    CustomTool,
    HostedTool,
    ToolChoice,
    ToolChoiceAny,
    ToolChoiceAuto,
    ToolChoiceNone,
    ToolChoiceTool,
)
from api.generation.tools import MAX_TOOLS, Tool, Toolbox, ToolUse
from api.request_errors import unsupported
from shared.messages import InvalidParameter


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tool of the caller, and its path in the request."""

    tool: CustomTool | ClientTool
    param: str


class OfferedTools:
    """The tools of one request: those that the prompt lists, and texts for the others."""

    def __init__(self, use: ToolUse, found: Mapping[str, Tool]) -> None:
        """`found`: the tools that the messages name at a place, by name."""
        self.use = use
        self._found = found
        self._known = {tool.name: tool for tool in use.tools}  # by those who read so far

    def found(self, name: str) -> str:
        """Returns the text for the place where a tool is found or added; the first one of a tool
        that is not listed has its definition. Call it in the order of the prompt."""
        tool = self._found.get(name)
        if tool is None:
            return f"The tool '{name}' is available."
        is_known = self._known.get(name) == tool
        self._known[name] = tool
        return tool.announcement(is_known=is_known)


def offered_tools(request: CountTokensRequest) -> OfferedTools:
    """Returns which tools the model sees, and may or must call. Raises InvalidParameter."""
    choice = request.tool_choice
    entries, hosted = _entries(request)
    if isinstance(choice, ToolChoiceTool) and choice.name in [tool.name for tool in hosted]:
        raise unsupported("tool_choice.name", f"'{choice.name}' would run at Anthropic's servers")
    if isinstance(choice, ToolChoiceAny) and hosted and not entries:
        raise unsupported("tool_choice", "all of 'tools' would run at Anthropic's servers")
    is_single = not isinstance(choice, ToolChoiceNone | None) and bool(
        choice.disable_parallel_tool_use
    )
    is_searched = any(tool.is_search for tool in hosted)
    offered = _offered(request, entries, is_searched=is_searched)
    tools = [one.tool.offered(one.param) for one in offered]
    listed = _listed(request, tools, loads_all=_loads_all(entries, is_searched=is_searched))
    toolbox = Toolbox(tools, parallel=not is_single, listed=listed)
    found = {tool.name: tool for tool in tools}
    return OfferedTools(_chosen(toolbox, choice), found)


def _chosen(toolbox: Toolbox, choice: ToolChoice | None) -> ToolUse:
    match choice:
        case None | ToolChoiceAuto():
            return toolbox.use("auto")
        case ToolChoiceAny():
            return toolbox.use("required")
        case ToolChoiceTool(name=name):
            return toolbox.use_one(name, "tool_choice.name")
        case ToolChoiceNone():
            return toolbox.use("none")


def _listed(request: CountTokensRequest, tools: Sequence[Tool], *, loads_all: bool) -> list[Tool]:
    """Returns the tools of the list at the prompt's beginning. `tools`: all that are offered."""
    places = _places(request.messages)
    first = {
        tool.name: tool.offered(f"tools.{index}")
        for index, tool in enumerate(request.tools)
        if not isinstance(tool, HostedTool)
        and tool.is_for_the_model
        and (loads_all or not tool.defer_loading)
    }
    offered = {tool.name: tool for tool in tools}
    listed = [
        tool if places.get(name) else offered[name]
        for name, tool in first.items()
        if name in offered or places.get(name)
    ]
    listed += [tool for tool in tools if tool.name not in first and not places.get(tool.name)]
    return listed or list(tools)


def _places(messages: Sequence[Message]) -> dict[str | None, bool]:
    """Returns the tools that messages of the prompt find, add, remove or call, by name. True: the
    first of these was no call, so that there is a place for its definition."""
    places: dict[str | None, bool] = {}
    for block in shown_blocks(messages):
        match block:
            case ToolAdditionBlock():
                places.setdefault(added_name(block), True)
            case ToolRemovalBlock(tool=ToolNameReference(name=name)):
                places.setdefault(name, True)
            case ToolReferenceBlock(tool_name=name):
                places.setdefault(name, True)
            case ToolUseBlock(name=name):
                places.setdefault(name, False)
    return places


def _entries(request: CountTokensRequest) -> tuple[list[_Entry], list[HostedTool]]:
    """Returns the caller's tools, and those that run at Anthropic's servers."""
    inline = {
        added_name(change): (change.tool.definition, f"{path}.tool.definition")
        for change, path in tool_changes(request.messages)
        if isinstance(change, ToolAdditionBlock) and isinstance(change.tool, InlineTool)
    }
    defined = [
        (tool, f"tools.{index}")
        for index, tool in enumerate(request.tools)
        if tool.name not in inline  # defined anew since
    ]
    defined += inline.values()
    if len(defined) > MAX_TOOLS:
        raise InvalidParameter("tools", f"at most {MAX_TOOLS} with those of the messages")
    entries: list[_Entry] = []
    hosted: list[HostedTool] = []
    for tool, param in defined:
        if isinstance(tool, HostedTool):
            hosted.append(tool)
        elif tool.is_for_the_model:
            entries.append(_Entry(tool, param))
    return entries, hosted


def _offered(
    request: CountTokensRequest, entries: list[_Entry], *, is_searched: bool
) -> list[_Entry]:
    removed = _removed(request)
    kept = [entry for entry in entries if entry.tool.name not in removed]
    if _loads_all(entries, is_searched=is_searched):
        return kept
    named = set(_named(request))
    return [entry for entry in kept if not entry.tool.defer_loading or entry.tool.name in named]


def _loads_all(entries: Sequence[_Entry], *, is_searched: bool) -> bool:
    """Returns whether deferred tools are offered at once."""
    return is_searched or all(entry.tool.defer_loading for entry in entries)


def _removed(request: CountTokensRequest) -> set[str | None]:
    """Returns the names of the tools that the conversation has withdrawn."""
    removed: set[str | None] = set()
    for change, _ in tool_changes(request.messages):
        if isinstance(change, ToolAdditionBlock):
            removed.discard(added_name(change))
        elif isinstance(change.tool, ToolNameReference):
            removed.add(change.tool.name)
    return removed


def added_name(change: ToolAdditionBlock) -> str | None:
    """Returns the name of the tool that is added, where it is one of the caller's."""
    if isinstance(change.tool, InlineTool):
        return change.tool.definition.name
    return change.tool.name if isinstance(change.tool, ToolNameReference) else None


def _named(request: CountTokensRequest) -> Iterator[str | None]:
    """Yields the names of the tools that the conversation or the choice has."""
    if isinstance(request.tool_choice, ToolChoiceTool):
        yield request.tool_choice.name
    for change, _ in tool_changes(request.messages):
        if isinstance(change, ToolAdditionBlock):
            yield added_name(change)
    for message in request.messages:
        yield from _named_in(message)


def _named_in(message: Message) -> Iterator[str]:
    for block in () if isinstance(message.content, str) else message.content:
        if isinstance(block, ToolUseBlock):
            yield block.name
        elif isinstance(block, ToolResultBlock) and isinstance(block.content, list):
            for inner in block.content:
                if isinstance(inner, ToolReferenceBlock):
                    yield inner.tool_name
