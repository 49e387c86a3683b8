"""Processes on this machine that answer chunks, one per processor.

A process stores a chunk while it answers the next one: waiting for the disk costs no time of the graph. A chunk counts
as done when it is on the disk.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from serving.batch.answering import Answerer
from serving.batch.errors import BatchError
from serving.batch.plan import BatchPlan, WorkFolder
from serving.batch.sources import Chunk

ATTEMPTS = 2
"""After its process died this many times, a chunk is answered carefully: the process announces each image, and the
image during which it dies is recorded as an error. After as many deaths between images, the whole chunk is an error."""


class Done(NamedTuple):
    """A chunk whose answers are stored; the first one of each process only reports that it is ready."""

    images: int
    errors: int


class Answered(NamedTuple):
    """A chunk whose answers are being stored: its process can have another one. Earlier chunks of it are stored."""


@dataclass(eq=False)
class _Work:
    """A chunk, and how often its processes died."""

    chunk: Chunk
    deaths: int = 0
    """Deaths that no image caused."""
    careful: bool = False
    lost: set[int] = field(default_factory=set)
    """Places of images that are not tried again."""
    returned: bool = False
    """Whether a process died with this chunk. Until it is stored, no other chunk then shares its process and could be
    blamed for its failure."""

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
    storing: _Work | None = None
    """The chunk before, until it is stored."""
    place: int | None = None
    """Of the image that it works on, if it works with care."""

    @property
    def free(self) -> bool:
        return self.ready and self.work is None and not (self.storing is not None and self.storing.returned)

    @property
    def busy(self) -> bool:
        return self.work is not None or self.storing is not None

    def give(self, work: _Work) -> None:
        self.work, self.place = work, None
        # A process that has just died is noticed when its outcome is awaited.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send((work.chunk, frozenset(work.lost), work.careful))

    def heard(self, outcome: Answered | Done | int | None) -> None:
        """Take note of what the process has reported."""
        if isinstance(outcome, Answered):
            self.work, self.storing = None, self.work
        elif isinstance(outcome, Done):
            self.ready, self.storing = True, None
        else:
            self.place = outcome

    def taken_back(self) -> list[_Work]:
        """The work of a process that has died; a BatchError if it had none.

        It is blamed on the chunk that was being answered, or on one that was being stored if there is no other.
        """
        self.process.join()
        held = [work for work in (self.work, self.storing) if work is not None]
        if not held:
            code = self.process.exitcode
            raise BatchError(f"a process that answers images ended with code {code} before its first image")
        held[0].died(self.place if self.work is not None else None)
        for work in held:
            work.returned = True
        return held


def answer_chunks(plan: BatchPlan, out: Path, waiting: Iterator[Chunk], *, workers: int) -> Iterator[Done]:
    """Answer and store all chunks; yields what is done, in any order."""
    context = multiprocessing.get_context("spawn")
    pool: list[_Worker] = []
    again: deque[_Work] = deque()
    all_given = False

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
            for worker in [each for each in pool if each.free]:
                if again and worker.storing is None:
                    worker.give(again.popleft())
                elif (chunk := next(waiting, None)) is not None:
                    worker.give(_Work(chunk))
                elif worker.storing is None:
                    worker.connection.close()
                    pool.remove(worker)
                    all_given = True
            # A process that is still starting has nothing to do any more.
            if all_given and not again and not any(worker.busy for worker in pool):
                return
            for connection in wait([worker.connection for worker in pool]):
                worker = next(each for each in pool if each.connection is connection)
                try:
                    outcome = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    pool.remove(worker)
                    again.extend(worker.taken_back())
                    start()
                    continue
                if isinstance(outcome, str):
                    raise BatchError(outcome)
                worker.heard(outcome)
                if isinstance(outcome, Done):
                    yield outcome
    finally:
        for worker in pool:
            worker.connection.close()
            worker.process.terminate()


def _serve(connection: Connection, plan: BatchPlan, out: Path) -> None:
    """Answer chunks until the parent closes its end, or dies."""
    # Ctrl-C reaches all processes of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _Storing(connection, WorkFolder(out)) as storing:
        try:
            answerer = Answerer(plan)
            storing.tell(Done(0, 0))
            while True:
                chunk, lost, careful = connection.recv()
                answers = answerer.answer(chunk, lost, storing.tell) if careful else answerer.answer(chunk, lost)
                storing.store(chunk.number, answers)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:
            storing.tell_problem(error)


class _Storing:
    """Stores one chunk at a time in the background, and reports it to the parent."""

    def __init__(self, connection: Connection, folder: WorkFolder) -> None:
        self._connection, self._folder = connection, folder
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        # Two threads send.
        self._sending = threading.Lock()

    def __enter__(self) -> _Storing:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def tell(self, outcome: Answered | Done | int | str | None) -> None:
        with self._sending:
            self._connection.send(outcome)

    def tell_problem(self, error: Exception) -> None:
        with contextlib.suppress(OSError):
            self.tell(f"{type(error).__name__}: {error}")

    def store(self, number: int, answers: pa.Table) -> None:
        """Begin to store a chunk, once the one before is stored: at most one waits for the disk."""
        if self._pending is not None:
            self._pending.result()
        self.tell(Answered())
        self._pending = self._thread.submit(self._store, number, answers)

    def _store(self, number: int, answers: pa.Table) -> None:
        try:
            self._folder.store(number, answers)
            self.tell(Done(len(answers), len(answers) - answers.column("error_code").null_count))
        except Exception as error:
            # The main thread may be waiting for a chunk that never comes.
            self.tell_problem(error)
