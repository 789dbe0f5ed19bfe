"""GrammarCompiler: grammars over one vocabulary, compiled by llguidance, kept for the next time."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from shared.cpu_time import add_cpu_s
from shared.messages import Grammar, GrammarKind, InvalidParameter
from shared.text.base import GrammarInvalid
from shared.text.compilable_schema import fault_in
from shared.text.deep_stack import start_deep
from shared.text.grammar import check_lark_size, lark_parts
from shared.text.json_schema import grammar_schema
from shared.text.writable_text import WritableText, literal_text, no_token

Result = TypeVar("Result")

MAX_KEPT = 32  # compiled grammars, and admitted ones; the least recently used is dropped first
MAX_MESSAGE_CHARS = 300

# Far more than the largest published schemas need; the library's own let one grammar hold a thread
# for seconds. Unions of 128 tools and grammars of programming languages need
# 2,000 items for a mask, a thousand optional properties 60,000 (5 to 10 ms). As many items of an
# ambiguous grammar take 0.2 s, so time is looked at as well. Messages without the compiler's state:
# they reach clients and logs.
ADMISSION_LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=100_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    max_items_in_row=7_000,
    step_max_items=65_000,
    verbose_errors=False,
)
# Limits of a run: larger than those of admission, since the probes of admission do not meet every
# output.
RUN_LIMITS = LLParserLimits(
    initial_lexer_fuel=600_000,
    step_lexer_fuel=200_000,
    max_lexer_states=60_000,
    max_grammar_size=60_000,
    max_items_in_row=14_000,
    step_max_items=80_000,
    verbose_errors=False,
)
# Limits of a Lark grammar without its schemas. A row has at most one and a half items for each
# symbol, except in ambiguous grammars, which the probes find.
LARK_LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    max_lexer_states=20_000,
    max_grammar_size=3_000,
    verbose_errors=False,
)
PROBE_WALKS = 4  # outputs that admission starts
PROBE_TOKENS = 24  # tokens of each
FIRST_PROBE_CPU_SECONDS = 1.0  # a grammar that takes longer to follow is refused
PROBE_CPU_SECONDS = 0.2  # of the others together
# Processor time, which a busy machine does not lengthen. A lexer is built by the first masks that
# need it, so some may take longer.
MASK_CPU_SECONDS = 0.02
MAX_SLOW_MASKS = 3
FIRST_CPU_SECONDS = 0.25  # that an output may need besides MASK_CPU_SECONDS for each of its masks
TOO_SLOW = (
    "it takes too long to compute the tokens that may come next; write the grammar so that a text "
    "can be read in only one way, with fewer optional parts in a row and simpler patterns"
)

_UNSATISFIABLE = ("no text of this model's vocabulary", "nsatisfiable")
_TOO_MANY_WAYS = ("Current row has", "too many expressions", "Too many items", "too many states")


class Vocabulary(Protocol):
    """The part of shared.text.tokenizer.FastTokenizer that describes its entries."""

    marker_ids: frozenset[int]

    def piece_table(self, size: int) -> list[bytes] | None: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


class GrammarCompiler:
    """Safe on several threads. The vocabulary's tree is built when the first grammar comes.

    Text never becomes a special token, nor any other added entry of the form `<name>`: a Lark
    grammar names those, by `<name>` or `<[id]>`. Ids for which the tokenizer has no entry are never
    allowed. End-of-sequence tokens are allowed wherever the grammar may end.
    """

    def __init__(
        self,
        tokenizer: Vocabulary,
        vocab_size: int,
        eos_token_ids: Collection[int],
        niceness: int = 0,
    ) -> None:
        """`vocab_size` is the model's: masks have as many bits. `niceness`: of the thread that
        builds the tree, and with it of the first grammar."""
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._eos_token_ids = [i for i in eos_token_ids if 0 <= i < vocab_size]
        self._niceness = niceness
        self._building = threading.Lock()
        self._built: LLTokenizer | None = None
        self._writable = WritableText(range(256))  # known when the tree is built
        self._keeping = threading.RLock()  # a future that is done calls back at once
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()  # megabytes each
        self._admitted: OrderedDict[Grammar, Future[None]] = OrderedDict()

    def build(self) -> LLTokenizer:
        """Returns the vocabulary's tree. Raises GrammarInvalid if the vocabulary allows none.

        That is: without an end-of-sequence token no output could end, where a token's text depends
        on its neighbours none can be judged alone, and where tokens have bytes that are no tokens
        themselves (a vocabulary of whole characters) a text could not be divided anywhere. A
        vocabulary may lack other bytes: see WritableText.
        """
        with self._building:
            if self._built is None:
                if self._niceness:
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
                self._built = self._build()
            return self._built

    def check(self, grammar: Grammar, param: str) -> None:
        """Compiles it within the limits of admission, which are tighter than those of a run, and
        starts some outputs, charged to the first caller: see shared.cpu_time. Raises
        InvalidParameter(param) with a sentence."""
        took_s: list[float] = []
        try:
            admit = partial(self._timed, self._admit, took_s.append)
            self._kept(self._admitted, grammar, admit).result()
        except GrammarInvalid as error:
            raise InvalidParameter(param, str(error)) from error
        finally:
            add_cpu_s(sum(took_s))

    def matcher(self, grammar: Grammar) -> LLMatcher:
        """Returns a new matcher for a new output. Raises GrammarInvalid."""
        return self.compiled(grammar).result().deep_copy()

    def compiled(
        self, grammar: Grammar, charge: Callable[[float], object] = lambda cpu_s: None
    ) -> Future[LLMatcher]:
        """Returns the cached matcher: to be copied, never to be advanced itself.

        Compiled on a new thread unless it is cached, in bounded time. The future raises
        GrammarInvalid. `charge` gets the processor seconds if it was not cached.
        """
        return self._kept(self._compiled, grammar, partial(self._timed, self._runnable, charge))

    def _timed(
        self,
        work: Callable[[Grammar], Result],
        charge: Callable[[float], object],
        grammar: Grammar,
    ) -> Result:
        self.build()  # is everybody's
        begun_s = time.thread_time()
        try:
            return work(grammar)
        finally:
            charge(time.thread_time() - begun_s)

    def _kept(
        self,
        kept: OrderedDict[Grammar, Future[Result]],
        grammar: Grammar,
        work: Callable[[Grammar], Result],
    ) -> Future[Result]:
        def forget_failed(done: Future[Result]) -> None:
            """Drops a failed verdict: an exception that is raised again grows each time."""
            if done.exception() is not None:
                with self._keeping:
                    kept.pop(grammar, None)

        with self._keeping:
            result = kept.get(grammar)
            if result is None:
                result = start_deep(lambda: work(grammar))
                kept[grammar] = result
                if len(kept) > MAX_KEPT:
                    kept.popitem(last=False)
                result.add_done_callback(forget_failed)
            else:
                kept.move_to_end(grammar)
            return result

    def _runnable(self, grammar: Grammar) -> LLMatcher:
        tree = self.build()
        _check_size(grammar)
        return _compile(tree, self._source(grammar), RUN_LIMITS)

    def _source(self, grammar: Grammar) -> str:
        """Returns a grammar as the compiler reads it, without branches that cannot be written.
        Raises GrammarInvalid."""
        writable = self._writable
        if grammar.kind is GrammarKind.LARK:
            if writable.is_any:
                return grammar.text  # unchanged: Lark, or several grammars in JSON
            return _each_lark(grammar.text, writable.lark)
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            if writable.is_any:
                return LLMatcher.grammar_from_json_schema(grammar.text)
            narrowed = json.dumps(writable.schema(_decoded(grammar.text)))
            return LLMatcher.grammar_from_json_schema(narrowed)
        if writable.narrows(grammar.text):
            return writable.regex(grammar.text)
        return LLMatcher.grammar_from_regex(grammar.text)

    def _admit(self, grammar: Grammar) -> None:
        tree = self.build()
        _check_size(grammar)
        if grammar.kind is GrammarKind.LARK:
            _compile(tree, _without_schemas(grammar.text), LARK_LIMITS, with_mask=False)
        try:
            matcher = _compile(tree, self._source(grammar), ADMISSION_LIMITS)
            _probe(matcher, frozenset(self._eos_token_ids))
        except GrammarInvalid as error:
            missing = self._writable.unwritable(_named_text(grammar))
            if missing is not None and any(sign in str(error) for sign in _UNSATISFIABLE):
                raise GrammarInvalid(no_token(missing)) from error
            fault = fault_in(_decoded(grammar.text)) if _is_schema(grammar) else None
            raise (GrammarInvalid(str(fault)) if fault is not None else error) from error

    def unsupported_reason(self) -> str | None:
        """Returns why no grammar can be followed over this vocabulary; None if one can."""
        try:
            self._checked_pieces()
        except GrammarInvalid as error:
            return str(error)
        return None

    def _build(self) -> LLTokenizer:
        pieces, present = self._checked_pieces()
        self._writable = WritableText(present)
        markers = self._tokenizer.marker_ids.union(self._eos_token_ids)
        entries = _Entries(self._tokenizer, pieces, markers, self._eos_token_ids[0])
        return entries.tree(self._eos_token_ids)

    def _checked_pieces(self) -> tuple[list[bytes], frozenset[int]]:
        """Returns the bytes of each token, and those that are tokens. Raises GrammarInvalid."""
        if not self._eos_token_ids:
            raise GrammarInvalid("the model has no end-of-sequence token")
        pieces = self._tokenizer.piece_table(self.vocab_size)
        if pieces is None:
            raise GrammarInvalid("the model's vocabulary does not define the bytes of each token")
        texts = [p for i, p in enumerate(pieces) if i not in self._tokenizer.marker_ids]
        present = frozenset(piece[0] for piece in texts if len(piece) == 1)
        if not present.issuperset(b"".join(texts)):
            raise GrammarInvalid("the model's vocabulary is one of characters, not of bytes")
        return pieces, present


class _Entries(TokenizerWrapper):
    """A vocabulary as LLTokenizer reads it."""

    def __init__(
        self,
        tokenizer: Vocabulary,
        pieces: list[bytes],
        markers: frozenset[int],
        eos_token_id: int,
    ) -> None:
        self.is_tokenizer_wrapper = True
        self.bos_token_id = None
        self.eos_token_id = eos_token_id
        self.tokens = pieces
        self.special_token_ids = sorted(i for i in markers if i < len(pieces))
        self._tokenizer = tokenizer
        self._markers = markers
        self._tree: LLTokenizer | None = None

    def tree(self, eos_token_ids: list[int]) -> LLTokenizer:
        self._tree = LLTokenizer(self, eos_token=eos_token_ids)
        self.tokens = ()  # they are in the tree now
        return self._tree

    def __call__(self, text: str) -> list[int]:
        """Returns the tokens of a text that the grammar forces, as the model was trained on them.

        A tokenizer may also normalize, prepend a space, or read text as a marker: then any division
        into tokens is better than one of another text.
        """
        assert self._tree is not None, "used by matchers only"
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        is_text = self._markers.isdisjoint(token_ids)
        if is_text and self._tree.decode_bytes(token_ids) == text.encode():
            return token_ids
        return self._tree.greedy_tokenize(text)


def _is_schema(grammar: Grammar) -> bool:
    return grammar.kind is GrammarKind.JSON_SCHEMA


def _check_size(grammar: Grammar) -> None:
    """Bounds the compiler's input. Raises GrammarInvalid."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        _check_schema_size(_decoded(grammar.text))
    elif grammar.kind is GrammarKind.LARK:
        for lark, schemas in map(_divided, _lark_texts(grammar.text)):
            check_lark_size(lark)
            for schema in schemas:
                _check_schema_size(schema)


