"""Files that take far longer to decode than their size suggests are refused immediately."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from PIL import Image

from serving.bundle.errors import ImageError
from serving.bundle.model import Model
from serving.bundle.pixels import MOST_SCANS, decode
from serving.inference.queue import InferenceQueue
from tests.helpers_serving import PATIENCE, image_bytes, saved
from tests.helpers_slow import run_lengths, with_profiles, with_scans
from tests.serving.inference.test_queue import with_queue


def refused(content: bytes, code: str, message: str) -> None:
    started = time.process_time()
    with pytest.raises(ImageError, match=message) as caught:
        decode(content)
    assert caught.value.code == code
    assert time.process_time() - started < 0.1


@pytest.mark.parametrize("between", [b"", b"\xff\x01\xff\xff", b"\xff\x02\xff\xff", b"\xff\xd0\xff\xff", b"\xff" * 9])
def test_the_number_of_jpeg_scans_is_limited(between: bytes) -> None:
    """Also with bytes between the scans that look like the header of a long segment."""
    content = with_scans(1000)
    refused(content.replace(b"\xff\xda", between + b"\xff\xda"), "broken_image", "got at least 65; .* up to 64 scans")


def test_the_number_of_jpeg_segments_is_limited() -> None:
    content = with_scans(0, side=8)
    comments = b"\xff\xfe\x00\x04\xff\xda" * 10_000
    refused(content[:2] + comments + content[2:], "broken_image", "in 4096 segments")


def test_a_progressive_photograph_is_read() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8))
    assert decode(saved(noise, "JPEG", progressive=True, quality=95)).size == (300, 200)
    assert decode(with_scans(MOST_SCANS - 10, side=8)).size == (8, 8)


def test_what_only_looks_like_a_scan_does_not_count() -> None:
    """Within a segment, and in the video that some cameras append."""
    photograph = image_bytes(kind="JPEG", comment=b"\xff\xda" * 100)
    assert decode(photograph + b"\xff\xda" * 1000).size == (8, 8)


def test_a_png_has_one_colour_profile() -> None:
    refused(with_profiles(200), "broken_image", "got 200 iCCP chunks; allowed: one")
    assert decode(with_profiles(1)).size == (4, 4)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_bmp_is_not_compressed(bits: int) -> None:
    message = "run-length encoding; allowed: BMP that is not compressed"
    refused(run_lengths(2000, bits=bits), "unsupported_image", message)


def test_an_image_that_is_never_decoded_does_not_hold_up_the_end(model: Model) -> None:
    stuck = threading.Event()

    async def body(queue: InferenceQueue) -> None:
        queue.submit(lambda: b"junk" if stuck.wait(PATIENCE) else b"", queue.loaded.default_options, queue.loaded)
        await asyncio.to_thread(queue.close, 0.1)
        assert not stuck.is_set()
        stuck.set()

    with_queue(model, body)
