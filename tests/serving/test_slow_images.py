"""Files that would take far longer to decode than their bytes and pixels say are refused, and at once."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from PIL import Image

from serving.errors import BrokenImageError, ImageFormatError
from serving.preprocess import MOST_SCANS, decode
from serving.queue import InferenceQueue
from serving.runtime import Model
from tests.helpers_serving import image_bytes, saved
from tests.helpers_slow import run_lengths, with_profiles, with_scans
from tests.serving.test_queue import with_queue


def refused(content: bytes, error: type[Exception], message: str) -> None:
    started = time.process_time()
    with pytest.raises(error, match=message):
        decode(content)
    assert time.process_time() - started < 0.1


@pytest.mark.parametrize("between", [b"", b"\xff\x01\xff\xff", b"\xff\x02\xff\xff", b"\xff\xd0\xff\xff", b"\xff" * 9])
def test_a_jpeg_has_so_many_scans(between: bytes) -> None:
    """Whatever stands between them and looks like the head of something long."""
    content = with_scans(1000)
    refused(content.replace(b"\xff\xda", between + b"\xff\xda"), BrokenImageError, "got at least 65; .* up to 64 scans")


def test_a_jpeg_has_so_many_segments() -> None:
    content = with_scans(0, side=8)
    comments = b"\xff\xfe\x00\x04\xff\xda" * 10_000
    refused(content[:2] + comments + content[2:], BrokenImageError, "in 4096 segments")


def test_a_progressive_photograph_is_read() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8))
    assert decode(saved(noise, "JPEG", progressive=True, quality=95)).size == (300, 200)
    assert decode(with_scans(MOST_SCANS - 10, side=8)).size == (8, 8)


def test_what_only_looks_like_a_scan_does_not_count() -> None:
    """Within a segment, and in the film that some cameras append."""
    photograph = image_bytes(kind="JPEG", comment=b"\xff\xda" * 100)
    assert decode(photograph + b"\xff\xda" * 1000).size == (8, 8)


def test_a_png_has_one_colour_profile() -> None:
    refused(with_profiles(200), BrokenImageError, "got 200 iCCP chunks; allowed: one")
    assert decode(with_profiles(1)).size == (4, 4)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_bmp_is_not_compressed(bits: int) -> None:
    refused(run_lengths(2000, bits=bits), ImageFormatError, "run-length encoding; allowed: BMP that is not compressed")


def test_an_image_that_is_never_decoded_does_not_hold_up_the_end(model: Model) -> None:
    stuck = threading.Event()

    async def body(queue: InferenceQueue) -> None:
        queue.ask(lambda: b"junk" if stuck.wait(20) else b"", queue.served.question, queue.served)
        started = time.monotonic()
        await asyncio.to_thread(queue.close, 0.1)
        assert time.monotonic() - started < 5
        stuck.set()

    with_queue(model, body)
