"""FastTokenizer: a tokenizer.json, without transformers and without torch."""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

from shared.messages import InvalidParameter
from shared.text.base import Detokenizer, TextInvalid
from shared.text.detokenizer import ByteDetokenizer, PieceRule, WindowDetokenizer, piece_rule
from shared.text.kept_ids import KeptIds
from shared.text.special_text import pattern_of, unmarked

NFC_SHRINKS = 3  # UTF-8 of a text by that of its composed form, at most


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """What tokenizer_config.json adds to tokenizer.json.

    `special_tokens`: role ("bos_token", "eos_token", "image_token", ...) -> its text, as templates
    see it; `extra_special_tokens`: further texts that are special without a role. `added_tokens`:
    id -> its flags, if they override or extend tokenizer.json's. tokenizer.json's post-processor
    decides whether a BOS or EOS token is put around a text: add_bos_token is
    ignored, as in transformers since its version 5.
    """

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    extra_special_tokens: tuple[str, ...] = ()
    added_tokens: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)


class PieceTokenizer:
    """Decodes token by token, for tokenizers that define the bytes of each token.

    `strip`: a character, and how many of it are dropped at most from the start of an output.
    """

    def __init__(
        self, vocab_size: int, special_ids: frozenset[int], strip: tuple[str, int]
    ) -> None:
        self.vocab_size = vocab_size
        self.special_ids = special_ids
        self.strip = strip

    def _piece_pair(self, token_id: int) -> tuple[bytes, bytes] | None:
        """Returns (bytes as the first token, bytes elsewhere); None for an id without an entry."""
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.flush()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        skipped = self.special_ids if skip_special_tokens else frozenset()

        def piece(token_id: int, first: bool) -> bytes | None:
            if token_id in skipped:
                return None
            pair = self._piece_pair(token_id)
            return None if pair is None else pair[0 if first else 1]

        strip, strip_count = self.strip
        return ByteDetokenizer(piece, strip=strip, strip_count=strip_count)

    def token_text(self, token_id: int) -> str:
        """Returns a token as within a text; bytes that are no whole character become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Returns its bytes within a text (not at its start); b'' for an id outside the vocabulary.

        Exact for vocabularies with a known decoder; for others the UTF-8 of the token's own text.
        """
        pair = self._piece_pair(token_id)
        return b"" if pair is None else pair[1]


