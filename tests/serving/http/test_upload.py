"""Bodies that expand while they are parsed: a few bytes each create objects of hundreds of bytes."""

from __future__ import annotations

import base64
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from serving.errors import MalformedRequestError
from serving.http.upload import JSON, Upload
from tests.helpers_serving import image_bytes

RED = image_bytes()
MOST = 64


@pytest.fixture
def peak() -> Iterator[Callable[[], int]]:
    """The most bytes that Python's objects took since the test began."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@pytest.mark.parametrize(
    "body",
    [
        b'{"images":[' + b"1," * 50_000 + b"1]}",
        b'{"images":[' + b'"",' * 30_000 + b'""]}',
        b'{"images":[],' + b",".join(b'"%d":1' % number for number in range(10_000)) + b"}",
        b'{"images":' + b"[" * 50_000,
        b'{"images":[' + b"{}" * 50_000,
    ],
    ids=["numbers", "empty texts", "other keys", "depth", "objects"],
)
def test_json_of_many_little_parts_takes_no_memory(body: bytes, peak: Callable[[], int]) -> None:
    for read in (Upload(JSON, body.replace(b"images", b"image", 1)).image, lambda: Upload(JSON, body).images(MOST)):
        with pytest.raises(MalformedRequestError, match=r"too many parts: got \d+ commas and opening brackets"):
            read()
    # The two bodies themselves and very little more.
    assert peak() < 4 * len(body) + 100_000


def test_as_many_images_as_allowed_are_read_however_they_are_written() -> None:
    text = "data:image/png;charset=utf-8;base64," + base64.b64encode(RED).decode()
    assert Upload(JSON, json.dumps({"images": [text] * MOST}, indent=2).encode()).images(MOST) == [RED] * MOST
    assert Upload(JSON, json.dumps({"image": text}).encode()).image() == RED


def test_spaces_within_base64_take_no_memory(peak: Callable[[], int]) -> None:
    body = b'{"image":"' + b"AA " * 200_000 + b'"}'
    assert Upload(JSON, body).image() == bytes(300_000)
    assert peak() < 5 * len(body)


@pytest.mark.parametrize("between", [" ", "\n", "\r\n", "\t", "\f", "\v"])
def test_base64_may_be_broken_into_lines(between: str) -> None:
    text = base64.b64encode(RED).decode()
    body = json.dumps({"image": between.join([text[:7], text[7:30], text[30:], ""])})
    assert Upload(JSON, body.encode()).image() == RED


@pytest.mark.parametrize("text", ["AAAÄ", "AAAA\u2003", "\ud800", "AAA", "A.AA"])
def test_what_is_not_base64_is_refused(text: str) -> None:
    with pytest.raises(MalformedRequestError):
        Upload(JSON, json.dumps({"image": text}).encode()).image()


def test_a_form_of_boundaries_is_refused_at_once() -> None:
    """Each of them takes the parser ten microseconds, whether or not it ends a part."""
    part = b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
    body = part + b"\r\n--bX" * 1_000_000 + b"\r\n--b--\r\n"
    started = time.thread_time()
    with pytest.raises(MalformedRequestError, match="1000001 boundaries; allowed: up to 8 files"):
        Upload("multipart/form-data; boundary=b", body).image()
    assert time.thread_time() - started < 0.5
