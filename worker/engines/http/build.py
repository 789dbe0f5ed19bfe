"""From EngineOptions to an HttpEngine whose upstreams have been compared with the checkpoint."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx2

from shared.text.checkpoint_text import load_tokenizer_and_eos
from shared.text.grammar_compiler import GrammarCompiler
from worker.engine.interface import BuiltEngine, Progress
from worker.engine_options import EngineOptions
from worker.engines.http.engine import HttpEngine
from worker.engines.http.finding import Found, KeyFile, find
from worker.engines.http.options import UpstreamAddress, parse_upstreams
from worker.engines.http.streaming import ssl_context
from worker.engines.http.upstreams import Upstreams

RETRY_INTERVAL_S = 1.0
BLOCK_SIZE = 16
DEFAULT_MODEL_LEN = 4096

log = logging.getLogger(__name__)


def build_http_engine(options: EngineOptions, report: Progress) -> BuiltEngine:
    """Waits for the first upstream to answer, and compares its tokenizer with the checkpoint's.

    Raises ModelError or ValueError with a sentence.
    """
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # INFO has a line for each request
    addresses = parse_upstreams(options.upstream_urls)
    tokenizer, eos_token_ids = load_tokenizer_and_eos(options.checkpoint)
    key = KeyFile(options.upstream_key_file)
    key.headers()
    look = partial(find, model=options.upstream_model, key=key, tokenizer=tokenizer)
    found = asyncio.run(_first_found(addresses, look, report))
    facts = [one.facts for one in found.values() if one is not None]
    least = min(facts, key=lambda fact: fact.max_model_len or DEFAULT_MODEL_LEN)
    config_json = json.loads((Path(options.checkpoint) / "config.json").read_bytes())
    longest = least.max_model_len or int(
        config_json.get("max_position_embeddings") or DEFAULT_MODEL_LEN
    )
    max_model_len = min(options.max_model_len or longest, longest)
    max_num_seqs = options.max_num_seqs
    if all(fact.num_slots for fact in facts):
        max_num_seqs = min(max_num_seqs, sum(fact.num_slots for fact in facts))
    vocab_size = int(config_json.get("vocab_size") or tokenizer.vocab_size)
    grammars = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)
    config = options.engine_config(
        num_blocks=max_num_seqs * -(-max_model_len // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=frozenset(eos_token_ids),
        structured_output=options.structured_output and grammars.unsupported_reason() is None,
    )
    config = replace(config, max_num_seqs=max_num_seqs, preempts=False)

    def connect() -> Upstreams:
        encode = partial(tokenizer.encode, add_special_tokens=False)
        return Upstreams(look, found, key, encode)

    return BuiltEngine(
        engine=HttpEngine(config, vocab_size, connect, grammars),
        config=config,
        vocab_size=vocab_size,
        num_parameters=0,
        dtype="upstream",
        version=", ".join(sorted({fact.version for fact in facts})),
        # Greedy outputs continue exactly if the upstream's numbers do not depend on its batch;
        # seeds and penalties start again.
        exact_resume=False,
    )


async def _first_found(
    addresses: Sequence[UpstreamAddress],
    look: Callable[[httpx2.AsyncClient, str], Awaitable[Found]],
    report: Progress,
) -> dict[UpstreamAddress, Found | None]:
    """Returns all upstreams, with those that answer; waits until one does."""
    failure = reported = ""
    async with httpx2.AsyncClient(verify=ssl_context(), trust_env=False) as http:
        while True:
            found: dict[UpstreamAddress, Found | None] = dict.fromkeys(addresses)
            for address in addresses:
                try:
                    found[address] = await look(http, address.url)
                except OSError as error:
                    failure = str(error)
            if any(found.values()):
                return found
            report("waiting for an upstream", 0.0)
            if failure != reported:
                reported = failure
                log.warning(
                    "no upstream answers; the worker waits for one", extra={"error": failure}
                )
            await asyncio.sleep(RETRY_INTERVAL_S)