class FastTokenizer(PieceTokenizer):
    """A `tokenizers` tokenizer with exact, incremental decoding. Safe on several threads.

    Ids and encoded text equal transformers' fast tokenizers. Decoded text equals theirs too, with
    three decisions, the same for streamed and whole text: `clean_up_tokenization_spaces`
    never applies; among byte-fallback tokens (`<0xNN>`) each maximal bad part is one U+FFFD and
    good characters next to it survive, where the library turns every byte of the whole run into
    one; and ids outside the vocabulary stand for no text.
    """

    def __init__(self, backend: Backend, shown: Collection[str] = ()) -> None:
        """`backend` belongs to this object: no other code may change it.

        `shown`: special tokens that are text all the same, such as the markers of a tool call.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        special_ids = frozenset(
            token_id
            for token_id, token in added.items()
            if token.special and token.content not in shown
        )
        self.special_texts: Sequence[str] = [
            token.content for token in added.values() if token.special
        ]
        self._literal_lock = threading.Lock()
        self._literal: _LiteralBackend | None = None  # made for the first marked text
        # `<name>` in a vocabulary is a marker, not text with angle brackets.
        self.marker_ids = frozenset(
            token_id
            for token_id, token in added.items()
            if token.special or (token.content.startswith("<") and token.content.endswith(">"))
        )
        self._rule = _decoder_rule(backend)
        self._pieces: dict[int, tuple[bytes, bytes] | None] = {}
        self._max_token_bytes: int | None = None  # counted when a text is first bounded
        self._kept_ids = _kept_ids(backend)
        rule = self._rule
        super().__init__(
            max(backend.get_vocab_size(), 1 + max(added, default=-1)),
            special_ids,
            ("", 0) if rule is None else (rule.strip, rule.strip_count),
        )

    @classmethod
    def from_bytes(
        cls,
        tokenizer_json: bytes,
        config: TokenizerConfig | None = None,
        shown: Collection[str] = (),
    ) -> FastTokenizer:
        """Raises TextInvalid when the file is not a tokenizer or contradicts `config`."""
        try:
            backend = Backend.from_buffer(tokenizer_json)
        except Exception as error:  # the library raises bare Exceptions
            raise TextInvalid(f"tokenizer.json cannot be used: {error}") from error
        if config is not None:
            _apply(backend, config)
        return cls(backend, shown)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        mark: str = "",
        tenant: str | None = None,
    ) -> list[int]:
        """Raises InvalidParameter for text with half a surrogate pair, which UTF-8 cannot carry."""
        check_encodable(text)
        if mark:
            with self._literal_lock:
                if self._literal is None:
                    self._literal = _LiteralBackend(self._backend)
            return self._literal.encode(text, add_special_tokens, mark)
        if self._kept_ids is not None and tenant is not None and not add_special_tokens:
            return self._kept_ids.encoded(text, tenant, self._encode_by_library)
        return self._encode_by_library(text, add_special_tokens)

    def _encode_by_library(self, text: str, add_special_tokens: bool = False) -> list[int]:
        # The batch call lets other threads run meanwhile; `encode` keeps the interpreter's lock,
        # for half a second with a prompt of a megabyte.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def least_tokens(self, text: str) -> int:
        """Returns the text's bytes divided by those that the longest token may stand for.

        0 if a normalizer, a pre-tokenizer or an added token may drop or shorten text.
        """
        if not self.max_token_bytes:
            return 0
        return -(-len(text.encode(errors="replace")) // self.max_token_bytes)

    @property
    def max_token_bytes(self) -> int:
        """Bytes of a text that one token stands for, at most; 0 if that is not known."""
        if self._max_token_bytes is None:
            shrinking = _shrinking(self._backend)
            self._max_token_bytes = shrinking and shrinking * self._longest_token()
        return self._max_token_bytes

    def _longest_token(self) -> int:
        """Bytes of the longest token; the whole vocabulary is looked at."""
        tokens = map(self._backend.id_to_token, range(self.vocab_size))
        return max(len(token.encode()) for token in tokens if token is not None)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        if self._rule is not None:
            return super().detokenizer(skip_special_tokens=skip_special_tokens)
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return WindowDetokenizer(
            self._decode_by_library,
            lambda token_id: token_id not in skipped and self._piece_pair(token_id) is not None,
        )

    def pieces(self) -> list[tuple[bytes, bytes] | None] | None:
        """Returns the bytes of every id, as the first token and elsewhere; None if they depend
        on the other tokens."""
        if self._rule is None:
            return None
        return [self._piece_pair(token_id) for token_id in range(self.vocab_size)]

    def piece_table(self, size: int) -> list[bytes] | None:
        """Returns the bytes of each id below `size`, wherever it occurs; b'' if it has no entry.

        None when that depends on the other tokens, or is not known. A space that the decoder drops
        from the start of a text is ignored.
        """
        if self._rule is None:
            return None
        table = []
        for token_id in range(size):
            token = self._backend.id_to_token(token_id)
            piece = b"" if token is None else self._rule.encode(token, False)
            if token is not None and self._rule.encode(token, True) != piece:
                return None
            table.append(piece)
        return table

    def token_id(self, token: str) -> int | None:
        """Returns the id of a vocabulary entry by its exact name, such as '<|im_end|>'."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def _piece_pair(self, token_id: int) -> tuple[bytes, bytes] | None:
        """Returns (bytes as the first token, bytes elsewhere), made on demand: most never occur."""
        try:
            return self._pieces[token_id]
        except KeyError:
            pass
        # The library takes unsigned 32-bit numbers; others are in no vocabulary.
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return None  # not kept: clients choose these ids, the vocabulary bounds the others
        if self._rule is None:
            text = self._decode_by_library([token_id]).encode()
            pair = (text, text)
        else:
            pair = (self._rule.encode(token, True), self._rule.encode(token, False))
        self._pieces[token_id] = pair
        return pair

    def _decode_by_library(self, token_ids: Sequence[int]) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return text


