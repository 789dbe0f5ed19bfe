"""A checkpoint directory for the files of a GGUF model: links to them, and the JSON files and the
chat template that their metadata becomes.

    python -m worker.gguf.checkpoint FILE DIRECTORY

writes them for one model, in a separate process: it reads files of the model's author.
"""

from __future__ import annotations

import hashlib
import json
import logging
import resource
import sys
from collections.abc import Mapping
from pathlib import Path

from worker.cache import cache_directory
from worker.gguf.config import config_of, generation_config_of
from worker.gguf.tokenizer import (
    Vocabulary,
    chat_templates_of,
    tokenizer_config_of,
    tokenizer_of,
)
from worker.model.config.gguf_header import read_gguf, shards_of
from worker.model.errors import ModelError
from worker.tokenizer_conversion import (
    MAX_MEMORY_BYTES,
    NotConverted,
    link_files,
    run_conversion,
    without_partial,
)

_FORMAT = 1  # of the files; another number makes them anew
_MAIN_TEMPLATE = "chat_template.jinja"

log = logging.getLogger(__name__)


def with_text_files(path: Path) -> Path:
    """Returns a directory that serves the model of which `path` is a GGUF file.

    It lies in the cache and is made once for each state of the files. Raises NotConverted with a
    sentence that names the file and the key at fault.
    """
    cache = cache_directory()
    if cache is None:
        raise NotConverted("there is no cache directory for its text files; set XDG_CACHE_HOME")
    try:
        files = shards_of(path)
        directory = cache / f"gguf-{_digest(files)}"
        directory.mkdir(mode=0o700, exist_ok=True)
        link_files({file.name: file.resolve() for file in files}, directory)
        if not (directory / "config.json").exists():  # the last that is written
            log.info("reading the metadata", extra={"gguf": str(files[0])})
            printed = run_conversion("worker.gguf.checkpoint", str(files[0]), str(directory))
            for warning in printed.splitlines():
                log.warning(warning)
    except ModelError as error:
        raise NotConverted(str(error)) from None
    except OSError as error:
        raise NotConverted(f"{error.filename or path}: {error.strerror or error}") from error
    return directory


def _digest(files: list[Path]) -> str:
    parts = [f"format {_FORMAT}"]
    for file in files:
        status = file.stat()
        parts.append(f"{file.resolve()} {status.st_size} {status.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def write_text_files(file: Path, directory: Path) -> None:
    """Writes what serving needs beside the weights. Raises ModelError."""
    model = read_gguf(file)
    config = json.dumps(config_of(model))  # an unknown architecture is refused first
    vocabulary = Vocabulary.of(model)
    templates = chat_templates_of(model)
    contents: dict[str, str] = {
        "tokenizer.json": tokenizer_of(model, vocabulary).to_str(),
        "tokenizer_config.json": json.dumps(tokenizer_config_of(model, vocabulary)),
        "generation_config.json": json.dumps(
            generation_config_of(model, vocabulary.tokens, vocabulary.types)
        ),
        **_template_files(templates),
        "config.json": config,  # last: it shows that the others are there
    }
    for name, content in contents.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        with without_partial(path) as partial:
            partial.write_text(content, encoding="utf-8")


def _template_files(templates: Mapping[str, str]) -> dict[str, str]:
    further = {
        f"additional_chat_templates/{name}.jinja": source
        for name, source in templates.items()
        if name != "default" and name.isidentifier()
    }
    main = {_MAIN_TEMPLATE: templates["default"]} if "default" in templates else {}
    return main | further


def main() -> int:
    """Writes the text files of one model, and prints warnings. Returns the exit status; on an error
    its reason is the last line of stderr."""
    file, directory = sys.argv[1:]
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    try:
        write_text_files(Path(file), Path(directory))
    except ModelError as error:
        sys.stderr.write("\n" + " ".join(str(error).split()) + "\n")
        return 1
    except Exception as error:  # of the tokenizers library, for lists that do not fit together
        reason = " ".join(str(error).split())
        sys.stderr.write(f"\n{Path(file).name}: {type(error).__name__}: {reason}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
