"""Structure-aware hostile files: none within the limits takes more than a second of processor time or 256 MB."""

from __future__ import annotations

import itertools
import os
import random
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pytest

from serving.bundle.errors import ImageError
from serving.bundle.pixels import open_image, to_pixels
from serving.bundle.sections import ImageSpec
from serving.host.memory import limit_free_memory
from serving.quarantine.api.pictures import thumbnail
from serving.quarantine.duplicates import summarize
from tests.conftest import ReportLine
from tests.helpers_hostile import FULL_SIZE, expensive, hostile, worst_known
from tests.helpers_memory import peak_memory
from tests.helpers_serving import image_bytes, serving, write_bundle
from tests.load import http_request, send

SPEC = ImageSpec(height=224, width=224, mode="RGB")
FILES = int(os.environ.get("FUZZ_FILES", "2000"))
MOST_SECONDS = 1.0
MOST_MEGABYTES = 268.0
"""Of memory for one reading: the 256 that docs/howto/deploy.md states for operators, and a few strips of the image."""
MOST_WAITING = 0.5
"""Seconds of a small request while hostile clients upload: 99 of 100 take less, and all on an idle machine."""
IDLE = 20.0
"""Per cent of its processors' time that an idle machine uses for other things."""
CLIENTS, UPLOADS = 8, 10


class Taken(NamedTuple):
    """How long a file took, and the file if it is one of those that clients upload."""

    seconds: float
    """Of processor time, for the longest of its readings."""
    together: float
    megabytes: float
    """Of memory, for the largest of its readings."""
    name: str
    content: bytes


def taken_by(name: str, content: bytes) -> Taken:
    """Read a file as for an answer, and if it is accepted as for the quarantine and as for a page."""
    seconds: list[float] = []
    megabytes = 0.0
    for read in (lambda content: to_pixels(open_image(content), SPEC), summarize, thumbnail):
        outcome: list[bool] = []

        def reading(read: Callable[[bytes], object] = read, outcome: list[bool] = outcome) -> None:
            started = time.thread_time()
            try:
                read(content)
                outcome.append(True)
            except ImageError:
                outcome.append(False)
            seconds.append(time.thread_time() - started)

        megabytes = max(megabytes, peak_memory(reading) / 1e6)
        if outcome == [False]:
            break
    return Taken(max(seconds), sum(seconds), megabytes, name, content)


@pytest.fixture(scope="module")
def known() -> list[Taken]:
    """The files that are known to be expensive, the slowest first."""
    # As in a worker.
    limit_free_memory()
    warnings.simplefilter("ignore")
    taken: list[Taken] = []
    for name, content in itertools.chain(worst_known(FULL_SIZE), expensive()):
        taken.append(taken_by(name, content))
        taken.sort(key=lambda each: -each.seconds)
        # All of them together would take gigabytes.
        taken[CLIENTS:] = [each._replace(content=b"") for each in taken[CLIENTS:]]
    return taken


def test_no_file_takes_more_than_a_second_or_its_memory(known: list[Taken], report_line: ReportLine) -> None:
    warnings.simplefilter("ignore")
    noise = random.Random(20_260_101)
    drawn = (hostile(noise) for _ in range(FILES))
    taken = [*known, *(taken_by(name, content)._replace(content=b"") for name, content in drawn)]
    taken.sort(key=lambda each: -each.seconds)
    worst = "; ".join(f"{each.seconds:.2f} s {each.name}" for each in taken[:5])
    together = max(each.together for each in taken)
    largest = max(taken, key=lambda each: each.megabytes)
    report_line(
        f"hostile structures: {len(taken)} files, at most {taken[0].seconds:.2f} s of processor time for an answer, "
        f"for the quarantine's fingerprint or for a thumbnail, at most {together:.2f} s for all three: {worst}; "
        f"at most {largest.megabytes:.0f} MB of memory for one reading: {largest.name}"
    )
    assert taken[0].seconds <= MOST_SECONDS
    assert largest.megabytes <= MOST_MEGABYTES


def test_small_requests_stay_quick_while_hostile_clients_upload(
    known: list[Taken], tmp_path: Path, report_line: ReportLine
) -> None:
    """Eight clients upload the worst files that are known, over and over."""
    slowest = [each.content for each in known[:CLIENTS]]
    uploads = [http_request("/predict", content) for content in slowest] * UPLOADS
    small = http_request("/predict", image_bytes())
    bundle = write_bundle(tmp_path / "bundle")
    others = psutil.cpu_percent(2)
    settings = {"OPENWORLD_WORKERS": "2"}
    with serving(tmp_path / "home", bundle, settings=settings) as server, ThreadPoolExecutor(1) as other:
        alone = [reply.seconds for reply in send(server.port, [small] * 100, clients=1)]
        hostile_clients = other.submit(send, server.port, uploads, clients=CLIENTS)
        waited = []
        while not hostile_clients.done():
            (reply,) = send(server.port, [small], clients=1)
            assert reply.status == 200
            waited.append(reply.seconds)
        answered = hostile_clients.result()
    median, late, worst = (float(np.quantile(waited, share)) for share in (0.5, 0.99, 1.0))
    report_line(
        f"{len(waited)} small requests beside {len(answered)} hostile ones of {CLIENTS} clients: "
        f"median {median:.3f} s, 99 % {late:.3f} s, worst {worst:.3f} s; without them {float(np.median(alone)):.3f} s; "
        f"other work took {others:.0f} % of the processors"
    )
    assert (worst if others <= IDLE else late) <= MOST_WAITING
