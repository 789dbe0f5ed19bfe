"""The messages of the Messages dialect and their content blocks, as Anthropic's SDKs type them.

A block that has text is served as text. A block of a tool that runs at Anthropic's servers, and one
that only Anthropic can read, is dropped. An image, and a document that is not text, is left out of
a tool's result and refused in the user's own message (`api.dialects.messages.turns`). Parts
that are dropped or left out are reported (`left_out_blocks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from api.dialects.messages.tools import CacheControl, ToolDefinition
from api.generation.messages import MAX_MESSAGES, PartCount
from api.generation.protocol import RequestModel

# Lists end at their first fault: the cost of an error is bounded.


class OpaqueBlock(RequestModel):
    """A block whose members are not read."""

    model_config = ConfigDict(extra="ignore")


class Citations(RequestModel):
    """Whether the answer cites the block: no answer has citations."""

    enabled: bool | None = None


class TextBlock(RequestModel):
    """Text of a message, of the system prompt or of a tool's result."""

    type: Literal["text"] = "text"  # the only kind where there is no choice
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None  # of an earlier answer


TextBlocks = Annotated[list[TextBlock], Field(fail_fast=True)]


class ImageBlock(OpaqueBlock):
    """A picture. No model here reads it."""

    type: Literal["image"]


class TextSource(RequestModel):
    """A document's plain text."""

    type: Literal["text"]
    data: str
    media_type: Literal["text/plain"] = "text/plain"


_ContentBlock = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ContentSource(RequestModel):
    """A document's text in blocks."""

    type: Literal["content"]
    content: str | Annotated[list[_ContentBlock], Field(fail_fast=True)]


class FileSource(OpaqueBlock):
    """A document that is not text: a PDF, an address, or an uploaded file."""

    type: Literal["base64", "url", "file"]


class DocumentBlock(RequestModel):
    """A document: its title, its context and its text."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource | FileSource, Field(discriminator="type")]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    cache_control: CacheControl | None = None


class SearchResultBlock(RequestModel):
    """A result of a search: its title, its source and its text."""

    type: Literal["search_result"]
    title: str
    source: str
    content: TextBlocks
    citations: Citations | None = None
    cache_control: CacheControl | None = None


class ToolReferenceBlock(RequestModel):
    """A tool that a search found: from then on it is offered to the model."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: CacheControl | None = None


class BrowserStateBlock(OpaqueBlock):
    """The state of a browser that a toolset of Anthropic's controls."""

    type: Literal["browser_state"]


ResultBlock = Annotated[
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolReferenceBlock
    | BrowserStateBlock,
    Field(discriminator="type"),
]


class ThinkingBlock(RequestModel):
    """What the model thought before; goes to the template, which decides whether it is shown."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(RequestModel):
    """A call that the model made before. `caller` and `toolset_name` change nothing."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None
    toolset_name: str | None = None


class ToolResultBlock(RequestModel):
    """The result of a tool call; `is_error`: the call failed."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: str | None = None


class DroppedBlock(OpaqueBlock):
    """A block that is not shown to the model: it belongs to a tool that runs at Anthropic's
    servers, or only Anthropic can read it."""

    type: Literal[
        "server_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "advisor_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "mcp_tool_use",
        "mcp_tool_result",
        "mcp_tool_listing",
        "container_upload",
        "redacted_thinking",
        "fallback",
    ]


class ToolNameReference(RequestModel):
    """A tool of `tools`, or one that an earlier block added."""

    type: Literal["tool_reference"]
    name: str


class InlineTool(RequestModel):
    """A tool that is not among `tools`."""

    type: Literal["tool_definition"]
    definition: ToolDefinition


class McpReference(OpaqueBlock):
    """Tools of an MCP server that Anthropic's server would call."""

    type: Literal["mcp_tool_reference", "mcp_toolset_reference"]


class ToolAdditionBlock(RequestModel):
    """The tool is offered to the model from here on."""

    type: Literal["tool_addition"]
    tool: Annotated[ToolNameReference | InlineTool | McpReference, Field(discriminator="type")]
    cache_control: CacheControl | None = None


class ToolRemovalBlock(RequestModel):
    """The tool is not offered to the model any more."""

    type: Literal["tool_removal"]
    tool: Annotated[ToolNameReference | McpReference, Field(discriminator="type")]
    cache_control: CacheControl | None = None


_ToolChange = Annotated[ToolAdditionBlock | ToolRemovalBlock, Field(discriminator="type")]


class CompactionBlock(OpaqueBlock):
    """The summary of all that comes before it; without content it summarizes nothing."""

    type: Literal["compaction"]
    content: str | None = None
    tool_changes: Annotated[list[_ToolChange], Field(fail_fast=True)] | None = None


