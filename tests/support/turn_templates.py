"""Chat templates that are strict about the order of roles, in the shape of the published ones."""

from __future__ import annotations

_GENERATION = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_CALLS = """
{%- for call in message.tool_calls or [] %}
    {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}"""

QWEN3 = (
    """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + message.content }}"""
    + _CALLS
    + """{{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
        {{- '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}"""
    + _GENERATION
)
QWEN35 = (
    """
{%- macro text(content) %}{% if content is string %}{{ content }}{% else %}
    {%- for item in content %}{{ item.text }}{% endfor %}{% endif %}{% endmacro %}
{%- if not messages %}{{ raise_exception('No messages provided.') }}{% endif %}
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + text(messages[0].content) | trim + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(found=false) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}{% set ns.found = true %}{% endif %}
{%- endfor %}
{%- if not ns.found %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- for message in messages %}
    {%- set content = text(message.content) | trim %}
    {%- if message.role == 'system' %}{% if not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}{% endif %}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + content }}"""
    + _CALLS
    + """{{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n'}}
    {%- else %}{{ raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}"""
    + _GENERATION
)
LLAMA3 = """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- message.tool_calls[0].function | tojson }}{{ '<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

_MISTRAL_TURNS = """
    {%- elif message.role == 'assistant' and not message.tool_calls %}
        {%- if not message.content %}
            {{- raise_exception('Assistant message must have content or tool calls.') }}
        {%- endif %}
        {{- message.content + '</s>' }}
    {%- elif message.role == 'assistant' %}{{ message.content }}
        {%- for call in message.tool_calls %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}
            {{- call.function.arguments | tojson }}
        {%- endfor %}{{ '</s>' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}"""
# Mistral Small 3.2: a late system message counts as a turn.
MISTRAL = (
    """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or message.tool_calls) %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('After the optional system message, conversation roles must '
                                'alternate user/assistant/user/assistant/...') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}"""
    + _MISTRAL_TURNS
    + """
    {%- else %}{{ raise_exception('Only user, assistant and tool roles are supported.') }}
    {%- endif %}
{%- endfor %}"""
)
# Ministral 3: a list of parts where there are any, and nothing but the three roles.
MINISTRAL = MISTRAL.replace(
    """
    {%- elif message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}""",
    "",
).replace("not (message.role == 'tool' or message.tool_calls)", "message.role != 'tool' and not "
          "message.tool_calls")  # fmt: skip
GEMMA2 = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
GEMMA3 = """
{{- bos_token }}
{%- set prefix = '' %}
{%- if messages[0].role == 'system' %}
    {%- if messages[0].content is string %}{% set prefix = messages[0].content + '\\n\\n' %}
    {%- else %}{% set prefix = messages[0].content[0].text + '\\n\\n' %}{% endif %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + (prefix if loop.first else '') }}
    {%- if message.content is string %}{{ message.content | trim }}
    {%- else %}{% for item in message.content %}{{ item.text | trim }}{% endfor %}{% endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""
# It leaves a late system message out.
GPT_OSS = """
{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' }}
{%- if messages[0].role == 'system' %}
    {{- '<|start|>developer<|message|># Instructions\\n\\n' + messages[0].content + '<|end|>' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|start|>assistant to=functions.' + message.tool_calls[0].function.name }}
        {{- '<|channel|>commentary json<|message|>' }}
        {{- message.tool_calls[0].function.arguments | tojson }}{{ '<|call|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions to=assistant<|message|>' + message.content | tojson + '<|end|>' }}
    {%- elif message.role == 'user' %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
APERTUS = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- '<|system_start|>' + messages[0].content + '<|system_end|>' }}
    {%- set messages = messages[1:] %}
{%- else %}{{ '<|system_start|>You are Apertus.<|system_end|>' }}
{%- endif %}
{%- set ns = namespace(in_assistant=false) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if ns.in_assistant %}{{ '<|assistant_end|>' }}{% endif %}
        {%- set ns.in_assistant = false %}
        {{- '<|user_start|>' + message.content + '<|user_end|>' }}
    {%- elif message.role == 'assistant' %}
        {%- if not ns.in_assistant %}{{ '<|assistant_start|>' }}{% endif %}
        {%- set ns.in_assistant = true %}{{ message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<|tools_prefix|>' + call.function | tojson + '<|tools_suffix|>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if not ns.in_assistant %}
            {{- raise_exception('Tool message outside of assistant') }}
        {%- endif %}{{ '[' + message.content + ']' }}
    {%- else %}{{ raise_exception('Invalid message role') }}
    {%- endif %}
{%- endfor %}
{%- if ns.in_assistant %}{{ '<|assistant_end|>' }}{% endif %}
{%- if add_generation_prompt %}{{ '<|assistant_start|>' }}{% endif %}"""
# The last of several system messages is the only one that is rendered.
DEEPSEEK_R1 = """
{%- set ns = namespace(system='') %}
{%- for message in messages %}{% if message.role == 'system' %}
    {%- set ns.system = message.content %}{% endif %}{% endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{ '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' %}
        {{- '<｜Assistant｜>' + message.content + '<｜end▁of▁sentence｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

TURN_TEMPLATES = {
    "qwen3": QWEN3,
    "qwen3.5": QWEN35,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "ministral": MINISTRAL,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "gpt-oss": GPT_OSS,
    "apertus": APERTUS,
    "deepseek-r1": DEEPSEEK_R1,
}
