"""Evaluates a multiple-choice task of ours with the harness's own client for completions.

Arguments: base URL, model, directory of the tokenizer, file of questions (JSON lines with
`question`, `choices` and `answer`). The last line of output is JSON: the accuracy, and of each
question the log probability of each choice and whether it is what the model would say itself.
"""

from __future__ import annotations

import json
import sys

from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask


def main(base_url: str, model: str, tokenizer: str, questions: str) -> None:
    task = ConfigurableTask(
        config={
            "task": "questions",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": questions}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
    )
    found = simple_evaluate(
        model="local-completions",
        model_args={
            "base_url": f"{base_url}/v1/completions",
            "model": model,
            "tokenizer": tokenizer,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 3,
            "max_retries": 1,
        },
        batch_size=4,
        tasks=[task],
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["questions"], key=lambda sample: sample["doc_id"])
    result = {
        "acc": found["results"]["questions"]["acc,none"],
        "choices": [[answer[0] for answer in sample["resps"]] for sample in samples],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
