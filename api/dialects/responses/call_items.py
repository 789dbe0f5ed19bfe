"""The JSON of input items that are calls of a client's tools, or their results."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypeVar

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from api.dialects.responses.tools import ResponseTools
from api.generation.messages import MEMBERS
from api.generation.schemas import WholeNumber

ItemT = TypeVar("ItemT")
Status = Literal["in_progress", "completed", "incomplete"]
NonEmpty = Annotated[list[ItemT], Field(fail_fast=True, min_length=1)]
_Strings = Annotated[list[str], Field(fail_fast=True)]


@with_config(MEMBERS)
class InputTextPart(TypedDict):
    """Text. The SDKs send the parts of an output back with the other members."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: NotRequired[Any]
    logprobs: NotRequired[Any]
    parsed: NotRequired[Any]


@with_config(ConfigDict(extra="ignore", strict=True))
class MediaPart(TypedDict):
    """A part of a result that is not text: a text that names it replaces it."""

    type: Literal["input_image", "input_file", "input_audio"]


_OutputPart = Annotated[InputTextPart | MediaPart, Field(discriminator="type")]


@with_config(MEMBERS)
class _Labelled(TypedDict):
    """Members of items without meaning for a model."""

    id: NotRequired[str]
    status: NotRequired[Status]
    caller: NotRequired[Any]
    created_by: NotRequired[Any]


@with_config(MEMBERS)
class InputFunctionCall(_Labelled):
    """A call of a function by the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str
    parsed_arguments: NotRequired[Any]


@with_config(MEMBERS)
class InputFunctionCallOutput(_Labelled):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | NonEmpty[_OutputPart]
    name: NotRequired[str]
    namespace: NotRequired[str]


@with_config(MEMBERS)
class InputCustomToolCall(_Labelled):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: NotRequired[str]
    input: str


@with_config(MEMBERS)
class InputCustomToolCallOutput(_Labelled):
    """The result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    output: str | NonEmpty[_OutputPart]
    name: NotRequired[str]


@with_config(MEMBERS)
class LocalShellAction(TypedDict):
    """A command of a local shell."""

    type: Literal["exec"]
    command: _Strings
    env: NotRequired[dict[str, str]]
    timeout_ms: NotRequired[WholeNumber]
    user: NotRequired[str]
    working_directory: NotRequired[str]


@with_config(MEMBERS)
class InputLocalShellCall(_Labelled):
    """A call of the local shell."""

    type: Literal["local_shell_call"]
    call_id: str
    action: LocalShellAction


@with_config(MEMBERS)
class InputLocalShellCallOutput(_Labelled):
    """The result of a call of the local shell. The SDKs send the call's id as `id`."""

    type: Literal["local_shell_call_output"]
    call_id: NotRequired[str]
    output: str


@with_config(MEMBERS)
class ShellAction(TypedDict):
    """Commands of a shell."""

    commands: _Strings
    timeout_ms: NotRequired[WholeNumber]
    max_output_length: NotRequired[WholeNumber]


@with_config(MEMBERS)
class InputShellCall(_Labelled):
    """A call of a shell."""

    type: Literal["shell_call"]
    call_id: str
    action: ShellAction
    environment: NotRequired[Any]


@with_config(MEMBERS)
class ShellOutcome(TypedDict):
    """How a command ended."""

    type: Literal["exit", "timeout"]
    exit_code: NotRequired[WholeNumber]


@with_config(MEMBERS)
class ShellOutput(TypedDict):
    """What one command wrote."""

    stdout: str
    stderr: str
    outcome: ShellOutcome
    created_by: NotRequired[Any]


@with_config(MEMBERS)
class InputShellCallOutput(_Labelled):
    """The result of a call of a shell."""

    type: Literal["shell_call_output"]
    call_id: str
    output: Annotated[list[ShellOutput], Field(fail_fast=True)]
    max_output_length: NotRequired[WholeNumber]


@with_config(MEMBERS)
class PatchOperation(TypedDict):
    """A change of one file."""

    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: NotRequired[str]


@with_config(MEMBERS)
class InputApplyPatchCall(_Labelled):
    """A call that changes a file."""

    type: Literal["apply_patch_call"]
    call_id: str
    operation: PatchOperation


@with_config(MEMBERS)
class InputApplyPatchCallOutput(TypedDict):
    """The result of a call that changes a file."""

    type: Literal["apply_patch_call_output"]
    id: NotRequired[str]
    call_id: str
    status: Literal["completed", "failed"]
    output: NotRequired[str]
    caller: NotRequired[Any]
    created_by: NotRequired[Any]


@with_config(MEMBERS)
class InputToolSearchCall(_Labelled):
    """A search of the client's for further tools."""

    type: Literal["tool_search_call"]
    call_id: NotRequired[str]
    execution: NotRequired[Literal["client", "server"]]
    arguments: Any


@with_config(MEMBERS)
class InputToolSearchOutput(_Labelled):
    """The tools that a search found. They are the request's from then on."""

    type: Literal["tool_search_output"]
    call_id: NotRequired[str]
    execution: NotRequired[Literal["client", "server"]]
    tools: ResponseTools


@with_config(MEMBERS)
class InputAdditionalTools(TypedDict):
    """Tools that are the request's from then on."""

    type: Literal["additional_tools"]
    id: NotRequired[str]
    role: Literal["developer"]
    tools: ResponseTools


InputCallItem = (
    InputFunctionCall
    | InputFunctionCallOutput
    | InputCustomToolCall
    | InputCustomToolCallOutput
    | InputLocalShellCall
    | InputLocalShellCallOutput
    | InputShellCall
    | InputShellCallOutput
    | InputApplyPatchCall
    | InputApplyPatchCallOutput
    | InputToolSearchCall
    | InputToolSearchOutput
    | InputAdditionalTools
)

# type of an item -> its id's prefix, and the members that are kept
KEPT_MEMBERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "function_call": ("fc", ("call_id", "name", "namespace", "arguments")),
    "function_call_output": ("fco", ("call_id", "output")),
    "custom_tool_call": ("ctc", ("call_id", "name", "namespace", "input")),
    "custom_tool_call_output": ("ctco", ("call_id", "output")),
    "local_shell_call": ("lsh", ("call_id", "action")),
    "local_shell_call_output": ("lsho", ("call_id", "output")),
    "shell_call": ("sh", ("call_id", "action", "environment")),
    "shell_call_output": ("sho", ("call_id", "output", "max_output_length")),
    "apply_patch_call": ("apc", ("call_id", "operation")),
    "apply_patch_call_output": ("apco", ("call_id", "output", "status")),
    "tool_search_call": ("tsc", ("call_id", "execution", "arguments")),
    "tool_search_output": ("tso", ("call_id", "execution", "tools")),
    "additional_tools": ("at", ("role", "tools")),
}
