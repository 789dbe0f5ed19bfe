"""GGUF files beside llama.cpp: tokens of texts, greedy text of SmolLM2; `penstock up smollm2`.

llama.cpp rounds what it multiplies 4-bit weights with, so it gets the same weights in float32.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from shared.messages import SamplingParams
from shared.process import dying_with_this_process
from shared.text.checkpoint_text import load_tokenizer
from shared.text.tokenizer import FastTokenizer
from tests.support.checkpoints import make_checkpoint
from tests.support.gguf_files import write_gguf
from tests.support.launched import Launched, free_port
from tests.support.pinned_environment import pinned_environment
from tests.support.real_model import real_gguf
from tests.support.varied_prompts import VARIED_PROMPTS
from worker.checkpoint import find_checkpoint
from worker.llm import LLM

pytestmark = [pytest.mark.packages, pytest.mark.timeout(600)]

HERE = Path(__file__).parent / "llama_server"
PINS = HERE / "requirements.txt"
TIMEOUT_S = 120.0
TEXTS = (
    *VARIED_PROMPTS,
    "<|im_start|>user\nHi  there\n\n\t x<|im_end|>\n<|im_start|>assistant\n",
    "it's I'LL we've\r\n\r\n  end   ",
    "12345 6 \uff178 \u00bd \u00b2",
    "a\u00a0b\u3000c  HTTPServer camelCase \u01c5x",
    "\U0001f600\U0001f469\u200d\U0001f469\u200d\U0001f467 \u1e9e \ufb03",
)
NUM_TOKENS = 20
LEAST_MARGIN = 0.005  # between the best two tokens: less may fall either way (0.0007 did)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@contextmanager
def llama_cpp(file: Path, log: Path) -> Iterator[httpx.Client]:
    """A client of llama.cpp's server of a file, once it answers."""
    python, port = pinned_environment(PINS, "llama-server", sees_ours=True), free_port()
    command = [python / "bin/python", HERE / "serve.py", file, port, 1]
    with (
        log.open("wb") as output,
        subprocess.Popen(
            list(map(str, command)),
            stdout=output,
            stderr=output,
            preexec_fn=dying_with_this_process(signal.SIGKILL),
        ) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client,
    ):
        deadline_s = time.monotonic() + TIMEOUT_S
        try:
            while not answers(client):
                assert server.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < deadline_s, "llama.cpp's server did not answer"
                time.sleep(0.05)
            yield client
        finally:
            server.kill()


def answers(client: httpx.Client) -> bool:
    with suppress(httpx.TransportError):
        return client.get("/health").status_code == 200
    return False


def tokens(client: httpx.Client, text: str) -> list[int]:
    asked = {"content": text, "parse_special": True, "add_special": True}
    found: list[int] = client.post("/tokenize", json=asked).json()["tokens"]
    return found


def tokenizer_of(file: Path) -> FastTokenizer:
    return load_tokenizer(find_checkpoint(str(file), "").path)


def test_the_tokens_and_the_greedy_text_of_smollm2_are_those_of_llama_cpp(tmp_path: Path) -> None:
    wide, prompts = tmp_path / "f32.gguf", VARIED_PROMPTS[::3]
    python = pinned_environment(PINS, "llama-server", sees_ours=True)
    command = [python / "bin/python", HERE / "in_float32.py", real_gguf(), wide]
    subprocess.run(list(map(str, command)), check=True, timeout=TIMEOUT_S)
    tokenizer = tokenizer_of(real_gguf())
    llm = LLM(str(real_gguf()), dtype="float32", device="cpu", max_model_len=1024)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=2)
    results = llm.generate(prompts, params, progress=False)
    num_equal = 0
    with llama_cpp(wide, tmp_path / "log") as client:
        for text in TEXTS:
            assert tokenizer.encode(text) == tokens(client, text)
        for prompt, result in zip(prompts, results, strict=True):
            asked = {"prompt": tokenizer.encode(prompt), "temperature": 0, "return_tokens": True}
            answer = client.post("/completion", json={**asked, "n_predict": NUM_TOKENS}).json()
            own = list(result.token_ids)
            tops = [[value for _, value in entry.top] for entry in result.logprobs or ()]
            clear = next(
                (at for at, (best, next_) in enumerate(tops) if best - next_ < LEAST_MARGIN),
                len(own),
            )
            assert answer["tokens"][:clear] == own[:clear]
            num_equal += answer["tokens"] == own
    assert num_equal >= len(prompts) - 3


@pytest.mark.parametrize(
    "pre", ["gpt-2", "default", "smollm", "llama-bpe", "smaug-bpe", "qwen2", "stablelm2", "tekken"]
)
def test_each_pre_tokenizer_cuts_texts_as_llama_cpp_does(tmp_path: Path, pre: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "made", "llama", vocab_size=700)
    file = tmp_path / "m.gguf"
    write_gguf(checkpoint, file, tokenizer_pre=pre, further={"tokenizer.ggml.add_bos_token": False})
    tokenizer = tokenizer_of(file)
    with llama_cpp(file, tmp_path / "log") as client:
        for text in TEXTS:
            assert tokenizer.encode(text) == tokens(client, text)


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentence_piece_vocabularies_cut_texts_as_llama_cpp_does(
    tmp_path: Path, has_prefix: bool
) -> None:
    checkpoint = make_checkpoint(tmp_path / "made", "llama", vocab_size=700)
    file = tmp_path / "m.gguf"
    write_gguf(
        checkpoint,
        file,
        sentence_piece=True,
        further={"tokenizer.ggml.add_space_prefix": has_prefix},
    )
    tokenizer = tokenizer_of(file)
    with llama_cpp(file, tmp_path / "log") as client:
        for text in (*TEXTS, " a", "  a", ""):
            assert tokenizer.encode(text) == tokens(client, text)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False).replace(" ", "") == (
            text.replace(" ", "")
        )


def test_penstock_up_smollm2_answers_a_question(tmp_path: Path) -> None:
    env = {
        "MODEL": "smollm2",
        "DEVICE": "cpu",
        "MAX_MODEL_LEN": "1024",
        "XDG_CACHE_HOME": str(tmp_path / "fetched"),
    }
    with Launched(tmp_path, env, ready_timeout_s=300) as penstock:
        answer = httpx.post(
            f"{penstock.base_url}/v1/chat/completions",
            json={
                "model": "smollm2",
                "temperature": 0,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
            },
            timeout=120,
        ).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "The capital of France is Paris."
    assert choice["finish_reason"] == "stop"
