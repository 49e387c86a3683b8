"""Files that take far longer to decode than their size suggests are refused immediately."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from serving.bundle.errors import ImageError
from serving.bundle.model import BundleModel
from serving.bundle.pixels import decode
from serving.bundle.structure import MOST_SCANS
from serving.inference.queue import InferenceQueue
from tests.helpers_hostile import JPEG_FILLINGS, SIZE, jpeg_with, run_lengths, with_scans
from tests.helpers_serving import PATIENCE, image_bytes, saved, serving
from tests.load import http_request, send
from tests.serving.inference.test_queue import with_queue


def refused(content: bytes, code: str, message: str) -> None:
    started = time.process_time()
    with pytest.raises(ImageError, match=message) as caught:
        decode(content)
    assert caught.value.code == code
    # Decoded, each of these files takes many seconds; refused, a few milliseconds, also on a slow machine.
    assert time.process_time() - started < 1


@pytest.mark.parametrize("between", [b"", b"\xff\x01\xff\xff", b"\xff\x02\xff\xff", b"\xff\xd0\xff\xff", b"\xff" * 9])
def test_the_number_of_jpeg_scans_is_limited(between: bytes) -> None:
    """Also with bytes between the scans that look like the header of a long segment."""
    content = with_scans(1000)
    message = "got at least 65; .* up to 64 scans|incomplete segment"
    refused(content.replace(b"\xff\xda", between + b"\xff\xda"), "broken_image", message)


def test_the_number_of_jpeg_segments_is_limited() -> None:
    content = with_scans(0, size=(8, 8))
    comments = b"\xff\xfe\x00\x04\xff\xda" * 10_000
    refused(content[:2] + comments + content[2:], "broken_image", "too many segments: got more than 4096")


def test_a_progressive_photograph_is_read() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8))
    assert decode(saved(noise, "JPEG", progressive=True, quality=95)).size == (300, 200)
    assert decode(with_scans(MOST_SCANS - 10, size=(8, 8))).size == (8, 8)


def test_what_only_looks_like_a_scan_does_not_count() -> None:
    """Within a segment, and in the video that some cameras append."""
    photograph = image_bytes(kind="JPEG", comment=b"\xff\xda" * 100)
    assert decode(photograph + b"\xff\xda" * 1000).size == (8, 8)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_bmp_is_not_compressed(bits: int) -> None:
    message = "run-length encoding; allowed: BMP that is not compressed"
    refused(run_lengths(2000, bits=bits), "unsupported_image", message)


@pytest.mark.long
def test_small_images_are_answered_while_hostile_ones_are_uploaded(bundle: Path, tmp_path: Path) -> None:
    """Each of these once held a thread for 15 seconds and more; there are two threads."""
    hostile = [
        http_request("/predict", jpeg_with(JPEG_FILLINGS[name](SIZE)))
        for name in ("fill", "application", "comments", "photoshop")
    ]
    hostile.append(http_request("/predict", with_scans(10, size=(4000, 4000))))
    small = http_request("/predict", image_bytes())
    with serving(tmp_path / "home", bundle) as server, ThreadPoolExecutor(1) as other:
        uploads = other.submit(send, server.port, hostile, clients=4)
        waited = []
        while not uploads.done() or not waited:
            (reply,) = send(server.port, [small], clients=1)
            assert reply.json()["label"] == "red"
            waited.append(reply.seconds)
        assert {reply.status for reply in uploads.result()} == {200, 422}
    # Far more than it takes (0.01 to 0.1 seconds), and far less than one hostile image took.
    assert max(waited) < 8


def test_an_image_that_is_never_decoded_does_not_hold_up_the_end(model: BundleModel) -> None:
    stuck = threading.Event()

    async def body(queue: InferenceQueue) -> None:
        queue.submit(lambda: b"junk" if stuck.wait(PATIENCE) else b"", queue.loaded.default_options, queue.loaded)
        await asyncio.to_thread(queue.close, 0.1)
        assert not stuck.is_set()
        stuck.set()

    with_queue(model, body)
