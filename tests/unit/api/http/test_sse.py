"""Events as bytes."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from api.http import sse
from api.http.sse import TYPED


def test_an_event_is_one_data_line_and_one_blank_line() -> None:
    assert sse.event({"a": "x\ny"}) == b'data: {"a":"x\\ny"}\n\n'
    assert sse.event({}, "3-17") == b"id: 3-17\ndata: {}\n\n"


def test_a_comment_ends_in_a_blank_line_until_an_id_was_sent() -> None:
    for framing in (sse.PLAIN, TYPED):
        assert framing.keepalive == b": ka\n\n"
        assert framing.behind_keepalive == b":\n\n"
    assert sse.KEEPALIVE_AFTER_ID == b": ka\n"
    assert sse.DONE == b"data: [DONE]\n\n"


@given(text=st.text())
def test_no_client_finds_a_line_end_inside_an_event(text: str) -> None:
    encoded = sse.event({"text": text})
    assert encoded.decode().splitlines() == [encoded.decode()[:-2], ""]
    assert json.loads(encoded.removeprefix(b"data: ")) == {"text": text}
