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

AHEAD = 2
"""Chunks that a process has been given: one in work, and one so that it need not wait."""
ATTEMPTS = 2
"""A chunk whose process dies is tried again. The second time it ends the run, which can be continued."""


class Done(NamedTuple):
    """A chunk whose answers are stored; the first one of each process only says that it is ready."""

    images: int
    errors: int


def answer_chunks(
    plan: BatchPlan, out: Path, waiting: Iterator[Chunk], *, workers: int, threads: int
) -> Iterator[Done]:
    """Answer and store all chunks; yields what is done, in any order."""
    context = multiprocessing.get_context("spawn")
    pool: list[_Worker] = []
    attempts: dict[int, int] = {}
    again: deque[Chunk] = deque()

    def start() -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, plan, out, threads), daemon=True)
        process.start()
        theirs.close()
        pool.append(_Worker(process, ours))

    try:
        for _ in range(workers):
            start()
        while pool:
            for worker in list(pool):
                while worker.ready and len(worker.given) < AHEAD:
                    chunk = again.popleft() if again else next(waiting, None)
                    if chunk is None:
                        break
                    worker.give(chunk)
                if worker.ready and not worker.given:
                    worker.connection.close()
                    pool.remove(worker)
            # Without any connection it would wait for ever.
            for connection in wait([worker.connection for worker in pool]) if pool else ():
                worker = next(each for each in pool if each.connection is connection)
                try:
                    outcome = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    pool.remove(worker)
                    again.extend(_lost(worker, attempts))
                    start()
                    continue
                if isinstance(outcome, str):
                    raise BatchError(outcome)
                if worker.ready:
                    worker.given.popleft()
                worker.ready = True
                yield outcome
    finally:
        for worker in pool:
            worker.connection.close()
            worker.process.terminate()


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    connection: Connection
    ready: bool = False
    given: deque[Chunk] = field(default_factory=deque)

    def give(self, chunk: Chunk) -> None:
        self.given.append(chunk)
        # A process that has just died is noticed when its outcome is awaited.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(chunk)


def _lost(worker: _Worker, attempts: dict[int, int]) -> list[Chunk]:
    """The chunks of a process that died; a BatchError if one of them was in work in too many of those."""
    worker.process.join()
    code = worker.process.exitcode
    if not worker.given:
        raise BatchError(f"a process that answers images ended with code {code} before its first image")
    first = worker.given[0]
    attempts[first.number] = attempts.get(first.number, 0) + 1
    if attempts[first.number] >= ATTEMPTS:
        raise BatchError(
            f"a process that answers images ended with code {code}, {ATTEMPTS} times on images {first.first} to "
            f"{first.first + first.rows - 1}; the same command continues the run"
        )
    return list(worker.given)


def _serve(connection: Connection, plan: BatchPlan, out: Path, threads: int) -> None:
    """Answer chunks until the parent closes its end, or dies."""
    # Ctrl-C reaches all processes of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work = WorkFolder(out)
    try:
        answerer = Answerer(plan, threads)
        connection.send(Done(0, 0))
        while True:
            chunk: Chunk = connection.recv()
            answers = answerer.answer(chunk)
            work.store(chunk.number, answers)
            connection.send(Done(chunk.rows, chunk.rows - answers.column("error_code").null_count))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        with contextlib.suppress(OSError):
            connection.send(f"{type(error).__name__}: {error}")
