"""Chat templates of many families, written for tests in the shape of the published ones.

They put the first system message first and bare, as those of `tests.support.tool_models` do.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.text.tool_formats import ReasoningFormat, ToolFormat

_SYSTEM = """\
{%- if messages[0].role == 'system' %}{{ messages[0].content + '<|im_end|>\\n' }}
{%- set messages = messages[1:] %}{% endif %}"""
_TOOLS = "{%- if tools %}{{ '[TOOLS]' + (tools | tojson) + '[/TOOLS]' }}{% endif %}"
_TURN = "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
_GENERATION = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def _template(calls: str, *, generation: str = _GENERATION, results: str = _TURN) -> str:
    """`calls`: writes message.tool_calls, behind the content."""
    return f"""{_SYSTEM}{_TOOLS}
{{%- for message in messages %}}
    {{%- if message.tool_calls %}}
        {{{{- '<|im_start|>assistant\\n' + message.content }}}}
{calls}
        {{{{- '<|im_end|>\\n' }}}}
    {{%- elif message.role == 'tool' %}}{results}
    {{%- else %}}{_TURN}
    {{%- endif %}}
{{%- endfor %}}{generation}"""


def _each(before: str, call: str, separator: str, after: str) -> str:
    """A template's loop over the calls; `f` is a call's function."""
    return f"""
{{{{- '{before}' }}}}
{{%- for call in message.tool_calls %}}{{% set f = call.function %}}
    {{{{- {call} }}}}{{% if not loop.last %}}{{{{ '{separator}' }}}}{{% endif %}}
{{%- endfor %}}{{{{- '{after}' }}}}"""


_OBJECT = "'{\"name\": \"' + f.name + '\", \"arguments\": ' + (f.arguments | tojson) + '}'"
_SHORT_IDS = """
{%- for call in message.tool_calls %}{% if call.id | length != 9 %}
    {{- raise_exception('Tool call IDs have nine characters!') }}{% endif %}
{%- endfor %}"""
_SHORT_ID = (
    "{%- if message.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs have nine characters!') }}{% endif %}"
    "{{- '[TOOL_RESULTS]' + message.content + '[CALL]' + message.tool_call_id }}"
)

MISTRAL_LIST = _template(
    _SHORT_IDS
    + _each("[TOOL_CALLS] [", _OBJECT[:-4] + "', \"id\": \"' + call.id + '\"}'", ", ", "]"),
    results=_SHORT_ID,
)
MISTRAL_NAMED = _template(
    _SHORT_IDS + _each("", "'[TOOL_CALLS]' + f.name + '[ARGS]' + (f.arguments | tojson)", "", ""),
    results=_SHORT_ID,
)
MISTRAL_THINKING = MISTRAL_NAMED + "{#- [THINK]...[/THINK] stands before an answer -#}"
DEEPSEEK_V3 = _template(
    _each(
        "<｜tool▁calls▁begin｜>",
        "'<｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' + f.name + '\\n```json\\n' "
        "+ f.arguments + '\\n```<｜tool▁call▁end｜>'",
        "\\n",
        "<｜tool▁calls▁end｜>",
    )
)
DEEPSEEK_R1 = DEEPSEEK_V3.replace(
    "assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}"
)
DEEPSEEK_V31 = _template(
    _each(
        "<｜tool▁calls▁begin｜>",
        "'<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>'",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    generation=(
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
        "{{ '<think>' if thinking else '</think>' }}{% endif %}"
    ),
)


def _dsml(section: str, space: str) -> str:
    """A template of DeepSeek's later models; the arguments of a call may be JSON in a text."""
    mark = "｜DSML｜"
    pairs = f"""
    {{%- for key, value in f.arguments.items() %}}
        {{{{- '<{mark}{space}parameter name="' + key + '" string="' }}}}
        {{{{- 'true">' + value if value is string else 'false">' + (value | tojson) }}}}
        {{{{- '</{mark}{space}parameter>\\n' }}}}
    {{%- endfor %}}"""
    opening = f"<{mark}{space}invoke name=\"' + f.name + '\">\\n"
    calls = _written(opening, pairs, f"</{mark}{space}invoke>\\n")
    return _template(
        f"{{{{- '\\n\\n<{mark}{section}>\\n' }}}}{calls}{{{{- '</{mark}{section}>' }}}}"
    )