def _check_schema_size(schema: object) -> None:
    try:
        grammar_schema(schema, "schema", lenient=True)
    except InvalidParameter as error:
        raise GrammarInvalid(error.message) from error


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarInvalid(f"not JSON: {error}") from error


def _divided(text: str) -> tuple[str, list[Any]]:
    parts = list(lark_parts(text))
    lark = "".join(part for part in parts if isinstance(part, str))
    return lark, [part for part in parts if not isinstance(part, str)]


def _lark_texts(text: str) -> list[str]:
    """Returns the texts of a LARK grammar: itself, or several in JSON that refer to one another."""
    if not text.lstrip().startswith("{"):
        return [text]
    try:
        return [part["lark_grammar"] for part in _decoded(text)["grammars"]]
    except (KeyError, TypeError) as error:
        raise GrammarInvalid("several grammars in one are a list of Lark texts") from error


def _compile(
    tree: LLTokenizer, source: str, limits: LLParserLimits, *, with_mask: bool = True
) -> LLMatcher:
    """Returns a matcher with the mask of an output's first token computed. Raises
    GrammarInvalid."""
    matcher = LLMatcher(tree, source, log_level=0, limits=limits)
    if with_mask and not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        raise GrammarInvalid(matcher_error(matcher))
    return matcher


