"""Chat templates in the shape of the field's formats, written for these tests.

Each covers constructs that published templates of its format rely on: whitespace control, loop
variables, namespaces, macros, filters, slices, string methods, JSON, dates and refusals.
"""

from __future__ import annotations

CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN25_TOOLS = """\
{%- set default_system = 'You are a helpful assistant.' %}
{%- set has_system = messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' ~ (messages[0].content if has_system else default_system) }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n\\nSignatures are within <tools></tools>:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nAnswer with {"name": <name>, "arguments": <object>}' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first)
           or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{ '\\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{% set call = call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{ call.name }}{{ '", "arguments": ' -}}
            {{ call.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN3_THINKING = """\
{%- set ns = namespace(searching=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string
           and not (message.content.startswith('<tool_response>')
                    and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last_query = index %}
    {%- endif %}
{%- endfor %}
{%- if messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set reasoning = reasoning.lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- elif message.role != 'system' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

LLAMA2 = """\
{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}\
{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}\
{% set system = false %}{% endif %}\
{% for message in rest %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate user/assistant/user/...') }}{% endif %}\
{% if loop.index0 == 0 and system != false %}\
{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}\
{% else %}{% set content = message['content'] %}{% endif %}\
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}\
{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""

LLAMA3 = """\
{% for message in messages %}
{% set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' %}
{% set text = text + message['content'] | trim + '<|eot_id|>' %}
{% if loop.index0 == 0 %}{% set text = bos_token + text %}{% endif %}
{{ text }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

LLAMA31_TOOLS = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{% set date_string = strftime_now('%d %b %Y') %}
    {%- else %}{% set date_string = '26 Jul 2024' %}{% endif %}
{%- endif %}
{%- if not tools is defined %}{% set tools = none %}{% endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system_message = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools is not none %}{{ 'Environment: ipython\\n' }}{% endif %}
{{- 'Today Date: ' + date_string + '\\n\\n' + system_message + '<|eot_id|>' }}
{%- if tools is not none %}
    {%- if messages | length == 0 %}{{ raise_exception('No first user message') }}{% endif %}
    {%- set first = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nAnswer with JSON.\\n\\n' }}
    {%- for t in tools %}{{ t | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('This model takes one tool call at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", ' }}
        {{- '"parameters": ' }}{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable and message.content is not
               string %}{{ message.content | tojson }}
        {%- else %}{{ message.content }}{% endif %}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """\
{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}\
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}\
{% endfor %}"""

MISTRAL_V3_TOOLS = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set loop_messages = messages[1:] %}{% else %}{% set loop_messages = messages %}{% endif %}
{%- set user_messages = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message.role in ['user', 'assistant'] and message.tool_calls is not defined %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('After the optional system message, roles must alternate') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and message == user_messages[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {%- set function = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in function.items() if key != 'return' %}
                    {%- if val is string %}{{ '"' + key + '": "' + val + '"' }}
                    {%- else %}{{ '"' + key + '": ' + val | tojson }}{% endif %}
                    {%- if not loop.last %}{{ ', ' }}{% endif %}
                {%- endfor %}
                {{- '}}' }}{% if not loop.last %}{{ ', ' }}{% else %}{{ ']' }}{% endif %}
            {%- endfor %}
            {{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}{{ '[INST] ' + message.content + '[/INST]' }}{% endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if tool_call.id is not defined or tool_call.id | length != 9 %}
                {{- raise_exception('Tool call ids must have 9 characters!') }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{ ', ' }}{% else %}{{ ']' + eos_token }}{% endif %}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}{{ ' ' + message.content | trim + eos_token }}
    {%- elif message.role in ['tool_results', 'tool'] %}
        {%- set content = message.content.content if message.content.content is defined
                          else message.content %}
        {{- '[TOOL_RESULTS] {"content": ' + content | string + ', "call_id": "'
            + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{ raise_exception('Unknown role: ' ~ message.role) }}{% endif %}
{%- endfor %}"""

GEMMA2 = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}{% if message['role'] == 'assistant' %}{% set role = 'model' %}\
{% else %}{% set role = message['role'] %}{% endif %}\
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

GEMMA3_PARTS = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception('Invalid content type') }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

PHI3 = """\
{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>\\n' + \
message['content'] + '<|end|>\\n' }}{% elif message['role'] == 'user' %}{{ '<|user|>\\n' + \
message['content'] + '<|end|>\\n' }}{% elif message['role'] == 'assistant' %}\
{{ '<|assistant|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"""

PHI4_MINI = """\
{% for message in messages %}
{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] }}
{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

ZEPHYR = """\
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

VICUNA = """\
{%- if messages[0].role != 'system' -%}
A chat between a curious user and an assistant.{{ ' ' }}
{%- endif -%}
{%- for message in messages -%}
    {%- if loop.first and message.role == 'system' -%}{{ message.content.strip() ~ ' ' }}
    {%- elif message.role == 'user' -%}USER: {{ message.content.strip() + ' ' }}
    {%- else -%}ASSISTANT: {{ message.content.strip() + eos_token }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}ASSISTANT:{%- endif -%}"""

ALPACA = """\
{{ (messages | selectattr('role', 'equalto', 'system') | list | last).content | trim
   if (messages | selectattr('role', 'equalto', 'system') | list) else '' }}

{% for message in messages %}
{% if message['role'] == 'user' %}
### Instruction:
{{ message['content'] | trim -}}
{% if not loop.last %}


{% endif %}
{% elif message['role'] == 'assistant' %}
### Response:
{{ message['content'] | trim -}}
{% if not loop.last %}


{% endif %}
{% endif %}
{% endfor %}
{% if add_generation_prompt and messages[-1]['role'] != 'assistant' %}


### Response:
{% endif %}"""

COMMAND_R_TOOLS = """\
{%- macro param_type(spec) -%}
    {%- set types = {'string': 'str', 'integer': 'int', 'boolean': 'bool'} -%}
    {{- types.get(spec.type, spec.type) -}}
{%- endmacro -%}
{%- macro signature(function) -%}
def {{ function.name }}(
    {%- for name, spec in function.parameters.properties.items() -%}
        {{- name }}: {{ param_type(spec) if name in function.parameters.required
                        else 'Optional[' ~ param_type(spec) ~ '] = None' -}}
        {%- if not loop.last %}, {% endif -%}
    {%- endfor -%}
    ) -> List[Dict]:
    \"\"\"{{ function.description }}\"\"\"
    pass
{%- endmacro -%}
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set system_message = messages[0]['content'] -%}{%- set turns = messages[1:] -%}
{%- else -%}{%- set system_message = 'You are Command.' -%}{%- set turns = messages -%}{%- endif -%}
{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' ~ system_message }}
{%- if tools %}
{{- '\\n## Available Tools\\n' }}
{%- for tool in tools %}
```python
{{ signature(tool.function) }}
```
{%- endfor %}
{%- endif %}
{%- if documents %}
{{- '<results>' }}
{%- for document in documents %}
{{ '\\nDocument: ' }}{{ loop.index0 }}
{%- for key, value in document.items() %}{{ '\\n' ~ key ~ ': ' ~ value }}{% endfor %}
{%- endfor %}
{{- '</results>' }}
{%- endif %}
{{- '<|END_OF_TURN_TOKEN|>' }}
{%- for message in turns %}
    {%- set content = message['content'] or '' %}
    {%- if message.role | lower == 'user' %}
        {{- '<|START_OF_TURN_TOKEN|><|USER_TOKEN|>' ~ content.strip() ~ '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message.role | lower in ['assistant', 'chatbot'] %}
        {{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' ~ content.strip() }}
        {%- if message.tool_calls %}
            {{- 'Action: ```json\\n[\\n' }}
            {%- for call in message.tool_calls %}
                {{- {'tool_name': call.function.name, 'parameters': call.function.arguments}
                    | tojson(indent=4) | indent(4, first=true) }}
                {%- if not loop.last %}{{ ',\\n' }}{% endif %}
            {%- endfor %}
            {{- '\\n]```' }}
        {%- endif %}
        {{- '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><results>\\n' ~ content ~ '</results>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

DEEPSEEK_R1 = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, system_prompt='') %}\
{%- for message in messages %}{%- if message['role'] == 'system' %}\
{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}\
{{ bos_token }}{{ ns.system_prompt }}\
{%- for message in messages %}\
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}\
{{ '<｜User｜>' + message['content'] }}{%- endif %}\
{%- if message['role'] == 'assistant' and message['tool_calls'] %}{%- set ns.is_tool = false -%}\
{%- for tool in message['tool_calls'] %}{%- if loop.first %}\
{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{%- else %}{{ '\\n' }}{%- endif %}\
{{ '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' \
+ '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>' }}\
{%- endfor %}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}{%- endif %}\
{%- if message['role'] == 'assistant' and not message['tool_calls'] %}\
{%- if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' }}{%- set ns.is_tool = false -%}{%- endif %}\
{% set content = message['content'] %}{% if '</think>' in content %}\
{% set content = content.split('</think>')[-1] %}{% endif %}\
{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}\
{%- if message['role'] == 'tool' %}{%- if not ns.is_tool %}{{ '<｜tool▁outputs▁begin｜>' }}\
{%- endif %}{%- set ns.is_tool = true -%}\
{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}\
{%- endfor -%}\
{% if ns.is_tool %}{{ '<｜tool▁outputs▁end｜>' }}{% endif %}\
{% if add_generation_prompt and not ns.is_tool %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""

GRANITE = """\
{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {%- if not loop.last %}{{- '\\n\\n' }}{%- endif %}
    {%- endfor %}
    {{- '<|end_of_text|>\\n' }}
{%- endif %}
{%- for message in messages if message['role'] != 'system' or loop.first %}
    {%- set role = 'tool_response' if message['role'] == 'tool' else message['role'] %}
    {{- '<|start_of_role|>' + role + '<|end_of_role|>' + (message['content'] or '') }}
    {%- if message.tool_calls %}{{ '<|tool_call|>' + message.tool_calls | map(attribute='function')
                                   | list | tojson }}{% endif %}
    {{- '<|end_of_text|>\\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}"""

SMOLLM3_GENERATION = """\
{#- a default for the mode of reasoning -#}
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = '/think' if enable_thinking else '/no_think' -%}
{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content -%}
    {%- if '/no_think' in system -%}{%- set mode = '/no_think' -%}{%- endif -%}
    {%- set custom = system.replace('/no_think', '').replace('/think', '').rstrip() -%}
{%- endif -%}
<|im_start|>system
## Metadata

Today: {{ strftime_now('%d %B %Y') }}
Mode: {{ mode }}

{% if custom is defined and custom %}{{ custom }}{% else %}You are SmolLM.{% endif %}<|im_end|>
{% for message in messages -%}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role == 'user' -%}
        {{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' -%}
        {% generation %}
        {%- if mode == '/think' -%}
            {{ '<|im_start|>assistant\\n' + content.lstrip('\\n') + '<|im_end|>\\n' }}
        {%- else -%}
            {{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n' + content + '<|im_end|>\\n' }}
        {%- endif -%}
        {% endgeneration %}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

OLMO = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}\
{{ '<|system|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'user' %}\
{{ '<|user|>\\n' + message['content'] + '\\n' }}{% elif message['role'] == 'assistant' %}\
{% if not loop.last %}{{ '<|assistant|>\\n'  + message['content'] + eos_token + '\\n' }}\
{% else %}{{ '<|assistant|>\\n'  + message['content'] + eos_token }}{% endif %}{% endif %}\
{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"""

FALCON = """\
{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}\
{% if message['role'] == 'system' %}{{ 'System: ' }}{% elif message['role'] == 'user' %}\
{{ 'User: ' }}{% elif message['role'] == 'assistant' %}{{ 'Falcon: ' }}{% endif %}\
{{ message['content'].replace('\\r\\n', '\\n').replace('\\n\\n', '\\n') }}{% endfor %}\
{% if add_generation_prompt %}{{ '\\n' + 'Falcon:' }}{% endif %}"""

HERMES_TOOLS = """\
{%- macro json_to_python_type(spec) %}
{%- set basic = {'string': 'str', 'number': 'float', 'integer': 'int', 'boolean': 'bool'} %}
{%- if basic[spec.type] is defined %}{{- basic[spec.type] }}
{%- elif spec.type == 'array' %}{{- 'list[' + json_to_python_type(spec['items']) + ']' }}
{%- elif spec.type is iterable and spec.type is not string %}
    {{- 'Union[' + spec.type | join(',') + ']' }}
{%- else %}{{- 'Any' }}{%- endif %}
{%- endmacro %}
{{- bos_token }}{{ '<|im_start|>system\\nHere are the available tools: <tools> ' }}
{%- if tools is iterable and tools | length > 0 %}
    {%- for tool in tools %}
        {%- if tool.function is defined %}{% set tool = tool.function %}{% endif %}
        {{- '{"name": "' + tool.name + '", "description": "' + tool.name + '(' }}
        {%- for name, fields in tool.parameters.properties | items %}
            {{- name + ': ' + json_to_python_type(fields) }}{% if not loop.last %}{{ ', ' }}
            {%- endif %}
        {%- endfor %}
        {{- ') - ' + tool.description }}
        {%- for name, fields in tool.parameters.properties.items() %}
            {{- '\\n    ' + name + '(' + json_to_python_type(fields) + '): '
                + fields.description | trim }}
        {%- endfor %}
        {{- '", "parameters": ' }}
        {%- if tool.parameters.properties | length == 0 %}{{ '{}' }}
        {%- else %}{{ tool.parameters | tojson }}{% endif %}
        {{- '}' }}{% if not loop.last %}{{ '\\n' }}{% endif %}
    {%- endfor %}
{%- endif %}
{{- ' </tools><|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role in ('user', 'system')
           or (message.role == 'assistant' and message.tool_calls is not defined) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' + {'name': tool_call.function.name,
                                      'arguments': tool_call.function.arguments}
                | tojson(ensure_ascii=true, sort_keys=true) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{ '<|im_start|>tool\\n' }}
        {%- endif %}
        {{- '<tool_response>\\n' ~ message.content ~ '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

INTERNLM = """\
{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' \
+ message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}\
{{ '<|im_start|>assistant\\n' }}{% endif %}"""

YI = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}\
{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}\
{% endif %}{% if system_message is defined %}{{ system_message }}{% endif %}\
{% for message in messages %}{% set content = message['content'] %}\
{% if message['role'] == 'user' %}{{ '<|im_start|>user\\n' + content + '<|im_end|>\\n\
<|im_start|>assistant\\n' }}{% elif message['role'] == 'assistant' %}\
{{ content + '<|im_end|>' + '\\n' }}{% endif %}{% endfor %}"""

SOLAR_ONE_TURN = """\
{% for message in messages %}{% if message['role'] == 'system' %}{% if message['content'] %}\
{{ '### System:\\n' + message['content'] + '\\n\\n' }}{% endif %}\
{% elif message['role'] == 'user' %}{{ '### User:\\n' + message['content'] + '\\n\\n' }}\
{% elif message['role'] == 'assistant' %}{{ '### Assistant:\\n' + message['content'] }}{% endif %}\
{% if loop.last and add_generation_prompt %}{{ '### Assistant:\\n' }}{% endif %}{% endfor %}"""

OPENCHAT_TITLE = """\
{{ bos_token }}{% for message in messages %}{{ 'GPT4 Correct ' + message['role'].title() + ': ' \
+ message['content'] | replace('\\t', ' ') + '<|end_of_turn|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ 'GPT4 Correct Assistant:' }}{% endif %}"""

BREAK_CONTINUE = """\
{%- for message in messages -%}
    {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
    {%- if loop.index > 4 -%}{%- break -%}{%- endif -%}
    {{ loop.index ~ '/' ~ loop.length ~ ':' ~ loop.revindex0 ~ loop.cycle('a', 'b') }}
    {%- filter upper -%}{{ message.role }}{%- endfilter %}
    {% set framed -%}
        [{{ (message.content or '') | length }}|{{ (message.content or '')[:7] | e }}]
    {%- endset -%}
    {{ framed }}{% raw %}{{ raw }}{% endraw %}
{%- else -%}
    nothing
{%- endfor -%}
{{ '%s and %05.2f' | format('text', 1.5) }} {{ [3, 1, 2] | sort | join('-') }}
{{ range(3) | list }} {{ {'b': 1, 'a': none} | dictsort }} {{ [1, 2] + [3] }} {{ 2 * 'ab' }}
{{ unset_variable }}{{ unset_variable is defined }} {{ dict(a=1, b='é') | tojson }} {{ 7 // 2 }}
{%- with inner = messages | length %} {{ inner }}{% endwith %}
{{ 'x' if messages | map(attribute='role') | unique | list | count > 1 }}"""

DICT_TURNS = """\
{%- set table = {'user': {'open': '[U]', 'close': '[/U]'}, 'assistant': {'open': '[A]'}} -%}
{%- for message in messages | rejectattr('role', 'equalto', 'tool') -%}
    {%- if message.role in table -%}
        {%- set turn = table[message.role] -%}
        {{ turn['open'] }}{{ message.get('content', '') }}{{ turn.close | default('[/]') }}
    {%- elif message is mapping and message.role == 'system' -%}
        {{ '[S]' + message['content'] | truncate(40, true, '...') + '[/S]' }}
    {%- else -%}
        {{ raise_exception('role ' + message.role + ' is unknown') }}
    {%- endif -%}
{%- endfor -%}
{{ eos_token if not add_generation_prompt }}{{ pad_token is defined and pad_token }}"""

TEMPLATES = {
    name.lower(): source
    for name, source in list(globals().items())
    if name.isupper() and isinstance(source, str)
}
