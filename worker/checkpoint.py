"""The worker's model: its checkpoint, from a directory, the hub or the demo, and LoadedModel."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shared.messages import ErrorCode, Job
from shared.text.base import Tokenizer
from shared.text.checkpoint_files import read_json
from shared.text.checkpoint_text import card_from_checkpoint
from shared.text.grammar_compiler import GrammarCompiler
from shared.text.model_card import DIGEST_CHARS, ModelCard, parse_override
from shared.text.text_model import load_card_tokenizer
from shared.text.tokenizer import FastTokenizer
from shared.transport.ports.queue import ModelFiles
from worker.gguf.checkpoint import with_text_files
from worker.gguf.package import PACKAGES, NotFetched, packaged_file
from worker.gguf.source import (
    HUB_ID_AND_TYPE,
    GgufNotFound,
    hub_file,
    hub_patterns,
    is_gguf_path,
    lacks_type,
    local_file,
)
from worker.lora import adapter_digest, parse_lora_modules
from worker.model.config.context_length import ContextLength
from worker.model.config.pooling import pooling_config
from worker.runtime.messages import EngineReady
from worker.settings import DEMO_CHECKPOINT, WorkerSettings, served_name
from worker.tokenizer_conversion import (
    OLDER_FORMS,
    NotConverted,
    has_older_form,
    with_tokenizer_json,
)


class JobRefused(Exception):
    """A claimed job cannot be run by this model; the job fails with `code`."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The text side of a checkpoint; the card has none of the engine's facts."""

    card: ModelCard
    blobs: Mapping[str, bytes]  # by digest
    tokenizer: FastTokenizer
    weights_digest: str
    adapters: Mapping[str, str]  # LoRA digests, by name

    @classmethod
    def read(cls, checkpoint: Checkpoint, settings: WorkerSettings) -> TextFiles:
        """Reads it, which does not need the engine. Raises TextInvalid, or OSError."""
        card, blobs = _card(
            checkpoint,
            settings,
            max_model_len=0,
            kv_capacity_tokens=0,
            dtype="",
            num_parameters=0,
            structured_output=False,
        )
        weights = weights_digest(checkpoint)
        adapters = {
            name: adapter_digest(name, path, weights)
            for name, path in parse_lora_modules(settings.lora_modules).items()
        }
        return cls(card, blobs, load_card_tokenizer(card, blobs), weights, adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """The model as the service needs it: card, tokenizer, and the bounds of its engine."""

    name: str
    card: ModelCard
    blobs: Mapping[str, bytes]  # by digest
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    weights_digest: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)  # LoRA digests, by name

    @classmethod
    def of(cls, text: TextFiles, ready: EngineReady) -> LoadedModel:
        """Returns the model of an engine that has loaded it."""
        card = replace(
            text.card,
            max_model_len=ready.config.max_model_len,
            kv_capacity_tokens=0 if ready.embedding_size else ready.config.sequence_capacity_tokens,
            dtype=ready.dtype,
            num_parameters=ready.num_parameters,
            structured_output=ready.config.structured_output,
            engine=ready.engine_name,
            engine_version=ready.engine_version,
            exact_resume=ready.exact_resume,
            embedding_size=ready.embedding_size,
        )
        if not card.structured_output and not card.embedding_size:
            grammars = GrammarCompiler(text.tokenizer, card.vocab_size, card.eos_token_ids)
            card = replace(card, structured_output_reason=grammars.unsupported_reason() or "")
        return cls(
            name=card.name,
            card=card,
            blobs=text.blobs,
            tokenizer=text.tokenizer,
            max_model_len=ready.config.max_model_len,
            vocab_size=ready.vocab_size,
            eos_token_ids=ready.config.eos_token_ids,
            weights_digest=text.weights_digest,
            adapters=text.adapters,
        )

    @property
    def files(self) -> ModelFiles:
        """Returns the digests of the files that jobs depend on."""
        adapters = json.dumps(dict(self.adapters)) if self.adapters else ""
        return ModelFiles(self.card.prompt_digest, self.weights_digest, adapters)

    @property
    def cards(self) -> list[ModelCard]:
        """Returns the cards of the model and of its adapters, which requests name."""
        adapters = [replace(self.card, name=name, parent=self.name) for name in self.adapters]
        return [self.card, *adapters]

    def shortcomings(self) -> list[str]:
        """Returns a sentence for the operator on each thing that the model could do here and does
        not, with the setting that changes it."""
        card, found = self.card, []
        if card.embedding_size:
            return []
        if not card.has_chat_template:
            found.append(
                "the model has no chat template: it serves completions, and chat requests are "
                "refused; PENSTOCK_CHAT_TEMPLATE can name a Jinja file with one"
            )
        if card.structured_output_reason:
            found.append(
                "structured output and forced tool calls are refused: "
                f"{card.structured_output_reason}"
            )
        if card.max_model_len < card.context_length and card.kv_capacity_tokens < (
            card.context_length
        ):
            found.append(
                f"the context is {card.max_model_len} tokens instead of the model's "
                f"{card.context_length}: the KV cache holds {card.kv_capacity_tokens}; "
                "PENSTOCK_KV_CACHE_MEMORY_GB or PENSTOCK_NUM_KV_BLOCKS gives it more, "
                "PENSTOCK_MAX_MODEL_LEN chooses a "
                "context that must fit"
            )
        return found

    def check(self, job: Job) -> None:
        """Raises JobRefused for a job that this model cannot run.

        The frontend has validated it; this finds one of another model or a newer release.
        """
        if job.model != self.name and job.model not in self.adapters:
            raise JobRefused(
                ErrorCode.PAYLOAD_INVALID, f"this worker serves {self.name!r}, not {job.model!r}"
            )
        if job.prompt_digest not in ("", self.card.prompt_digest):
            raise JobRefused(
                ErrorCode.MODEL_REPLACED,
                "The model was replaced after this request was prepared. Send the request again.",
            )
        if not job.prompt_token_ids:
            raise JobRefused(ErrorCode.PAYLOAD_INVALID, "the prompt is empty")
        if job.sampling.seed is None:
            raise JobRefused(ErrorCode.PAYLOAD_INVALID, "the seed was not resolved")
        # The engine checks the lengths of inputs.
        if job.pooling is None and len(job.prompt_token_ids) >= self.max_model_len:
            raise JobRefused(
                ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                f"the prompt has {len(job.prompt_token_ids)} tokens; the model takes at most "
                f"{self.max_model_len} with the output",
            )
        if not 0 <= min(job.prompt_token_ids) <= max(job.prompt_token_ids) < self.vocab_size:
            raise JobRefused(
                ErrorCode.PAYLOAD_INVALID,
                f"a prompt token id is outside the vocabulary of {self.vocab_size}",
            )
        named = (*job.sampling.logit_bias, *job.sampling.stop_token_ids)
        if named and not max(named) < self.vocab_size:
            raise JobRefused(
                ErrorCode.PAYLOAD_INVALID,
                f"a token id of logit_bias or stop_token_ids is outside the vocabulary of "
                f"{self.vocab_size}",
            )