KIMI_K2 = _template(
    _each(
        "<|tool_calls_section_begin|>",
        "'<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' "
        "+ (f.arguments if f.arguments is string else f.arguments | tojson) + '<|tool_call_end|>'",
        "",
        "<|tool_calls_section_end|>",
    ),
    results="{{- '## Return of ' + message.tool_call_id + '\\n' + message.content }}",
)
DEEPSEEK_THINKS = "{#- <think>...</think> stands before an answer -#}"
GRANITE = _template(
    "{{- '<|tool_call|>' + (message.tool_calls | map(attribute='function') | list | tojson) }}"
)
GRANITE_THINKING = GRANITE + (
    "{#- Write your thoughts after 'Here is my thought process:' and write your response after "
    "'Here is my response:' -#}"
)
GRANITE33 = GRANITE + (
    "{#- Write your thoughts between <think></think> and the answer between "
    "<response></response> -#}"
)
PHI4_MINI = (
    _template(_each("", _OBJECT, ",", ""))
    .replace("[TOOLS]", "[TOOLS]Call as functools[{'name': ...}], all in one list.")
    .replace("functools[{'name': ...}]", "functools[...]")
)
_ACTION = (
    '\'{"tool_call_id": "\' + loop.index0 | string + \'", "tool_name": "\' + f.name '
    "+ '\", \"parameters\": ' + (f.arguments | tojson) + '}'"
)
COHERE = _template(_each("<|START_ACTION|>[", _ACTION, ", ", "]<|END_ACTION|>")) + (
    "{#- <|START_THINKING|>...<|END_THINKING|> stands before an answer -#}"
)
NEMOTRON = _template(_each("<TOOLCALL>[", _OBJECT, ", ", "]</TOOLCALL>"))
HUNYUAN = _template(_each("<tool_calls>[", _OBJECT, ", ", "]</tool_calls>")) + (
    "{#- <think>...</think><answer>...</answer> -#}"
)
_PAIRS = """
    {{%- for key, value in f.arguments.items() %}}
        {{{{- '{before}' + key + '{between}' }}}}
        {{{{- (value if value is string else (value | tojson)) + '{after}' }}}}
    {{%- endfor %}}"""


def _written(opening: str, pairs: str, closing: str) -> str:
    """A template's loop over calls whose arguments are written one by one."""
    return f"""
{{%- for call in message.tool_calls %}}{{% set f = call.function %}}
    {{{{- '{opening}' }}}}{pairs}{{{{- '{closing}' }}}}
{{%- endfor %}}"""


GLM = (
    _template(
        _written(
            "\\n<tool_call>' + f.name + '\\n",
            _PAIRS.format(
                before="<arg_key>", between="</arg_key>\\n<arg_value>", after="</arg_value>\\n"
            ),
            "</tool_call>",
        )
    )
    + "{#- <think>...</think> stands before an answer -#}"
)
QWEN3_CODER = _template(
    _written(
        "\\n<tool_call>\\n<function=' + f.name + '>\\n",
        _PAIRS.format(before="<parameter=", between=">\\n", after="\\n</parameter>\\n"),
        "</function>\\n</tool_call>",
    )
)
SEED_OSS = (
    _template(
        _written(
            "\\n<seed:tool_call>\\n<function=' + f.name + '>\\n",
            _PAIRS.format(before="<parameter=", between=">", after="</parameter>\\n"),
            "</function>\\n</seed:tool_call>",
        )
    )
    + "{#- <seed:think>...</seed:think> stands before an answer -#}"
)
MINIMAX = _template(
    "{{- '\\n<minimax:tool_call>\\n' }}"
    + _written(
        "<invoke name=\"' + f.name + '\">\\n",
        _PAIRS.format(before='<parameter name="', between='">', after="</parameter>\\n"),
        "</invoke>\\n",
    )
    + "{{- '</minimax:tool_call>' }}"
)
LLAMA4 = _template(
    """
{{- '[' }}
{%- for call in message.tool_calls %}{% set f = call.function %}
    {{- f.name + '(' }}
    {%- for key, value in f.arguments.items() %}
        {{- key + '=' + (value | tojson) }}{% if not loop.last %}{{ ', ' }}{% endif %}
    {%- endfor %}
    {{- ')' }}{% if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %}{{- ']' }}"""
)
_GEMMA = """
{{%- for call in message.tool_calls %}}{{% set f = call.function %}}
    {{{{- '{opening}call:' + f.name + '{{' }}}}
    {{%- for key, value in f.arguments.items() %}}
        {{{{- key + ':' }}}}
        {{{{- '{quote}' + value + '{quote}' if value is string else value | tojson }}}}
        {{%- if not loop.last %}}{{{{ ',' }}}}{{% endif %}}
    {{%- endfor %}}
    {{{{- '}}' + '{closing}' }}}}
{{%- endfor %}}"""
FUNCTIONGEMMA = _template(
    _GEMMA.format(opening="<start_function_call>", quote="<escape>", closing="<end_function_call>")
)
GEMMA4 = (
    _template(_GEMMA.format(opening="<|tool_call>", quote='<|"|>', closing="<tool_call|>"))
    + "{#- <|channel>thought ... <channel|> stands before an answer -#}"
)
HARMONY = (
    _SYSTEM
    + _TOOLS
    + """\
{{- 'Reasoning: ' + (reasoning_effort if reasoning_effort is defined else 'medium') }}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {%- if message.content and message.thinking %}
            {{- raise_exception('Cannot pass both content and thinking with tool calls!') }}
        {%- elif message.content or message.thinking %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
            {{- (message.content or message.thinking) + '<|end|>' }}
        {%- endif %}
        {%- set f = message.tool_calls[0].function %}{% set last.name = f.name %}
        {{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
        {{- (f.arguments | tojson) + '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- (message.content | tojson) + '<|end|>' }}
    {%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
)


@dataclass(frozen=True)
class Family:
    """A template, what is found in it, and the markers of the family's vocabulary."""

    template: str
    tool_format: ToolFormat
    reasoning_format: ReasoningFormat | None = None
    markers: tuple[str, ...] = ()  # added tokens that are not special
    special_markers: tuple[str, ...] = ()


_DEEPSEEK_MARKERS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<think>", "</think>"),
)
_DSML_MARKERS = ("｜DSML｜", "<think>", "</think>")
_KIMI_MARKERS = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)

