"""Requests to a running server: all images once, or continuous traffic."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from serving.client import Client, Retries, ServiceError
from serving.http.schemas import Answer

CLIENTS, RATE = 8, 33.0
"""Concurrent clients, and the requests per second that they send together; one that is late catches up."""


@dataclass
class Traffic:
    """Clients that send the images of a list in turn until the block ends, and the answers that they got."""

    url: str
    images: Sequence[bytes]
    answers: list[tuple[int, Answer]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __enter__(self) -> Traffic:
        self._stop = threading.Event()
        self._started = time.monotonic()
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self.seconds = time.monotonic() - self._started

    @property
    def rate(self) -> float:
        return len(self.answers) / self.seconds

    def versions(self) -> list[str]:
        return sorted({answer.model.version for _, answer in self.answers})

    def _ask(self, place: int) -> None:
        # Without retries, so that every failed request is counted.
        with Client(self.url, retries=Retries(attempts=1)) as client:
            due = self._started + place / RATE
            while not self._stop.wait(max(due - time.monotonic(), 0.0)):
                due += CLIENTS / RATE
                place = (place + CLIENTS) % len(self.images)
                try:
                    self.answers.append((place, client.predict(self.images[place])))
                except ServiceError as error:
                    self.failures.append(str(error))


def predict_all(url: str, files: Sequence[bytes]) -> list[Answer]:
    with Client(url) as client:
        return [client.predict(content) for content in files]


def served_versions(url: str) -> set[str]:
    """The versions that answer; several requests, because there may be several workers."""
    with Client(url) as client:
        return {client.model().version for _ in range(4)}
