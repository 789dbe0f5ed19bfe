"""A tokenizer.json for checkpoints that have their tokenizer in an older form.

    python -m worker.tokenizer_conversion CHECKPOINT TOKENIZER_JSON

converts one by transformers, in a separate process: it takes seconds to import, and reads files
of the checkpoint's author. Their code is never run.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import logging
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from worker.cache import cache_directory

# Patterns of the files that have a tokenizer where there is no tokenizer.json.
OLDER_FORMS = (
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "spiece.model",
    "tiktoken.model",
    "*.tiktoken",
    "vocab.txt",
)
TIMEOUT_S = 300.0
MAX_MEMORY_BYTES = 16 << 30  # of address space
_DESCRIBING = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "config.json")
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "HOME", "VIRTUAL_ENV")  # no secrets in it
_MAX_REASON_CHARS = 300

log = logging.getLogger(__name__)


class NotConverted(Exception):
    """The tokenizer cannot be converted to a tokenizer.json; the message has the reason."""


def has_older_form(checkpoint: Path) -> bool:
    """Returns whether a checkpoint has a tokenizer that `with_tokenizer_json` may convert."""
    return any(file.is_file() for form in OLDER_FORMS for file in checkpoint.glob(form))


def with_tokenizer_json(checkpoint: Path) -> Path:
    """Returns a directory with the checkpoint's files, as links, and a tokenizer.json.

    It lies in the cache and is made once for each state of the tokenizer's files. Raises
    NotConverted.
    """
    cache = cache_directory()
    if cache is None:
        raise NotConverted("there is no cache directory for it; set XDG_CACHE_HOME")
    directory = cache / f"checkpoint-{_digest(checkpoint)}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        link_files({path.name: path.resolve() for path in checkpoint.iterdir()}, directory)
        if not (directory / "tokenizer.json").exists():
            log.info("converting the tokenizer", extra={"checkpoint": str(checkpoint)})
            with without_partial(directory / "tokenizer.json") as partial:
                run_conversion("worker.tokenizer_conversion", str(checkpoint), str(partial))
    except OSError as error:
        raise NotConverted(f"{directory} cannot be written: {error}") from error
    return directory


def _digest(checkpoint: Path) -> str:
    """Returns a name for the checkpoint's place, the state of its tokenizer and transformers'."""
    parts = [str(checkpoint.resolve())]
    for form in (*OLDER_FORMS, *_DESCRIBING):
        for file in sorted(checkpoint.glob(form)):
            status = file.stat()
            parts.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
    try:
        parts.append(importlib.metadata.version("transformers"))
    except importlib.metadata.PackageNotFoundError:
        raise NotConverted("the package transformers is not installed") from None
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def link_files(wanted: Mapping[str, Path], directory: Path) -> None:
    """Links files by their names, and removes other links.

    Other workers may do the same at once: each link is put in its place whole.
    """
    for path in directory.iterdir():
        if path.is_symlink() and path.name not in wanted:
            path.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=".linking-", dir=directory.parent) as made:
        for name, path in wanted.items():
            if (directory / name).resolve() != path:
                link = Path(made) / name
                link.symlink_to(path)
                link.replace(directory / name)


@contextlib.contextmanager
def without_partial(target: Path) -> Iterator[Path]:
    """Yields a file beside `target` that takes its place once the block has ended well."""
    handle, name = tempfile.mkstemp(prefix=".converting-", dir=target.parent)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def run_conversion(module: str, *arguments: str) -> str:
    """Runs a module of this package in a process without secrets and with bounds; returns what it
    printed. Raises NotConverted with its last line of stderr."""
    kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", module, *arguments],
            env={
                **kept,
                "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NotConverted(f"that took more than {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise NotConverted(lines[-1][:_MAX_REASON_CHARS])
    return done.stdout


def main() -> int:
    """Converts one tokenizer. Returns the exit status; on an error its reason is the last line."""
    checkpoint, target = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            checkpoint, trust_remote_code=False, local_files_only=True
        )
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TypeError(f"{type(tokenizer).__name__} has no fast form")
        Path(target).write_text(backend.to_str(), encoding="utf-8")
    except Exception as error:  # of many kinds: each tokenizer class reads its own files
        reason = " ".join(str(error).split())
        sys.stderr.write(f"\n{type(error).__name__}: {reason}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
