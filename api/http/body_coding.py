"""Compressed request bodies: zstd and gzip, decoded within bounds.

A few bytes may decode to gigabytes. The decoded size is bounded in bytes, and in its ratio to the
compressed size; both bound the time. zstd's window is bounded as well: it is memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping

import zstandard

from api.errors import MAX_ECHO_CHARS
from api.request_errors import ClientError

MAX_RATIO = 128  # of decoded bytes to sent ones
FREE_BYTES = 2**20  # decoded at any ratio
MAX_WINDOW_BYTES = 2**23  # as RFC 8878 recommends
PLAIN = "identity"
_STEP_BYTES = 256  # fed to zstd at once: at most 64 blocks of 128 KiB come of it
_PIECE_BYTES = 65_536


def decoder(coding: str) -> Callable[[bytes, int], bytes] | None:
    """Returns a decoder of bodies within a number of bytes; None for a body as it is. Raises
    ClientError (415) for an unknown coding."""
    coding = coding.strip().lower()
    if coding == PLAIN:
        return None
    pieces = _PIECES.get(coding)
    if pieces is None:
        raise ClientError(
            f"Content-Encoding '{coding[:MAX_ECHO_CHARS]}' is not supported. Bodies may be in "
            "zstd, gzip or identity.",
            status=415,
            code="unsupported_content_encoding",
            param="Content-Encoding",
        )
    return lambda raw, max_bytes: _decoded(raw, pieces, coding, max_bytes)


def _decoded(raw: bytes, pieces: _Pieces, coding: str, max_bytes: int) -> bytes:
    """Raises ClientError: 400 for bytes that are not of the coding or cut off, 413 for too many."""
    limit = min(max_bytes, max(FREE_BYTES, MAX_RATIO * len(raw)))
    decoded = bytearray()
    try:
        for piece in pieces(raw):
            decoded += piece
            if len(decoded) > limit:
                raise ClientError(
                    f"The request body is larger than {limit} bytes once it is decoded: at most "
                    f"{max_bytes} bytes, and {MAX_RATIO} times the compressed size, are decoded.",
                    status=413,
                    code="request_too_large",
                )
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        reason = str(error)[:MAX_ECHO_CHARS] or "it is cut off"
        raise ClientError(
            f"The request body is not valid {coding}: {reason}.",
            code="invalid_content_encoding",
            param="Content-Encoding",
        ) from None
    return bytes(decoded)


_Pieces = Callable[[bytes], Iterator[bytes]]


def _gzip(raw: bytes) -> Iterator[bytes]:
    """Yields what one or more members of gzip hold. Raises zlib.error and EOFError."""
    rest = raw
    while True:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            piece = member.decompress(rest, _PIECE_BYTES)
            rest = member.unconsumed_tail
            if not piece and not rest and not member.eof:
                raise EOFError
            yield piece
        rest = member.unused_data
        if not rest:
            return


def _zstd(raw: bytes) -> Iterator[bytes]:
    """Yields what one or more frames of zstd hold. Raises ZstdError and EOFError."""
    at = 0
    while True:
        frame = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
        while not frame.eof:
            if at >= len(raw):
                raise EOFError
            step = raw[at : at + _STEP_BYTES]
            at += len(step)
            yield frame.decompress(step)
        at -= len(frame.unused_data)
        if at >= len(raw):
            return


_PIECES: Mapping[str, _Pieces] = {"gzip": _gzip, "x-gzip": _gzip, "zstd": _zstd}
