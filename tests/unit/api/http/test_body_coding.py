"""Compressed bodies: what is decoded, and what is refused before it grows."""

from __future__ import annotations

import gzip
import tracemalloc

import pytest
import zstandard

from api.http.body_coding import FREE_BYTES, MAX_RATIO, decoder
from api.request_errors import ClientError

MAX_BYTES = 2**25
TEXT = b'{"a": "' + bytes(range(32, 127)) * 3000 + b'"}'


def zstd(raw: bytes, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(raw)


def streamed(raw: bytes) -> bytes:
    """Without its size, as a client that compresses as it sends."""
    made = zstandard.ZstdCompressor().compressobj()
    return made.compress(raw) + made.flush()


def decoded(coding: str, raw: bytes, max_bytes: int = MAX_BYTES) -> bytes:
    decode = decoder(coding)
    assert decode is not None
    return decode(raw, max_bytes)


@pytest.mark.parametrize("text", [b"", b"{}", TEXT])
@pytest.mark.parametrize(
    ("coding", "compress"),
    [("gzip", gzip.compress), ("X-GZIP ", gzip.compress), ("zstd", zstd), (" Zstd", streamed)],
)
def test_a_body_is_what_was_compressed(coding: str, compress: object, text: bytes) -> None:
    assert callable(compress)
    assert decoded(coding, compress(text)) == text
    assert decoded(coding, compress(text) + compress(b"more")) == text + b"more"


def test_a_plain_body_is_not_decoded() -> None:
    assert decoder("identity") is None


@pytest.mark.parametrize("coding", ["br", "deflate", "identity, gzip", "", "x" * 5000])
def test_another_coding_is_a_415(coding: str) -> None:
    with pytest.raises(ClientError) as refused:
        decoder(coding)
    assert refused.value.status == 415


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("zstd", zstd)])
def test_a_body_that_is_cut_off_or_garbled_is_a_400(coding: str, compress: object) -> None:
    assert callable(compress)
    whole = compress(TEXT)
    for raw in (b"", whole[:-1], whole[: len(whole) // 2], b"{}", whole + b"xyzzy", whole[:5]):
        with pytest.raises(ClientError) as refused:
            decoded(coding, raw)
        assert (refused.value.status, refused.value.code) == (400, "invalid_content_encoding")


@pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("zstd", zstd)])
@pytest.mark.parametrize(
    ("num_bytes", "max_bytes"),
    [(2**30 // 4, MAX_BYTES), (2**16 + 1, 2**16), (FREE_BYTES * 4, 2**30)],
)
def test_a_bomb_is_a_413_before_it_is_decoded(
    coding: str, compress: object, num_bytes: int, max_bytes: int
) -> None:
    assert callable(compress)
    bomb = compress(bytes(num_bytes))
    tracemalloc.start()
    try:
        with pytest.raises(ClientError) as refused:
            decoded(coding, bomb, max_bytes)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert refused.value.status == 413
    limit = min(max_bytes, max(FREE_BYTES, MAX_RATIO * len(bomb)))
    assert peak < 3 * limit + 2**24


def test_a_window_that_is_memory_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, enable_ldm=True)
    made = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    raw = made.compress(b"{}") + made.flush()
    with pytest.raises(ClientError) as refused:
        decoded("zstd", raw)
    assert refused.value.status == 400