FAMILIES = {
    "mistral-list": Family(
        MISTRAL_LIST, ToolFormat.MISTRAL, None, (), ("[TOOL_CALLS]", "[TOOL_RESULTS]")
    ),
    "mistral-named": Family(
        MISTRAL_NAMED, ToolFormat.MISTRAL, None, (), ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    ),
    "magistral": Family(
        MISTRAL_THINKING,
        ToolFormat.MISTRAL,
        ReasoningFormat.MISTRAL,
        (),
        ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    ),
    "deepseek-v3": Family(DEEPSEEK_V3, ToolFormat.DEEPSEEK_V3, None, _DEEPSEEK_MARKERS),
    "deepseek-r1": Family(
        DEEPSEEK_R1, ToolFormat.DEEPSEEK_V3, ReasoningFormat.THINK, _DEEPSEEK_MARKERS
    ),
    "deepseek-v31": Family(
        DEEPSEEK_V31, ToolFormat.DEEPSEEK_V31, ReasoningFormat.THINK, _DEEPSEEK_MARKERS
    ),
    "deepseek-v32": Family(
        _dsml("function_calls", "") + DEEPSEEK_THINKS,
        ToolFormat.DEEPSEEK_V32,
        ReasoningFormat.THINK,
        _DSML_MARKERS,
    ),
    "deepseek-v4": Family(_dsml("tool_calls", ""), ToolFormat.DEEPSEEK_V4),
    "deepseek-v41": Family(_dsml(" calls", " "), ToolFormat.DEEPSEEK_V41, None, _DSML_MARKERS[:1]),
    "kimi-k2": Family(KIMI_K2, ToolFormat.KIMI_K2, None, _KIMI_MARKERS),
    "granite": Family(GRANITE, ToolFormat.GRANITE, None, (), ("<|tool_call|>",)),
    "granite-thinking": Family(
        GRANITE_THINKING, ToolFormat.GRANITE, ReasoningFormat.GRANITE, (), ("<|tool_call|>",)
    ),
    "granite33": Family(
        GRANITE33, ToolFormat.GRANITE, ReasoningFormat.GRANITE33, (), ("<|tool_call|>",)
    ),
    "phi4-mini": Family(PHI4_MINI, ToolFormat.PHI4_MINI_JSON),
    "cohere": Family(
        COHERE,
        ToolFormat.COHERE_COMMAND3,
        ReasoningFormat.COHERE_COMMAND3,
        (),
        (
            *("<|START_ACTION|>", "<|END_ACTION|>"),
            *("<|START_THINKING|>", "<|END_THINKING|>"),
        ),
    ),
    "glm": Family(
        GLM,
        ToolFormat.GLM45,
        ReasoningFormat.THINK,
        (
            *("<tool_call>", "</tool_call>", "<think>", "</think>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
    ),
    "qwen3-coder": Family(
        QWEN3_CODER, ToolFormat.QWEN3_CODER, None, ("<tool_call>", "</tool_call>")
    ),
    "seed-oss": Family(
        SEED_OSS,
        ToolFormat.SEED_OSS,
        ReasoningFormat.SEED_OSS,
        ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
    ),
    "nemotron": Family(NEMOTRON, ToolFormat.NEMOTRON_JSON),
    "minimax": Family(
        MINIMAX, ToolFormat.MINIMAX_M2, None, ("<minimax:tool_call>", "</minimax:tool_call>")
    ),
    "llama4": Family(LLAMA4, ToolFormat.PYTHONIC, None, (), ("<|python_start|>", "<|python_end|>")),
    "functiongemma": Family(
        FUNCTIONGEMMA,
        ToolFormat.FUNCTIONGEMMA,
        None,
        (),
        ("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    "gemma4": Family(
        GEMMA4,
        ToolFormat.GEMMA4,
        ReasoningFormat.GEMMA4,
        (),
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    ),
    "gpt-oss": Family(
        HARMONY,
        ToolFormat.OPENAI,
        ReasoningFormat.OPENAI,
        (),
        (
            *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
            *("<|end|>", "<|call|>", "<|return|>"),
        ),
    ),
    "hunyuan": Family(HUNYUAN, ToolFormat.HUNYUAN_A13B, ReasoningFormat.HUNYUAN_A13B),
}