def _probe(matcher: LLMatcher, ends: frozenset[int]) -> None:
    """Starts outputs, the same ones each time. Raises GrammarInvalid if one cannot continue.

    A bound that only a later token meets would end the generation. The first output has its own
    bound, beyond which the grammar is refused.
    """
    begun_s = time.thread_time()
    num_slow = 0
    for seed in range(PROBE_WALKS):
        chooser, walked = random.Random(seed), matcher.deep_copy()
        for _ in range(PROBE_TOKENS):
            mask_s = time.thread_time()
            mask = walked.compute_bitmask()
            if walked.is_error():
                raise GrammarInvalid(matcher_error(walked))
            now_s = time.thread_time()
            took_s = now_s - begun_s
            num_slow += now_s - mask_s > MASK_CPU_SECONDS
            if num_slow > MAX_SLOW_MASKS or (seed == 0 and took_s > FIRST_PROBE_CPU_SECONDS):
                raise GrammarInvalid(TOO_SLOW)
            token_id = _chosen(mask, ends, chooser)
            if token_id is None or (seed > 0 and took_s > PROBE_CPU_SECONDS):
                break
            walked.consume_token(token_id)


def _chosen(mask: bytes, ends: frozenset[int], chooser: random.Random) -> int | None:
    """Returns a token of the mask that is not an end token; None without one."""
    begin = chooser.randrange(len(mask))
    for first, last in ((begin, len(mask)), (0, begin)):
        at = first
        while rest := mask[at:last].lstrip(b"\0"):
            at = last - len(rest)
            for bit in range(8):
                token_id = at * 8 + bit
                if mask[at] >> bit & 1 and token_id not in ends:
                    return token_id
            at += 1
    return None


