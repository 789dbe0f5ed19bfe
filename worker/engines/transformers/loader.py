"""Weights of any architecture, read by transformers: safetensors only, strictly, with progress."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from worker.engines.transformers.config import SERVED_ELSEWHERE, TransformersConfig, in_one_line
from worker.engines.transformers.sharding import distributed_config
from worker.model.device import is_out_of_memory
from worker.model.errors import CheckpointError, UnsupportedModel
from worker.model.parallel.group import Placement

log = logging.getLogger(__name__)

Report = Callable[[float], None]

# What a checkpoint with images or sound keeps beside its text model, which alone is served.
_OTHER_PARTS = ("vision", "visual", "image", "audio", "multi_modal", "mm_")


def load_model(
    config: TransformersConfig,
    directory: Path,
    placement: Placement,
    attention: str,
    report: Report,
) -> PreTrainedModel:
    """Returns the checkpoint's model on its device, with the attention of that name.

    On one rank, with accelerate, tensors that are not quantized go to the device one by one: the
    host never has all of them.

    Raises CheckpointError for tensors that are missing, unexpected or of another shape;
    UnsupportedModel where transformers cannot load a quantized checkpoint on this machine;
    MemoryError or torch.OutOfMemoryError.
    """
    if not any(directory.glob("*.safetensors")):
        raise CheckpointError(f"{directory} has no safetensors file")
    try:
        with _observed(report):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config.hugging_face,
                dtype=placement.dtype,
                attn_implementation=attention,
                distributed_config=distributed_config(placement.group),
                device_map=_device_map(config, placement),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are in the info, with their names
            )
    except Exception as error:  # of many kinds: files, shapes, packages of quantized formats
        if _ran_out_of_memory(error):
            raise MemoryError("no memory while transformers loads the weights") from error
        if getattr(config.hugging_face, "quantization_config", None) is not None:
            raise UnsupportedModel(
                f"quantization_config: transformers cannot load this checkpoint here "
                f"({in_one_line(error)}); {SERVED_ELSEWHERE}"
            ) from error
        raise CheckpointError(
            f"{directory} cannot be loaded by transformers: {in_one_line(error)}"
        ) from error
    model, info = loaded
    _check(directory, info)
    return _placed(model, placement)


def _ran_out_of_memory(error: Exception) -> bool:
    """Returns whether memory was full: by the error, those that led to it, and those that
    transformers only reports, of tensors that it merges or splits."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    for info in [frame.f_locals.get("loading_info") for frame in frames]:
        reported = getattr(info, "conversion_errors", None) or {}
        if any(is_out_of_memory(RuntimeError(text)) for text in reported.values()):
            return True
    cause: BaseException | None = error
    while cause is not None and not is_out_of_memory(cause):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def _device_map(config: TransformersConfig, placement: Placement) -> dict[str, torch.device] | None:
    """Returns where `from_pretrained` puts each tensor as it reads it; None: in the host's memory.

    A plan for ranks places the tensors by itself. Quantized formats choose by the device whether
    they are dequantized: only on the host it is known that they are.
    """
    if placement.device.type == "cpu" or placement.group.size > 1:
        return None
    if getattr(config.hugging_face, "quantization_config", None) is not None:
        return None
    if importlib.util.find_spec("accelerate") is None:
        log.warning(
            "the weights are read into the memory of the host and then copied to %s, because the "
            "package accelerate is missing",
            placement.device,
        )
        return None
    return {"": placement.device}


def random_model(
    config: TransformersConfig, placement: Placement, attention: str
) -> PreTrainedModel:
    """Returns the model with random weights, the same for a configuration."""
    devices = [] if placement.device.type == "cpu" else [placement.device]
    with torch.random.fork_rng(devices), placement.device:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config.hugging_face,
            dtype=placement.dtype,
            attn_implementation=attention,
            trust_remote_code=False,
        )
    return _placed(model, placement)


def _placed(model: PreTrainedModel, placement: Placement) -> PreTrainedModel:
    """Returns the model on its device, for inference only."""
    model.to(placement.device)  # type: ignore[arg-type]
    model.eval()  # type: ignore[no-untyped-call]
    model.requires_grad_(False)
    return model


def _check(directory: Path, info: dict[str, Any]) -> None:
    """Raises CheckpointError where transformers would only warn: a model that loads computes what
    its authors meant."""
    for what, names in (
        ("is missing", info["missing_keys"]),
        ("has another shape than config.json gives", [key[0] for key in info["mismatched_keys"]]),
        ("cannot be converted", info.get("error_msgs") or ()),
        (
            "is not used by the model",
            [
                name
                for name in info["unexpected_keys"]
                if not any(part in name for part in _OTHER_PARTS)
            ],
        ),
    ):
        if names:
            first, *others = sorted(str(name) for name in names)
            more = f", and {len(others)} more" if others else ""
            raise CheckpointError(f"{directory}: tensor {first!r} {what}{more}")


@contextlib.contextmanager
def _observed(report: Report) -> Iterator[None]:
    """Passes transformers' progress on, instead of its bars and warnings."""
    verbosity = transformers_logging.get_verbosity()
    before = transformers_logging.set_tqdm_hook(
        lambda factory, args, kwargs: _Progress(report, *args, **kwargs)
    )
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)
        transformers_logging.set_verbosity(verbosity)


class _Progress:
    """Stands in for a tqdm bar over the tensors."""

    def __init__(
        self, report: Report, items: Any = None, total: int | None = None, **kwargs: Any
    ) -> None:
        self._report = report
        self._items = items
        self._total = total if total is not None else len(items) if hasattr(items, "__len__") else 0
        self._done = 0

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            yield item
            self.update()

    def update(self, number: int = 1) -> None:
        self._done += number
        if self._total:
            self._report(min(1.0, self._done / self._total))

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None  # set_postfix, close and others of a bar

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *error: object) -> None:
        return None
