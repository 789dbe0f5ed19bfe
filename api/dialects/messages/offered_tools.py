"""The tools of a Messages request that the model may call.

A tool with `defer_loading` is offered once the conversation names it: by a `tool_reference` in the
result of a search, by a `tool_addition`, by a call, or by `tool_choice`. Where nothing can find it,
because Anthropic's own search was to do so or because every tool is deferred, it is offered at
once. A prompt lists its tools in one place, so a `tool_removal` holds for the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from api.dialects.messages.blocks import (
    InlineTool,
    Message,
    ToolAdditionBlock,
    ToolNameReference,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
    tool_changes,
)
from api.dialects.messages.protocol import CountTokensRequest
from api.dialects.messages.tools import (
    ClientTool,
    CustomTool,
    HostedTool,
    ToolChoiceAny,
    ToolChoiceAuto,
    ToolChoiceNone,
    ToolChoiceTool,
)
from api.errors import unsupported
from api.generation.tools import MAX_TOOLS, Toolbox, ToolUse
from shared.messages import InvalidParameter


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tool of the caller, and its path in the request."""

    tool: CustomTool | ClientTool
    param: str


def tool_use(request: CountTokensRequest) -> ToolUse:
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
    offered = _offered(request, entries, is_searched=any(tool.is_search for tool in hosted))
    toolbox = Toolbox((one.tool.offered(one.param) for one in offered), parallel=not is_single)
    match choice:
        case None | ToolChoiceAuto():
            return toolbox.use("auto")
        case ToolChoiceAny():
            return toolbox.use("required")
        case ToolChoiceTool(name=name):
            return toolbox.use_one(name, "tool_choice.name")
        case ToolChoiceNone():
            return toolbox.use("none")


def _entries(request: CountTokensRequest) -> tuple[list[_Entry], list[HostedTool]]:
    """Returns the caller's tools, and those that run at Anthropic's servers."""
    inline = {
        _name(change): (change.tool.definition, f"{path}.tool.definition")
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
    loads_all = is_searched or all(entry.tool.defer_loading for entry in kept)
    if loads_all or not any(entry.tool.defer_loading for entry in kept):
        return kept
    named = set(_named(request))
    return [entry for entry in kept if not entry.tool.defer_loading or entry.tool.name in named]


def _removed(request: CountTokensRequest) -> set[str | None]:
    """Returns the names of the tools that the conversation has withdrawn."""
    removed: set[str | None] = set()
    for change, _ in tool_changes(request.messages):
        if isinstance(change, ToolAdditionBlock):
            removed.discard(_name(change))
        elif isinstance(change.tool, ToolNameReference):
            removed.add(change.tool.name)
    return removed


def _name(change: ToolAdditionBlock) -> str | None:
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
            yield _name(change)
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