@dataclass(frozen=True, slots=True)
class Announcement:
    """The text side of a model, as frontends get it."""

    card: ModelCard
    blobs: Mapping[str, bytes]  # by digest

    @classmethod
    def before_load(cls, checkpoint: Checkpoint, settings: WorkerSettings) -> Announcement:
        """Returns it for a model that was not loaded yet, as far as its files show: the context may
        turn out shorter, where the KV cache has no room for it. Raises TextInvalid, or OSError."""
        is_own = settings.engine == "penstock"
        pooling = pooling_config(checkpoint.path, settings.runner) if is_own else None
        if pooling is not None:
            context = pooling.max_input_tokens
        else:
            context = checkpoint.context_length() or UNKNOWN_CONTEXT
        card, blobs = _card(
            checkpoint,
            settings,
            max_model_len=min(context, settings.max_model_len or context),
            kv_capacity_tokens=0,
            dtype="" if settings.dtype == "auto" else settings.dtype,
            num_parameters=0,
            structured_output=settings.runner != "echo" and pooling is None,
        )
        if card.structured_output:
            tokenizer = load_card_tokenizer(card, blobs)
            grammars = GrammarCompiler(tokenizer, card.vocab_size, card.eos_token_ids)
            reason = grammars.unsupported_reason() or ""
            card = replace(card, structured_output=not reason, structured_output_reason=reason)
        card = replace(
            card,
            engine=settings.engine,
            exact_resume=is_own,
            embedding_size=0 if pooling is None else pooling.size,
        )
        return cls(card, blobs)


UNKNOWN_CONTEXT = 4096  # tokens, where neither config.json nor a setting names a limit


def _card(
    checkpoint: Checkpoint, settings: WorkerSettings, **facts: Any
) -> tuple[ModelCard, dict[str, bytes]]:
    return card_from_checkpoint(
        checkpoint.path,
        name=checkpoint.name,
        context_length=checkpoint.context_length(),
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
        generation_config=settings.generation_config,
        override_generation_config=parse_override(settings.override_generation_config),
        chat_template=settings.chat_template,
        **facts,
    )


WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
SAMPLES, SAMPLE_BYTES = 16, 16_384  # that are read of each file of weights


def weights_digest(checkpoint: Checkpoint) -> str:
    """Returns a digest that differs between two checkpoints of one name.

    It covers config.json, and the sizes and samples of all files of weights: a training step
    changes every one of them, and reading them all would take as long as loading. Raises OSError.
    """
    whole = hashlib.sha256(checkpoint.name.encode())
    whole.update((checkpoint.path / "config.json").read_bytes())
    files = {path for kind in WEIGHT_FILES for path in checkpoint.path.glob(kind)}
    for path in sorted(files):
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            whole.update(f"/{path.name}/{size}/".encode())
            for at in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * at // (SAMPLES - 1))
                whole.update(file.read(SAMPLE_BYTES))
    return whole.hexdigest()[:DIGEST_CHARS]


TEXT_FILES = ("*.json", "*.jinja", "*.txt", *OLDER_FORMS)
HUB_FILES = ("*.safetensors", *TEXT_FILES)
# The same weights once more, in their author's own layout, which has no place here.
NOT_HUB_FILES = ("consolidated*", "original/*")

_NOT_WRITABLE = {
    errno.EACCES,
    errno.EDQUOT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[A-Za-z0-9][\w./-]*)?")


class CheckpointNotFound(Exception):
    """The model does not exist; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A local directory with the model's files, and the name under which it is served."""

    path: Path
    name: str

    def context_length(self) -> int:
        """Returns the tokens of a sequence that config.json allows; 0 if it names no limit.

        Raises TextInvalid for an unreadable file, which the engine would have refused before.
        """
        context = ContextLength.of(read_json(self.path / "config.json"))
        return 0 if context is None else context.default


def find_checkpoint(
    model: str,
    served_model_name: str,
    on_download: Callable[[float], None] = lambda share: None,
    *,
    with_weights: bool = True,
) -> Checkpoint:
    """Returns the checkpoint; downloads a hub model, with a progress bar, unless it is cached.
    `owner/name@revision`: that branch, tag or commit of it.

    `on_download` gets the downloaded share, in any thread. Without `with_weights` the files of
    weights are not downloaded. Raises CheckpointNotFound.
    """
    name = served_name(model, served_model_name)
    if not model:
        return Checkpoint(_with_files(DEMO_CHECKPOINT, "the demo model"), name)
    path = Path(model).expanduser()
    if (file := _gguf_file(model, on_download)) is not None:
        return Checkpoint(_from_gguf(file, model), name)
    if path.exists() or model.startswith(("/", ".", "~")):
        return Checkpoint(_with_files(path, f"PENSTOCK_MODEL={model!r}"), name)
    if not _HUB_ID.fullmatch(model):
        raise CheckpointNotFound(f"PENSTOCK_MODEL={model!r} is neither a directory nor a hub id.")
    snapshot = _from_hub(model, model, on_download, HUB_FILES if with_weights else TEXT_FILES)
    return Checkpoint(_with_files(snapshot, f"PENSTOCK_MODEL={model!r}"), name)


def _gguf_file(model: str, on_download: Callable[[float], None]) -> Path | None:
    """Returns the GGUF file that `model` means: a path, a file of the hub, or of a package; None
    where it means a checkpoint. Raises CheckpointNotFound."""
    found = HUB_ID_AND_TYPE.fullmatch(model)
    try:
        if is_gguf_path(model):
            return local_file(model)
        if Path(model).expanduser().exists() or model.startswith(("/", ".", "~")):
            return None
        if (package := PACKAGES.get(model)) is not None:
            return packaged_file(package, on_download)
        if found is not None and _HUB_ID.fullmatch(found["id"]):
            snapshot = _from_hub(model, found["id"], on_download, hub_patterns(found["type"]))
            return hub_file(snapshot, found["type"])
        if lacks_type(model):
            raise GgufNotFound(f"name the type of its weights too, such as {model}:Q4_K_M")
    except (GgufNotFound, NotFetched) as error:
        raise CheckpointNotFound(f"PENSTOCK_MODEL={model!r}: {error}.") from None
    return None


def _from_gguf(file: Path, model: str) -> Path:
    """Returns a directory that has all files to serve. Raises CheckpointNotFound."""
    try:
        return with_text_files(file)
    except NotConverted as error:
        raise CheckpointNotFound(f"PENSTOCK_MODEL={model!r}: {error}.") from None


