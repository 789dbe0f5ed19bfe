"""Evaluates tasks of ours with one of the harness's models.

Arguments: the model's kind, its arguments as JSON, a file of questions (JSON lines with `question`,
`choices` and `answer`), and the tasks: `choose` compares how probable the choices are, `write` has
the model write the answer. The last line of output is JSON: by task, its score and the responses
to each question. `local-chat-completions` gets messages, and cannot `choose`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask

METRICS = {"choose": "acc", "write": "exact_match"}
OPTIONS: dict[str, dict[str, Any]] = {
    "choose": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
    },
    "write": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 16, "do_sample": False},
    },
}


def task_of(name: str, questions: str) -> ConfigurableTask:
    metric: dict[str, Any] = {"metric": METRICS[name], "aggregation": "mean"}
    if name == "write":
        metric["regexes_to_ignore"] = [r"^\s+"]
    return ConfigurableTask(
        config={
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": questions}},
            "test_split": "test",
            "doc_to_text": "{{question}}",
            "target_delimiter": "",
            "metric_list": [{**metric, "higher_is_better": True}],
            **OPTIONS[name],
        }
    )


def main(kind: str, arguments: str, questions: str, *tasks: str) -> None:
    model_args = json.loads(arguments)
    is_chat = model_args.pop("is_chat", False)  # for `hf`, which has both
    found = simple_evaluate(
        model=kind,
        model_args=model_args,
        batch_size=1 if kind == "hf" or is_chat else 4,
        tasks=[task_of(name, questions) for name in tasks],
        apply_chat_template=is_chat,
        log_samples=True,
        bootstrap_iters=0,
    )
    result = {}
    for name in tasks:
        samples = sorted(found["samples"][name], key=lambda sample: sample["doc_id"])
        result[name] = {
            "score": found["results"][name][f"{METRICS[name]},none"],
            "responses": [[response[0] for response in sample["resps"]] for sample in samples],
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
