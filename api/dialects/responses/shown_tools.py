"""From the tools of a request to the functions that a model is shown."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from api.dialects.responses.calls import (
    APPLY_PATCH,
    CUSTOM,
    FUNCTION,
    INPUT,
    LOCAL_SHELL,
    SHELL,
    TOOL_SEARCH,
    CallTarget,
    Item,
    flat_name,
    is_call,
)
from api.dialects.responses.tools import (
    ApplyPatchTool,
    CustomGrammarFormat,
    CustomTextFormat,
    CustomTool,
    FunctionTool,
    LocalShellTool,
    NamespaceTool,
    ShellTool,
    ToolSearchTool,
    is_hosted,
    tools_of,
)
from api.generation.protocol import RequestModel
from api.generation.regular_lark import regular_expression
from api.generation.tools import MAX_TOOLS, NO_PARAMETERS, Tool
from shared.messages import Grammar, InvalidParameter
from shared.text.grammar import lark_grammar, regex_grammar

MAX_NAMED = 16  # tools in the header of ignored parameters, one by one
Shown = tuple[Tool, CallTarget]  # a function, and the item that a call of it becomes


@dataclass(frozen=True, slots=True)
class ShownTools:
    """The functions that the model is shown: those of the request, and those that items add.

    `listed`: at the prompt's beginning. `found` has a text for each item that adds tools where it
    stands, by the item's index: with definitions of those that are not listed. `unkept` names the
    formats of custom tools whose grammar is not enforced.
    """

    shown: list[Shown]
    listed: list[Tool]
    found: Mapping[int, str]
    unkept: Sequence[str] = ()


def offered_tools(
    tools: Sequence[RequestModel], items: Sequence[Item], *, enforced: bool = True
) -> ShownTools:
    """Returns the functions of a request with `tools` and the whole conversation. `enforced`: the
    input of custom tools is kept to their grammars.

    What a server's search found has no place among the messages and is listed. So is everything
    where the request has no tools: templates show how tools are called where they list some.
    Raises InvalidParameter.
    """
    shown = [_kept_to(one, enforced) for one in shown_tools(tools, "tools")]
    unkept = [f"{tool.param}.format" for tool, target in shown if _is_unkept(tool, target)]
    if len(unkept) > MAX_NAMED:
        unkept = [*unkept[:MAX_NAMED], "tools.format"]
    known = {tool.name for tool, _ in shown}
    listed = [tool for tool, _ in shown]
    lists_all = not listed
    found: dict[int, str] = {}
    call_ids = set()
    for index, item in enumerate(items):
        if is_call(item):
            call_ids.add(item["call_id"])
        if item["type"] not in ("tool_search_output", "additional_tools"):
            continue
        texts = []
        has_place = not is_search_without_call(item, call_ids)
        for one in shown_tools(tools_of(item["tools"]), "input"):
            tool, target = _kept_to(one, enforced)
            is_new = tool.name not in known  # a search may find known tools
            known.add(tool.name)
            shown += [(tool, target)] if is_new else []
            unkept += ["input.tools.format"] if _is_unkept(tool, target) else []
            is_listed = is_new and (lists_all or not has_place)
            listed += [tool] if is_listed else []
            texts.append(tool.announcement(is_known=is_listed or not is_new))
        is_silent = item["type"] == "additional_tools" and lists_all
        found[index] = "" if is_silent else "\n".join(texts) or "No tools found."
    if len(shown) > MAX_TOOLS:
        raise InvalidParameter("tools", f"at most {MAX_TOOLS}, those in namespaces included")
    return ShownTools(shown, listed, found, list(dict.fromkeys(unkept)))


def is_search_without_call(item: Item, call_ids: Container[str]) -> bool:
    """Returns whether an item is the result of a search that the server made."""
    return item["type"] == "tool_search_output" and item.get("call_id", "") not in call_ids


def _kept_to(shown: Shown, enforced: bool) -> Shown:
    tool, target = shown
    if enforced or target.kind != CUSTOM or not tool.strict:
        return shown
    text = {**tool.parameters["properties"][INPUT]}
    del text["pattern"]
    parameters = {**tool.parameters, "properties": {INPUT: text}}
    return replace(tool, strict=False, parameters=parameters), target


def _is_unkept(tool: Tool, target: CallTarget) -> bool:
    """Returns whether a custom tool has a grammar, which its parameter describes, and is not kept
    to it."""
    is_custom = target.kind == CUSTOM and not tool.strict
    return is_custom and "description" in tool.parameters["properties"][INPUT]


def shown_tools(tools: Sequence[RequestModel], param: str) -> Iterator[Shown]:
    """Yields the functions that the model is shown. Raises InvalidParameter."""
    for index, tool in enumerate(tools):
        at = f"{param}.{index}"
        match tool:
            case NamespaceTool():
                for place, inner in enumerate(tool.tools):
                    yield _shown(inner, f"{at}.tools.{place}", tool)
            case FunctionTool() | CustomTool():
                yield _shown(tool, at, None)
            case LocalShellTool():
                yield _builtin(LOCAL_SHELL, "Runs a command.", _LOCAL_SHELL, at)
            case ShellTool() if not is_hosted(tool.model_dump()):
                yield _builtin(SHELL, _with_skills(tool.environment), _SHELL, at)
            case ApplyPatchTool():
                yield _builtin(APPLY_PATCH, _APPLY_PATCH_TEXT, _APPLY_PATCH, at)
            case ToolSearchTool() if tool.execution == "client":
                text = tool.description or "Searches for further tools."
                yield _builtin(TOOL_SEARCH, text, tool.parameters or NO_PARAMETERS, at)


def _shown(tool: FunctionTool | CustomTool, param: str, space: NamespaceTool | None) -> Shown:
    namespace = None if space is None else space.name
    description = tool.description
    if space is not None and space.description:
        description = f"{space.description}\n{description or ''}".strip()
    strict, parameters, kind, schema = False, NO_PARAMETERS, FUNCTION, "parameters"
    if isinstance(tool, CustomTool):
        kind, schema = CUSTOM, "format.definition"
        parameters, strict = _input_schema(tool.format, f"{param}.{schema}")
    else:
        parameters, strict = tool.parameters or NO_PARAMETERS, bool(tool.strict)
    name = flat_name(tool.name, namespace)
    shown = Tool(
        name=name,
        description=description,
        parameters=parameters,
        strict=strict,
        param=param,
        schema_param=f"{param}.{schema}",
    )
    return shown, CallTarget(kind, tool.name, namespace)


def _builtin(kind: str, text: str, parameters: Mapping[str, Any], param: str) -> Shown:
    tool = Tool(
        name=kind,
        description=text,
        parameters=parameters,
        strict=False,
        param=param,
        schema_param=f"{param}.parameters",
    )
    return tool, CallTarget(kind, kind, None)


def _input_schema(
    form: CustomTextFormat | CustomGrammarFormat | None, param: str
) -> tuple[Mapping[str, Any], bool]:
    """Returns the parameters of a custom tool, and whether they are enforced: a grammar is, that a
    regular expression can express."""
    text: dict[str, Any] = {"type": "string"}
    pattern = None
    if isinstance(form, CustomGrammarFormat):
        name = "Lark grammar" if form.syntax == "lark" else "regular expression"
        text["description"] = f"Text that matches this {name}:\n{form.definition}"
        pattern = _pattern(form, param)
    if pattern is not None:
        text["pattern"] = f"^(?:{pattern})$"
    schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
    return {**schema, "additionalProperties": False}, pattern is not None


def _pattern(form: CustomGrammarFormat, param: str) -> str | None:
    """Returns a regular expression of the whole input. Raises InvalidParameter for a definition
    that is too long."""
    if form.syntax == "regex":
        regex_grammar(form.definition, param)
        return form.definition
    lark_grammar(form.definition, param)
    return regular_expression(form.definition)


_STRINGS = {"type": "array", "items": {"type": "string"}}
_MS = {"type": "integer", "description": "Milliseconds."}
_LOCAL_SHELL: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "command": {**_STRINGS, "description": "The program and its arguments."},
        "working_directory": {"type": "string"},
        "timeout_ms": _MS,
        "env": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["command"],
    "additionalProperties": False,
}
_SHELL: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "commands": {**_STRINGS, "description": "Commands of the shell, in order."},
        "timeout_ms": _MS,
        "max_output_length": {"type": "integer", "description": "Characters of output to keep."},
    },
    "required": ["commands"],
    "additionalProperties": False,
}
_APPLY_PATCH_TEXT = (
    "Creates, updates or deletes one file. 'diff' is a V4A diff: lines that begin with '+' are "
    "added, with '-' removed, with a space kept, and '@@' begins a section. A new file has only "
    "lines that begin with '+'; a deletion has no diff."
)
_APPLY_PATCH: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
        "path": {"type": "string"},
        "diff": {"type": "string"},
    },
    "required": ["type", "path"],
    "additionalProperties": False,
}


def _with_skills(environment: Mapping[str, Any] | None) -> str:
    text = "Runs commands in a shell."
    skills = (environment or {}).get("skills")
    for skill in skills if isinstance(skills, list) else ():
        if isinstance(skill, dict):
            parts = (str(skill.get(part, "")) for part in ("name", "description", "path"))
            text += "\nSkill {}: {} ({})".format(*parts)
    return text


def custom_grammars(tools: Sequence[RequestModel], param: str) -> Iterator[tuple[Grammar, str]]:
    """Yields the grammars of custom tools, each with the member that has it."""
    for index, tool in enumerate(tools):
        at = f"{param}.{index}"
        if isinstance(tool, NamespaceTool):
            yield from custom_grammars(tool.tools, f"{at}.tools")
        elif isinstance(tool, CustomTool) and isinstance(tool.format, CustomGrammarFormat):
            at = f"{at}.format.definition"
            make = lark_grammar if tool.format.syntax == "lark" else regex_grammar
            yield make(tool.format.definition, at), at


# The tool that a choice names.


def chosen_name(shown: Sequence[Shown], name: str, namespace: str | None, param: str) -> str:
    """Returns the name that the model knows a tool by; `name` as it is for an unknown one."""
    if namespace is not None:
        return flat_name(name, namespace)
    if any(tool.name == name for tool, _ in shown):
        return name
    found = [tool.name for tool, target in shown if target.name == name]
    if len(found) > 1:
        raise InvalidParameter(param, f"is ambiguous: it matches {', '.join(found[:8])}")
    return found[0] if found else name