def _with_files(path: Path, what: str) -> Path:
    """Returns a directory that has all files to serve: `path`, or links to it beside a converted
    tokenizer. Raises CheckpointNotFound."""
    if not path.is_dir():
        raise CheckpointNotFound(f"{what}: there is no directory {str(path)!r}.")
    if not (path / "config.json").is_file():
        raise CheckpointNotFound(f"{what}: {str(path)!r} has no config.json.")
    if (path / "tokenizer.json").is_file():  # before the weights are loaded
        return path
    if not has_older_form(path):
        raise CheckpointNotFound(f"{what}: {str(path)!r} has no tokenizer.json.")
    try:
        return with_tokenizer_json(path)
    except NotConverted as error:
        raise CheckpointNotFound(
            f"{what}: {str(path)!r} has no tokenizer.json, and its tokenizer cannot be converted "
            f"into one: {error}. Packages that it needs, such as sentencepiece, protobuf, tiktoken "
            "or mistral-common, can be installed beside transformers."
        ) from None


def _from_hub(
    model: str, hub_id: str, on_download: Callable[[float], None], files: Sequence[str]
) -> Path:
    """Returns the directory with those `files` of a repository. Raises CheckpointNotFound, which
    names the `model`."""
    # Here and not above: it takes most of a second, and a local directory does not need it.
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    repository, _, revision = hub_id.partition("@")
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=list(files),
                ignore_patterns=list(NOT_HUB_FILES),
                tqdm_class=_reporting_bar(on_download),
            )
        )
    except GatedRepoError:
        raise CheckpointNotFound(
            f"PENSTOCK_MODEL={model!r} requires a login; set HF_TOKEN to a token that may read it."
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointNotFound(
            f"PENSTOCK_MODEL={model!r} is neither a directory here nor a model on the hub."
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        if constants.HF_HUB_OFFLINE:
            raise CheckpointNotFound(
                f"PENSTOCK_MODEL={model!r} is not a directory here and not complete in the cache "
                f"{constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids its download. Unset "
                "HF_HUB_OFFLINE, or copy the model into the cache."
            ) from None
        if isinstance(error, OSError) and error.errno in _NOT_WRITABLE:
            raise CheckpointNotFound(
                f"PENSTOCK_MODEL={model!r} cannot be stored in the cache {constants.HF_HUB_CACHE}: "
                f"{error.strerror} ({error.filename or 'file unknown'}). Give the worker's user "
                "write permission and space there, or set HF_HOME to another directory."
            ) from None
        first_line = str(error).strip().splitlines()[0][:500] if str(error).strip() else ""
        raise CheckpointNotFound(
            f"PENSTOCK_MODEL={model!r} is not a directory here and the hub cannot be reached "
            f"({type(error).__name__}: {first_line.rstrip('.')})."
        ) from None
    except Exception as error:
        # The HTTP client's own errors have no base class in common with the hub's.
        raise CheckpointNotFound(
            f"PENSTOCK_MODEL={model!r} could not be downloaded ({type(error).__name__}: {error})."
        ) from None


def _reporting_bar(report: Callable[[float], None]) -> type[Any]:
    """Returns a class of bars for `snapshot_download`: they look as ever, and `report` gets the
    share that is done, 0 to 1, in any thread; nothing where all is in the cache.

    Two bars count bytes, received and written; the one that is further counts. Releases of
    the hub's package that give this class no bar of bytes have one of files.
    """
    # Here and not above: it takes most of a second, and a local directory does not need it.
    from huggingface_hub.utils.tqdm import tqdm

    bars_of_bytes: list[Bar] = []

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._is_of_bytes = kwargs.get("unit") == "B"
            self._num_done = kwargs.get("initial") or 0
            if self._is_of_bytes:
                bars_of_bytes.append(self)
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            # `self.n` stays where it is while bars are not shown, as where there is no terminal.
            self._num_done += n or 0
            self._report()
            shown: bool | None = super().update(n)
            return shown

        def refresh(self, *args: Any, **kwargs: Any) -> bool | None:
            """Reports too, for the hub's package refreshes a bar whose total has grown."""
            self._report()
            shown: bool | None = super().refresh(*args, **kwargs)
            return shown

        def _report(self) -> None:
            if not getattr(self, "total", None):  # tqdm refreshes it while it is made
                return
            if self._is_of_bytes:
                report(max(bar._share() for bar in bars_of_bytes))
            elif not bars_of_bytes:
                report(self._share())

        def _share(self) -> float:
            total = getattr(self, "total", None)
            return min(1.0, max(0.0, self._num_done / total)) if total else 0.0

    return Bar
