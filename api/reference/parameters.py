"""The parameters of request bodies: their groups, in order of use, and a sentence for each.

A sentence gives the meaning, the unit, the default where the schema has none, and differences from
the API that the parameter comes from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# A body has the parameters of a group that it knows, in this order.
GROUPS: Mapping[str, Sequence[str]] = {
    "Prompt": (
        *("messages", "prompt", "input", "tokens", "system", "instructions"),
        *("previous_response_id", "file", "purpose"),
        *("input_file_id", "endpoint", "completion_window", "ids", "filter"),
    ),
    "Common": (
        *("model", "max_tokens", "max_completion_tokens", "max_output_tokens"),
        *("temperature", "top_p", "stop", "stop_sequences", "stream", "stream_options", "n"),
        *("seed", "metadata", "output_expires_after"),
        *("expires_after[anchor]", "expires_after[seconds]", "after", "limit", "dry_run"),
    ),
    "Tools": ("tools", "tool_choice", "parallel_tool_calls"),
    "Output format": (
        *("response_format", "text", "output_config", "output_format"),
        *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    ),
    "Reasoning": ("reasoning_effort", "reasoning", "thinking", "thinking_token_budget"),
    "Sampling": (
        *("top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("rep_penalty", "logit_bias", "min_tokens", "stop_token_ids", "ignore_eos", "best_of"),
    ),
    "Returned with the output": (
        *("logprobs", "top_logprobs", "prompt_logprobs", "echo", "include", "return_token_ids"),
        *("return_metrics", "return_token_strs", "encoding_format", "dimensions"),
    ),
    "Chat template": (
        *("chat_template", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "add_special_tokens"),
    ),
    "Queue, delivery and storage": (
        *("priority", "service_tier", "queue_timeout", "on_disconnect", "stream_interval"),
        *(
            "durability",
            "background",
            "store",
            "expires_after",
            "user",
            "safety_identifier",
            "prompt_cache_key",
        ),
        "cache_control",
    ),
}
WITHOUT_EFFECT = "Without effect"  # the group of the others

SENTENCES: Mapping[str, str] = {
    "messages": "The conversation so far, oldest first; the output is the next message.",
    "prompt": "The text to continue, or its token ids.",
    "input": "The user's message as text, or the items of a conversation, oldest first.",
    "tokens": "The token ids to turn into text.",
    "encoding_format": "`float`: a list of numbers. `base64`: of float32 in little endian.",
    "dimensions": (
        "The number of each vector's first numbers to return, normalized again; for models that "
        "were trained for it. Default: all."
    ),
    "system": "Instructions for the whole conversation: text, or blocks of text.",
    "instructions": (
        "Instructions for this response only: a later `previous_response_id` does not carry them "
        "over."
    ),
    "previous_response_id": (
        "The stored response that this one continues; its input and output come before `input`."
    ),
    "model": "The name of a model in `GET /v1/models`.",
    "max_tokens": (
        "The most tokens to generate, reasoning included. Default: the rest of the context; more "
        "than that is clipped and reported in `x-penstock-ignored`."
    ),
    "max_completion_tokens": "The newer name of `max_tokens`, which it overrides.",
    "max_output_tokens": (
        "The most tokens to generate, reasoning included. Default: the rest of the context; more "
        "than that is clipped and reported in `x-penstock-ignored`."
    ),
    "temperature": (
        "The randomness of sampling: 0 always takes the most likely token. Default: the model's "
        "recommendation (`default_sampling` in `GET /v1/models`), else 1."
    ),
    "top_p": (
        "Samples from the most likely tokens that together have this probability. Default: the "
        "model's recommendation, else 1 (all tokens)."
    ),
    "stop": (
        "Strings that end the output and are not in it; 8192 characters together at most. "
        "OpenAI's API allows 4 strings."
    ),
    "stop_sequences": (
        "Strings that end the output and are not in it; 8192 characters together at most."
    ),
    "stream": "True: the output is sent as server-sent events while it is generated.",
    "stream_options": "Options of a stream; refused without `stream`.",
    "n": "The number of choices to generate from the one prompt, as one job.",
    "seed": (
        "The seed of sampling: the same request with the same seed repeats its output. Default, "
        "also for -1: a random seed, which `GET /v1/jobs/{id}` shows."
    ),
    "tools": "The tools that the model may call; your client runs them.",
    "tool_choice": (
        "Whether the model may, must or must not call tools, or which one it has to call; a "
        "grammar enforces it."
    ),
    "parallel_tool_calls": "False: at most one call in the output.",
    "response_format": (
        "The format of the output; a JSON schema is enforced by a grammar, with or without "
        "`strict`. Default: any text."
    ),
    "text": "The format of the output text; a JSON schema is enforced by a grammar.",
    "output_config": "The format of the output, and the effort of the model.",
    "output_format": "The earlier name of `output_config.format`.",
    "structured_outputs": (
        "As at vLLM, the output has to match the one member that is set. Excludes "
        "`response_format` and `guided_*`."
    ),
    "guided_json": "As at vLLM, the output is JSON that is valid against this schema.",
    "guided_regex": (
        "As at vLLM, the whole output matches this regular expression, in Rust's syntax without "
        "look-around; 16,384 characters at most."
    ),
    "guided_choice": "As at vLLM, the output is one of these strings; 10,000 at most.",
    "guided_grammar": "As at vLLM, the output is a text of this grammar, in Lark's syntax or GBNF.",
    "reasoning_effort": (
        "A hint for how long to reason: `none`, `minimal`, `low`, `medium`, `high`, `xhigh` or "
        "`max`. Reported as ignored if the model's template has no use for it."
    ),
    "reasoning": "How the model reasons; `effort` is a hint as `reasoning_effort` in chat.",
    "thinking": (
        "Turns reasoning on or off, and limits its tokens. Default: the model's template decides."
    ),
    "thinking_token_budget": (
        "The most tokens of reasoning; after them the model has to answer. Default: no limit."
    ),
    "top_k": (
        "Samples from this number of most likely tokens; 0 and -1 keep all. Default: the model's "
        "recommendation, else all."
    ),
    "min_p": (
        "Drops tokens less likely than this share of the most likely one. Default: the model's "
        "recommendation, else 0."
    ),
    "presence_penalty": (
        "Lowers the score of each token that the output already has; negative values raise it."
    ),
    "frequency_penalty": (
        "Lowers the score of a token for each time that the output has it; negative values raise "
        "it."
    ),
    "repetition_penalty": (
        "Divides the score of each token that prompt or output already has. Default: the model's "
        "recommendation, else 1 (off)."
    ),
    "rep_penalty": (
        "Divides the score of each token that prompt or output already has, as "
        "`repetition_penalty` in chat. Default: the model's recommendation, else 1 (off)."
    ),
    "logit_bias": "Adds a value to the scores of tokens, by token id.",
    "min_tokens": (
        "The fewest tokens to generate before an end or a stop string counts; at most `max_tokens`."
    ),
    "stop_token_ids": "Token ids that end the output.",
    "ignore_eos": "True: the output continues after the end-of-sequence token, to `max_tokens`.",
    "best_of": (
        "Generates this number of choices and returns the `n` most likely ones; `n` at least, and "
        "only `n` in a stream. Default: `n`."
    ),
    "logprobs": "True: returns the log probability of each token of the output.",
    "top_logprobs": (
        "Also returns this number of the most likely tokens at each position; needs `logprobs`."
    ),
    "prompt_logprobs": (
        "As at vLLM, returns the log probability of each prompt token, and of this number of "
        "the most likely ones. Refused in a stream."
    ),
    "echo": "True: the output starts with the prompt, with `logprobs` scored as well.",
    "include": "Further parts of the response: of these values, only log probabilities add one.",
    "return_token_ids": (
        "As at vLLM, returns `prompt_token_ids` once and `token_ids` with each choice."
    ),
    "return_metrics": "Returns timings of the job, in milliseconds, at the end of the response.",
    "return_token_strs": "True: returns the text of each token as well.",
    "chat_template": (
        "The name of one of the model's chat templates, such as `rag`. Unlike at vLLM, a template "
        "itself is refused."
    ),
    "chat_template_kwargs": "Variables for the chat template, such as `enable_thinking`.",
    "add_generation_prompt": "False: the prompt does not begin the assistant's turn.",
    "continue_final_message": (
        "As at vLLM, the output continues the last message, which has to be the assistant's; needs "
        "`add_generation_prompt: false`."
    ),
    "add_special_tokens": (
        "Whether the tokenizer adds its special tokens. Default: true for `prompt`, false for "
        "`messages`."
    ),
    "priority": (
        "From 0, the default, which is served first, to 6. A higher priority also takes the slot "
        "of a running job of a lower one, which continues later (not with `PENSTOCK_ENGINE=http` "
        "or vLLM's own sampler)."
    ),
    "service_tier": "`flex` has a low `priority`; `auto` and `default` are the same.",
    "queue_timeout": (
        "Seconds that the job may wait for a worker before it fails with `queue_timeout`. "
        "Default: `PENSTOCK_QUEUE_TIMEOUT_S`."
    ),
    "on_disconnect": (
        "What happens to the job when the client disconnects: `cancel`, `grace` (cancel unless a "
        "client reconnects within 10 s) or `continue`."
    ),
    "stream_interval": (
        "Tokens of a choice per event; the first token is sent at once. Needs `stream`. "
        "Default: each event has the tokens that are there."
    ),
    "durability": (
        "When the request counts as accepted: `none` (in Redis' memory), `fsync` (on its disk) or "
        "`replicas` (in the memory of its replicas). Default: `PENSTOCK_ACCEPT_DURABILITY`."
    ),
    "background": (
        "True: returns the queued response at once and runs it without a reader; needs `store`."
    ),
    "store": (
        "True: the ended job is kept for its time even where Redis is nearly full. False: its text "
        "is deleted a minute after it was read, ten minutes after its end at the latest."
    ),
    "expires_after": (
        "How long the ended job is kept: `anchor` is `completed_at`, `seconds` 60 to "
        "`PENSTOCK_MAX_RETENTION_S`."
    ),
    "metadata": "Labels that are stored and returned: 16 pairs of strings at most.",
    "ids": "The ids of the objects; exclusive with `filter`.",
    "filter": "The objects that match all members; `{}` is all. Exclusive with `ids`.",
    "after": "`next` of the response before, for the objects after it.",
    "limit": "The most objects to look at in this request.",
    "dry_run": "True: counts the objects and changes nothing.",
    "user": "A label that is stored and returned.",
    "safety_identifier": "A label that is stored and returned.",
    "prompt_cache_key": "A label that is returned; the prefix cache needs no key.",
    "cache_control": "Accepted without effect: every repeated prefix is found in the cache.",
}

# A body whose parameters are those of another one.
SAME: Mapping[str, str] = {
    "CompactRequest": "ResponseRequest",
    "InputTokensRequest": "ResponseRequest",
    "CountTokensRequest": "MessageRequest",
}

# Schema.parameter, where one body differs.
OWN: Mapping[str, str] = {
    "CompletionRequest.prompt": (
        "The text to continue, its token ids, or a list of up to 64 of either: one job for each."
    ),
    "CompletionRequest.max_tokens": (
        "The most tokens to generate; more than the rest of the context is clipped. 0 only with "
        "`echo`. Default: 16."
    ),
    "CompletionRequest.logprobs": (
        "Returns the log probability of each token of the output, and of this number of the most "
        "likely ones."
    ),
    "ResponseRequest.store": (
        "True: keeps the response for `PENSTOCK_RESPONSE_TTL_S` after its end, to be retrieved and "
        "continued. False: its text is deleted a minute after it was read."
    ),
    "ResponseRequest.stream_options": "Accepted without effect; refused without `stream`.",
    "ResponseRequest.top_logprobs": (
        "Returns this number of the most likely tokens at each position; needs "
        "`message.output_text.logprobs` in `include`."
    ),
    "CompactRequest.stream": "False only: a summary is returned whole.",
    "CompactRequest.background": "False only: a summary is returned whole.",
    "EmbeddingRequest.input": (
        "Text, token ids, or a list of up to 2048 of either; 300,000 tokens together at most."
    ),
    "EmbeddingRequest.store": (
        "True: keeps the vectors for `PENSTOCK_JOB_RETENTION_S` after the end. Default: they are "
        "deleted a minute after it."
    ),
    "GenerateRequest.prompt": "The text to continue, or its token ids.",
    "GenerateRequest.model": "The name of a model; optional if only one is served.",
    "GenerateRequest.max_tokens": (
        "The most tokens to generate; more than the rest of the context is clipped. Default: 64."
    ),
    "GenerateRequest.temperature": (
        "The randomness of sampling: 0 always takes the most likely token. Default: the model's "
        "recommendation, else 0, unlike in the other dialects."
    ),
    "GenerateRequest.stream": "False: one JSON object at the end instead of server-sent events.",
    "MessageRequest.max_tokens": (
        "The most tokens to generate, reasoning included; at the end of the context the output "
        "ends with `model_context_window_exceeded`."
    ),
    "MessageRequest.top_k": (
        "Samples from this number of most likely tokens; 0 keeps all. Default: the model's "
        "recommendation, else all."
    ),
    "MessageRequest.service_tier": "Accepted without effect: there is one tier.",
    "TokenizeRequest.prompt": "The text to tokenize; exclusive with `messages`.",
    "TokenizeRequest.messages": (
        "The conversation to render with the chat template and tokenize; exclusive with `prompt`."
    ),
    "TokenizeRequest.model": "The name of a model; optional if only one is served.",
    "DetokenizeRequest.model": "The name of a model; optional if only one is served.",
    "BatchRequest.input_file_id": "The id of an uploaded file with purpose `batch`.",
    "BatchRequest.endpoint": "The route that every row of the file is a request to.",
    "BatchRequest.completion_window": (
        "How long the batch may run: a number of `s`, `m`, `h` or `d`, from `1s` to `7d`. OpenAI's "
        "API knows `24h` only."
    ),
    "BatchRequest.output_expires_after": (
        "When the output and error files expire. Default: `PENSTOCK_FILE_LIFE_S`."
    ),
    "Form.file": "The JSON lines to store, `PENSTOCK_MAX_FILE_BYTES` at most.",
    "Form.purpose": "What the file is for: the input of a batch.",
    "Form.expires_after[anchor]": "The time from which `expires_after[seconds]` count.",
    "Form.expires_after[seconds]": (
        "Seconds until the file is deleted. Default: `PENSTOCK_FILE_LIFE_S`."
    ),
}