class _LiteralBackend:
    """A copy of a tokenizer to which special tokens are ordinary text. Intended special tokens are
    in the text under other, random names.

    So the text between two special tokens is encoded as the tokenizer itself encodes it.
    """

    def __init__(self, backend: Backend) -> None:
        special = {
            token_id: token
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._backend = Backend.from_str(backend.to_str())
        self._backend.encode_special_tokens = True
        secret = secrets.token_hex(16)
        self._names: dict[str, str] = {}  # by the text of a special token
        self._ids: dict[int, int] = {}  # of special tokens by those of their names
        for token_id, token in special.items():
            name = f"<{secret}:{token_id}>"
            named = AddedToken(
                name,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=False,
            )
            self._backend.add_tokens([named])
            self._names[token.content] = name
            named_id = self._backend.token_to_id(name)
            assert named_id is not None, "it has just been added"
            self._ids[named_id] = token_id
        self._special = re.compile(pattern_of(self._names))

    def encode(self, text: str, add_special_tokens: bool, mark: str) -> list[int]:
        named = self._special.sub(lambda found: self._names[found[0]], text)
        (encoding,) = self._backend.encode_batch_fast(
            [unmarked(named, mark)], add_special_tokens=add_special_tokens
        )
        return [self._ids.get(token_id, token_id) for token_id in encoding.ids]


def check_encodable(text: str) -> None:
    """Raises InvalidParameter for text with half a surrogate pair, which UTF-8 cannot carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            "prompt", f"lone surrogate U+{ord(text[error.start]):04X} at {error.start}"
        ) from error


def _decoder_rule(backend: Backend) -> PieceRule | None:
    decoder = backend.decoder
    return piece_rule(None if decoder is None else json.loads(decoder.__getstate__()))


def _shrinking(backend: Backend) -> int:
    """Returns how many times the bytes of its tokens a text may have; 0: not known.

    Known for byte-level vocabularies that are used directly, and after a normalization to
    composed characters: three of them at most become one of the same length.
    """
    kind = _state(backend.normalizer).get("type")
    pre_tokenizer = _state(backend.pre_tokenizer)
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    added = backend.get_added_tokens_decoder().values()
    is_known = (
        kind in (None, "NFC")
        and _state(backend.decoder).get("type") == "ByteLevel"
        and any(step.get("type") == "ByteLevel" for step in steps)
        and all(step.get("type") in ("ByteLevel", "Split", "Digits") for step in steps)
        and all(step.get("behavior") != "Removed" for step in steps)
        and all(backend.token_to_id(char) is not None for char in ByteLevel.alphabet())
        and not any(token.lstrip or token.rstrip for token in added)
    )
    if not is_known:
        return 0
    return NFC_SHRINKS if kind == "NFC" else 1


def _kept_ids(backend: Backend) -> KeptIds | None:
    """Returns a cache of ids, for a tokenizer that encodes the text between two of its added
    tokens by itself. Others also depend on spaces, letters or the start of the text."""
    added = backend.get_added_tokens_decoder().values()
    if not _shrinking(backend) or any(token.single_word for token in added):
        return None
    return KeptIds(re.compile(pattern_of([one.content for one in added if not one.normalized])))


def _state(part: Any) -> dict[str, Any]:
    """Returns a part of a tokenizer as tokenizer.json describes it."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _apply(backend: Backend, config: TokenizerConfig) -> None:
    """Adds the tokens that transformers adds on loading; refuses those that it would silently
    renumber."""
    added = backend.get_added_tokens_decoder().values()
    known = {token.content: token for token in added}
    for token_id, flags in sorted(config.added_tokens.items()):
        token = AddedToken(**flags)
        content = token.content
        if content in known and repr(known[content]) == repr(token):
            continue
        backend.add_tokens([token])
        known[content] = token
        if backend.token_to_id(content) != token_id:
            raise TextInvalid(
                f"tokenizer_config.json gives {content!r} the id {token_id}, "
                f"tokenizer.json {backend.token_to_id(content)}: the two files do not match"
            )
    named = frozenset(config.special_tokens.values())
    for content in (*config.special_tokens.values(), *config.extra_special_tokens):
        # A special token outside the vocabulary would get an id that the model does not have.
        if backend.token_to_id(content) is None:
            continue
        if content not in known:
            known[content] = AddedToken(content, special=True, normalized=False)
        elif known[content].special or content not in named:
            continue
        known[content].special = True
        backend.add_special_tokens([known[content]])
