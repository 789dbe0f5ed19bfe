"""vLLM's records and bars while it loads become stages; the rest is logged, or shown, as it is."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest

from worker.engines.vllm import loading

Stages = list[tuple[str, float]]


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    found = logging.getLogger("vllm")
    before = (found.level, found.propagate)
    yield found
    found.setLevel(before[0])
    found.propagate = before[1]


@pytest.mark.filterwarnings("ignore")
def test_records_that_begin_a_stage_report_it_and_warnings_are_logged(
    logger: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    stages: Stages = []
    loading.log_records(logging.INFO)
    inner = logging.getLogger("vllm.v1.worker")
    with loading.progress(lambda stage, share: stages.append((stage, share))):
        inner.info("Starting to load model %s...", "/m")
        inner.info("Loading weights took %.2f seconds", 1.0)
        inner.info("Initializing an engine whose config names torch.compile")
        inner.info("%s KV cache size: %s tokens", "CPU", 5)
        inner.warning("a warning")
    assert stages == [
        ("loading weights", 0.0),
        ("loading weights", 1.0),
        ("allocating KV cache", 0.0),
    ]
    assert [record.getMessage() for record in caplog.records] == ["a warning"]
    inner.info("a decision of vLLM's")
    inner.warning("later")
    assert [record.getMessage() for record in caplog.records][1:] == ["later"]
    assert not logger.handlers


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        (logging.DEBUG, {"info", "warning", "error"}),
        (logging.INFO, {"warning", "error"}),
        (logging.WARNING, {"warning", "error"}),
        (logging.ERROR, {"error"}),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_vllms_records_are_as_severe_as_the_operator_asks(
    caplog: pytest.LogCaptureFixture, level: int, shown: set[str]
) -> None:
    loading.log_records(level)
    inner = logging.getLogger("vllm.v1")
    with loading.progress(lambda stage, share: None):
        for word in ("info", "warning", "error"):
            getattr(inner, word)("while it loads")
    for word in ("info", "warning", "error"):
        getattr(inner, word)("afterwards")
    names = {record.levelname.lower() for record in caplog.records}
    assert names == shown
    assert len(caplog.records) == 2 * len(shown)


def test_bars_become_shares_and_other_lines_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    stages: Stages = []
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with loading.progress(lambda stage, share: stages.append((stage, share))):
        stream = sys.stderr
        for share in (0, 50, 100):
            sys.stderr.write(f"\rLoading safetensors checkpoint shards: {share}% Completed | 1/2")
        sys.stderr.write("\n")
        sys.stderr.write("\rCapturing CUDA graphs (decode): 25%|##5   | 1/4")
        sys.stderr.write("\n")
        sys.stderr.write("a line of a library\n")
    assert stages == [
        ("loading weights", 0.0),
        ("loading weights", 0.5),
        ("loading weights", 1.0),
        ("capturing CUDA graphs", 0.25),
    ]
    assert terminal.getvalue() == "a line of a library\n"
    stream.write("Loading again: 10%")  # by what kept the stream
    assert terminal.getvalue().endswith("Loading again: 10%")
    assert len(stages) == 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("level", "is_logged"), [(logging.INFO, False), (logging.DEBUG, True)])
def test_requests_of_a_failed_step_are_logged_for_developers_alone(
    level: int, is_logged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = logging.getLogger("vllm.logging_utils.dump_input")
    monkeypatch.setattr(dump, "level", logging.NOTSET)
    loading.log_records(level)
    dump.manager._clear_cache()
    assert dump.isEnabledFor(logging.ERROR) is is_logged


@pytest.mark.filterwarnings("ignore")
def test_a_module_that_a_models_code_lacks_is_found_in_its_record(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = logging.getLogger("vllm.model_executor.models.registry")
    with loading.progress(lambda stage, share: None) as records:
        for reason in ("a syntax error", "ModuleNotFoundError: No module named 'torchvision'"):
            try:
                raise RuntimeError(f"Error raised in subprocess:\n{reason}")
            except RuntimeError:
                registry.exception("Error in inspecting model architecture '%s'", "Gemma3")
    assert records.missing_module == "torchvision"
    (other,) = caplog.records
    assert other.exc_info
    assert "a syntax error" in str(other.exc_info[1])


@pytest.mark.parametrize(("level", "is_logged"), [(logging.INFO, False), (logging.DEBUG, True)])
def test_warnings_of_every_start_are_for_debugging(level: int, is_logged: bool) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    root, of_vllm = logging.getLogger(), logging.getLogger("vllm.engine")
    before = logging.getLogger("vllm").level
    root.addHandler(handler)
    try:
        loading.log_records(level)
        of_vllm.warning("Enforce eager set, disabling torch.compile, CUDAGraphs")
        of_vllm.warning("The model is not what it seems")
    finally:
        root.removeHandler(handler)
        logging.getLogger("vllm").setLevel(before)
        for other in root.handlers:
            other.removeFilter(loading._is_worth_a_line)
    messages = [record.getMessage() for record in records]
    assert any("Enforce eager" in message for message in messages) is is_logged
    assert messages[-1] == "The model is not what it seems"
