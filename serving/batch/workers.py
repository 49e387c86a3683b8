"""Processes on this machine that answer chunks, one per processor."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from serving.batch.answering import Answerer
from serving.batch.errors import BatchError
from serving.batch.plan import BatchPlan, WorkFolder
from serving.batch.sources import Chunk

ATTEMPTS = 2
"""After this many deaths of its process, a chunk is answered with care: its process announces each image, and the image
whose process dies then is an error. After as many deaths beside its images, the whole chunk is an error."""


class Done(NamedTuple):
    """A chunk whose answers are stored; the first one of each process only reports that it is ready."""

    images: int
    errors: int


@dataclass(eq=False)
class _Work:
    """A chunk, and what its processes have died of."""

    chunk: Chunk
    deaths: int = 0
    """Those that no image is to blame for."""
    careful: bool = False
    lost: set[int] = field(default_factory=set)
    """Places of images that are not tried again."""

    def died(self, place: int | None) -> None:
        """Another process has died; with care, while it worked on the image in this place."""
        if place is not None:
            self.lost.add(place)
            return
        self.deaths += 1
        if self.deaths >= ATTEMPTS:
            if self.careful:
                self.lost.update(range(self.chunk.rows))
            self.careful, self.deaths = True, 0


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    connection: Connection
    ready: bool = False
    work: _Work | None = None
    place: int | None = None
    """Of the image that it works on, if it works with care."""

    def give(self, work: _Work) -> None:
        self.work, self.place = work, None
        # A process that has just died is noticed when its outcome is awaited.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send((work.chunk, frozenset(work.lost), work.careful))

    def taken_back(self) -> _Work:
        """The work of a process that has died; a BatchError if it had none."""
        self.process.join()
        if self.work is None:
            code = self.process.exitcode
            raise BatchError(f"a process that answers images ended with code {code} before its first image")
        self.work.died(self.place)
        return self.work


def answer_chunks(plan: BatchPlan, out: Path, waiting: Iterator[Chunk], *, workers: int) -> Iterator[Done]:
    """Answer and store all chunks; yields what is done, in any order."""
    context = multiprocessing.get_context("spawn")
    pool: list[_Worker] = []
    again: deque[_Work] = deque()

    def start() -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, plan, out), daemon=True)
        process.start()
        theirs.close()
        pool.append(_Worker(process, ours))

    try:
        for _ in range(workers):
            start()
        while pool:
            # One at a time: a second chunk that waits for a busy process would keep another one idle at the end.
            for worker in [each for each in pool if each.ready and each.work is None]:
                if again:
                    worker.give(again.popleft())
                elif (chunk := next(waiting, None)) is not None:
                    worker.give(_Work(chunk))
                else:
                    worker.connection.close()
                    pool.remove(worker)
            # Without any connection it would wait for ever.
            for connection in wait([worker.connection for worker in pool]) if pool else ():
                worker = next(each for each in pool if each.connection is connection)
                try:
                    outcome = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    pool.remove(worker)
                    again.append(worker.taken_back())
                    start()
                    continue
                if isinstance(outcome, str):
                    raise BatchError(outcome)
                if isinstance(outcome, Done):
                    worker.ready, worker.work = True, None
                    yield outcome
                else:
                    worker.place = outcome
    finally:
        for worker in pool:
            worker.connection.close()
            worker.process.terminate()


def _serve(connection: Connection, plan: BatchPlan, out: Path) -> None:
    """Answer chunks until the parent closes its end, or dies."""
    # Ctrl-C reaches all processes of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = WorkFolder(out)
    try:
        answerer = Answerer(plan)
        connection.send(Done(0, 0))
        while True:
            chunk, lost, careful = connection.recv()
            answers = answerer.answer(chunk, lost, connection.send) if careful else answerer.answer(chunk, lost)
            folder.store(chunk.number, answers)
            connection.send(Done(chunk.rows, chunk.rows - answers.column("error_code").null_count))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(f"{type(error).__name__}: {error}")
