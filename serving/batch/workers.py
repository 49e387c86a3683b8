"""Processes on this machine that answer chunks, one per processor."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

from serving.batch.answering import Answerer
from serving.batch.errors import BatchError
from serving.batch.plan import BatchPlan, WorkFolder
from serving.batch.sources import Chunk

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
            # One at a time: a second chunk that waits for a busy process would keep another one idle at the end.
            for worker in [each for each in pool if each.ready and each.chunk is None]:
                chunk = again.popleft() if again else next(waiting, None)
                if chunk is None:
                    worker.connection.close()
                    pool.remove(worker)
                else:
                    worker.give(chunk)
            # Without any connection it would wait for ever.
            for connection in wait([worker.connection for worker in pool]) if pool else ():
                worker = next(each for each in pool if each.connection is connection)
                try:
                    outcome = worker.connection.recv()
                except (EOFError, ConnectionResetError):
                    pool.remove(worker)
                    again.append(_lost(worker, attempts))
                    start()
                    continue
                if isinstance(outcome, str):
                    raise BatchError(outcome)
                worker.ready, worker.chunk = True, None
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
    chunk: Chunk | None = None
    """In work."""

    def give(self, chunk: Chunk) -> None:
        self.chunk = chunk
        # A process that has just died is noticed when its outcome is awaited.
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(chunk)


def _lost(worker: _Worker, attempts: dict[int, int]) -> Chunk:
    """The chunk of a process that died; a BatchError if too many processes died while it was in work."""
    worker.process.join()
    code, chunk = worker.process.exitcode, worker.chunk
    if chunk is None:
        raise BatchError(f"a process that answers images ended with code {code} before its first image")
    attempts[chunk.number] = attempts.get(chunk.number, 0) + 1
    if attempts[chunk.number] >= ATTEMPTS:
        raise BatchError(
            f"a process that answers images ended with code {code}, {ATTEMPTS} times on images {chunk.first} to "
            f"{chunk.first + chunk.rows - 1}; the same command continues the run"
        )
    return chunk


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