def _without_schemas(text: str) -> str:
    """Returns a Lark grammar with each JSON schema replaced by a number."""
    return _each_lark(
        text,
        lambda lark: "".join(
            part if isinstance(part, str) else '{"const": 0}' for part in lark_parts(lark)
        ),
    )


def _named_text(grammar: Grammar) -> str:
    """Returns a text with each character that a grammar names, those in escapes too."""
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return grammar.text
    if grammar.kind is GrammarKind.REGEX:
        return literal_text(grammar.text)
    named: list[str] = []
    for lark, schemas in map(_divided, _lark_texts(grammar.text)):
        named += [literal_text(lark), *(json.dumps(each, ensure_ascii=False) for each in schemas)]
    return "".join(named)


def _each_lark(text: str, change: Callable[[str], str]) -> str:
    """Returns a LARK grammar with each of its Lark texts changed."""
    if not text.lstrip().startswith("{"):
        return change(text)
    whole = _decoded(text)
    parts = [{**part, "lark_grammar": change(part["lark_grammar"])} for part in whole["grammars"]]
    return json.dumps({**whole, "grammars": parts})


def matcher_error(matcher: LLMatcher) -> str:
    """Returns why a matcher gave up, as one sentence for a client."""
    text = matcher.get_error().partition("<non-verbose/>")[0]
    if any(sign in text for sign in _TOO_MANY_WAYS):
        return (
            "the grammar is too large: too many ways on at one place of an output, such as "
            "optional parts in a row or parts that can be read in several ways"
        )
    if text.startswith("panic"):
        return "the grammar is larger than the compiler can handle"
    if "coerce_one_of" in text:
        return "oneOf is supported where no value fits two of its schemas; use anyOf"
    if text.startswith("Unable to determine if regex"):
        return "a text would have to match several patterns at once; together they are too complex"
    if "NoExtension" in text:
        return "no text of this model's vocabulary matches the grammar"
    return " ".join(text.split())[:MAX_MESSAGE_CHARS]