UserBlock = Annotated[
    TextBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | CompactionBlock
    | DroppedBlock,
    Field(discriminator="type"),
]
UserBlocks = Annotated[list[UserBlock], Field(fail_fast=True)]
AssistantBlock = Annotated[
    TextBlock
    | ThinkingBlock
    | ToolUseBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | CompactionBlock
    | DroppedBlock,
    Field(discriminator="type"),
]
AssistantBlocks = Annotated[list[AssistantBlock], Field(fail_fast=True)]
SystemBlock = Annotated[
    TextBlock | ToolAdditionBlock | ToolRemovalBlock, Field(discriminator="type")
]
SystemBlocks = Annotated[list[SystemBlock], Field(fail_fast=True)]


class UserMessage(RequestModel):
    """Text is short for one text block."""

    role: Literal["user"]
    content: str | UserBlocks


class AssistantMessage(RequestModel):
    """An earlier answer, as it was given."""

    role: Literal["assistant"]
    content: str | AssistantBlocks


class TurnConfig(RequestModel):
    """The effort from this message on."""

    effort: str | None = None


class SystemMessage(RequestModel):
    """Instructions in the course of a conversation. `clear_at`: they hold for the turn that they
    follow, and not for later ones."""

    role: Literal["system"]
    content: str | SystemBlocks = ""
    output_config: TurnConfig | None = None
    clear_at: Literal["next_user_message", "never"] | None = None


Message = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]


def tool_changes(messages: Iterable[Message]) -> Iterator[tuple[_ToolChange, str]]:
    """Yields the changes of the tools that a conversation has, in order, with their paths."""
    for index, message in enumerate(messages):
        if isinstance(message.content, str):
            continue
        for at, block in enumerate(message.content):
            path = f"messages.{index}.content.{at}"
            if isinstance(block, ToolAdditionBlock | ToolRemovalBlock):
                yield block, path
            elif isinstance(block, CompactionBlock):
                for number, change in enumerate(block.tool_changes or ()):
                    yield change, f"{path}.tool_changes.{number}"


def last_summary(messages: Sequence[Message]) -> tuple[int, int, str | None]:
    """Returns the indices of the message and of the block that follow the last summary of a
    conversation, and its text; (0, 0, None) without a summary."""
    for index in range(len(messages) - 1, -1, -1):
        content = messages[index].content
        if isinstance(content, str):
            continue
        for at in range(len(content) - 1, -1, -1):
            block = content[at]
            if isinstance(block, CompactionBlock) and block.content:
                return index, at + 1, block.content
    return 0, 0, None


def shown_blocks(messages: Sequence[Message]) -> Iterator[RequestModel]:
    """Yields the blocks after the last summary, and those of results."""
    begin, at, _ = last_summary(messages)
    for index, message in enumerate(messages[begin:]):
        if isinstance(message.content, str):
            continue
        for block in message.content[0 if index else at :]:
            yield block
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                yield from block.content


def left_out_blocks(messages: Iterable[Message]) -> Iterator[str]:
    """Yields the name of each block and member that the prompt does not have."""
    for message in messages:
        if isinstance(message.content, str):
            continue
        for block in message.content:
            yield from _left_out(block)
            if isinstance(block, ToolResultBlock) and isinstance(block.content, list):
                for inner in block.content:
                    yield from _left_out(inner)


def _left_out(block: RequestModel) -> Iterator[str]:
    match block:
        case TextBlock() | DocumentBlock() | SearchResultBlock() if block.citations:
            if not isinstance(block.citations, Citations) or block.citations.enabled:
                yield "messages.content.citations"
        case DroppedBlock() | ImageBlock() | BrowserStateBlock():
            yield f"messages.content.{block.type}"
        case ToolAdditionBlock(tool=McpReference()) | ToolRemovalBlock(tool=McpReference()):
            yield f"messages.content.{block.type}"
    if isinstance(block, DocumentBlock):
        source = block.source
        if isinstance(source, FileSource):
            yield "messages.content.document"
        elif isinstance(source, ContentSource) and not isinstance(source.content, str):
            for part in source.content:
                yield from _left_out(part)


def check_block_count(messages: object) -> None:
    """Raises InvalidParameter for too many blocks in a conversation that is not parsed yet."""
    if not isinstance(messages, list):
        return
    count = PartCount("messages")
    for message in messages[:MAX_MESSAGES]:
        for block in _counted(count, message):
            for inner in _counted(count, block):
                _counted(count, inner)


def _counted(count: PartCount, value: object) -> list[Any]:
    """Counts the lists of blocks that a message or block has. Returns the blocks."""
    if not isinstance(value, dict):
        return []
    source = value.get("source")
    count.add(value, "content", "tool_changes")
    count.add(source, "content")
    lists = [value.get("content"), source.get("content") if isinstance(source, dict) else None]
    return [block for blocks in lists if isinstance(blocks, list) for block in blocks]
