"""The typed client for /teach, synchronous and for asyncio:

    with Client(url) as client:
        teaching = client.teaching(token, user="ada")
        for path in paths:
            teaching.add("cow", path)
        job = teaching.wait(teaching.learn())
        teaching.accept(job.id)

A request that only reads, or that changes nothing when it is sent twice, is sent again if the server does not respond.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from serving.quarantine.api.schemas import Changed
from serving.teaching.api import schemas

T = TypeVar("T", bound=BaseModel)

POLL = 0.2
"""Seconds between two looks at a job."""
FILE = "application/octet-stream"


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request and the type of its response."""

    result: type[T]
    method: Literal["GET", "POST"]
    path: str
    params: dict[str, Any] = field(default_factory=dict)
    json: dict[str, Any] | None = None
    content: bytes | None = None
    content_type: str | None = None
    again: bool = True
    """Whether it may be sent twice."""


def status() -> Call[schemas.TeachStatus]:
    return Call(schemas.TeachStatus, "GET", "/teach/status")


def job(number: int) -> Call[schemas.TeachingJob]:
    return Call(schemas.TeachingJob, "GET", f"/teach/jobs/{number}")


def classes(examples: int) -> Call[schemas.ClassList]:
    return Call(schemas.ClassList, "GET", "/teach/classes", {"examples": examples})


def create(label: str) -> Call[schemas.ClassChanged]:
    return _change(schemas.ClassChanged, "/teach/classes", label=label)


def rename(label: str, to: str) -> Call[schemas.ClassChanged]:
    return _change(schemas.ClassChanged, "/teach/classes/rename", label=label, to=to)


def merge(labels: Sequence[str], into: str) -> Call[schemas.ClassChanged]:
    return _change(schemas.ClassChanged, "/teach/classes/merge", labels=list(labels), into=into)


def delete(label: str, examples: Literal["keep", "delete"]) -> Call[schemas.ClassChanged]:
    return _change(schemas.ClassChanged, "/teach/classes/delete", label=label, examples=examples)


def examples(
    label: str | None, state: Literal["any", "waiting", "learned"], after: int, limit: int
) -> Call[schemas.ExampleList]:
    given = {"state": state, "after": after, "limit": limit} | ({} if label is None else {"label": label})
    return Call(schemas.ExampleList, "GET", "/teach/examples", given)


def add(label: str | None, content: bytes) -> Call[schemas.AddedExample]:
    given = {} if label is None else {"label": label}
    return Call(schemas.AddedExample, "POST", "/teach/examples", given, content=content, content_type=FILE)


def label(ids: Sequence[int], name: str) -> Call[Changed]:
    return _change(Changed, "/teach/examples/label", again=True, ids=list(ids), label=name)


def label_group(group: int, name: str) -> Call[Changed]:
    return _change(Changed, "/teach/examples/label", again=True, group=group, label=name)


def remove(ids: Sequence[int]) -> Call[Changed]:
    return _change(Changed, "/teach/examples/remove", again=True, ids=list(ids))


def feedback(item: int, right: bool, name: str | None) -> Call[Changed]:
    given: dict[str, Any] = {} if name is None else {"label": name}
    return _change(Changed, "/teach/feedback", again=True, id=item, right=right, **given)


def group() -> Call[schemas.TeachingJob]:
    return _change(schemas.TeachingJob, "/teach/group")


def learn(accept: bool, force: bool) -> Call[schemas.TeachingJob]:
    return _change(schemas.TeachingJob, "/teach/learn", accept=accept, force=force)


def accept(number: int, force: bool) -> Call[schemas.Accepted]:
    return _change(schemas.Accepted, "/teach/accept", again=True, job=number, force=force)


def discard(number: int) -> Call[schemas.TeachingJob]:
    return _change(schemas.TeachingJob, "/teach/discard", again=True, job=number)


def versions() -> Call[schemas.VersionList]:
    return Call(schemas.VersionList, "GET", "/teach/versions")


def roll_back(version: str) -> Call[schemas.Accepted]:
    return _change(schemas.Accepted, "/teach/rollback", again=True, version=version)


def log(limit: int) -> Call[schemas.Log]:
    return Call(schemas.Log, "GET", "/teach/log", {"limit": limit})


def import_archive(content: bytes) -> Call[schemas.Imported]:
    return Call(schemas.Imported, "POST", "/teach/import", content=content, content_type="application/zip")


def _change(result: type[T], path: str, again: bool = False, **body: Any) -> Call[T]:
    return Call(result, "POST", path, json=body, again=again)


class Teaching:
    """Requests under /teach that block until the response arrives. `read` returns the bytes of an image file."""

    def __init__(self, send: Callable[[Call[Any]], Any], read: Callable[[Any], bytes]) -> None:
        self._send, self._read = send, read

    def status(self) -> schemas.TeachStatus:
        """Whether the server can be taught, what waits, and the job that runs."""
        return self._do(status())

    def classes(self, examples: int = 6) -> schemas.ClassList:
        """All classes, with counts and some examples."""
        return self._do(classes(examples))

    def create(self, label: str) -> schemas.ClassChanged:
        """Begin a class that has no example yet."""
        return self._do(create(label))

    def rename(self, label: str, to: str) -> schemas.ClassChanged:
        """Give a class another name."""
        return self._do(rename(label, to))

    def merge(self, labels: Sequence[str], into: str) -> schemas.ClassChanged:
        """Make the examples of classes those of another class."""
        return self._do(merge(labels, into))

    def delete(self, label: str, *, examples: Literal["keep", "delete"] = "keep") -> schemas.ClassChanged:
        """Take a class out, as if it had never been learned."""
        return self._do(delete(label, examples))

    def examples(
        self,
        label: str | None = None,
        *,
        state: Literal["any", "waiting", "learned"] = "any",
        after: int = 0,
        limit: int = 100,
    ) -> schemas.ExampleList:
        """Labelled images."""
        return self._do(examples(label, state, after, limit))

    def add(self, label: str | None, image: Any) -> schemas.AddedExample:
        """Store an image as an example of a class, or without a label."""
        return self._do(add(label, self._read(image)))

    def label(self, ids: Sequence[int], name: str) -> Changed:
        """Make images of the quarantine examples of a class."""
        return self._do(label(ids, name))

    def label_group(self, group: int, name: str) -> Changed:
        """Make all images of a group examples of a class."""
        return self._do(label_group(group, name))

    def remove(self, ids: Sequence[int]) -> Changed:
        """Make images no longer examples; the next lesson takes them out."""
        return self._do(remove(ids))

    def right(self, item: int) -> Changed:
        """The answer for an image in the quarantine was right."""
        return self._do(feedback(item, True, None))

    def wrong(self, item: int, label: str) -> Changed:
        """The answer for an image in the quarantine was wrong: it shows this class."""
        return self._do(feedback(item, False, label))

    def group(self) -> schemas.TeachingJob:
        """Start grouping the unlabelled images."""
        return self._do(group())

    def learn(self, *, accept: bool = False, force: bool = False) -> schemas.TeachingJob:
        """Start learning what is labelled."""
        return self._do(learn(accept, force))

    def job(self, number: int) -> schemas.TeachingJob:
        """A job, with its progress and its result."""
        return self._do(job(number))

    def wait(self, started: schemas.TeachingJob, timeout: float = 300.0) -> schemas.TeachingJob:
        """The job when it has ended; a TimeoutError if that takes too long."""
        until = time.monotonic() + timeout
        while is_open(found := self.job(started.id)):
            if time.monotonic() > until:
                raise TimeoutError(f"job {started.id} is {found.state} after {timeout:g} seconds")
            time.sleep(POLL)
        return found

    def accept(self, number: int, *, force: bool = False) -> schemas.Accepted:
        """Publish the candidate of a job."""
        return self._do(accept(number, force))

    def discard(self, number: int) -> schemas.TeachingJob:
        """Remove the candidate of a job."""
        return self._do(discard(number))

    def versions(self) -> schemas.VersionList:
        """The versions on the shelf."""
        return self._do(versions())

    def roll_back(self, version: str) -> schemas.Accepted:
        """Serve a version of the shelf again."""
        return self._do(roll_back(version))

    def log(self, limit: int = 100) -> schemas.Log:
        """Who did what, the latest first."""
        return self._do(log(limit))

    def import_archive(self, content: bytes) -> schemas.Imported:
        """Add the labelled images of a zip archive."""
        return self._do(import_archive(content))

    def _do(self, call: Call[T]) -> T:
        found: T = self._send(call)
        return found


class AsyncTeaching:
    """The same as `Teaching`, for asyncio: each method returns what that of `Teaching` returns, to be awaited."""

    def __init__(self, send: Callable[[Call[Any]], Awaitable[Any]], read: Callable[[Any], Awaitable[bytes]]) -> None:
        self._send, self._read = send, read

    async def status(self) -> schemas.TeachStatus:
        return await self._do(status())

    async def classes(self, examples: int = 6) -> schemas.ClassList:
        return await self._do(classes(examples))

    async def create(self, label: str) -> schemas.ClassChanged:
        return await self._do(create(label))

    async def rename(self, label: str, to: str) -> schemas.ClassChanged:
        return await self._do(rename(label, to))

    async def merge(self, labels: Sequence[str], into: str) -> schemas.ClassChanged:
        return await self._do(merge(labels, into))

    async def delete(self, label: str, *, examples: Literal["keep", "delete"] = "keep") -> schemas.ClassChanged:
        return await self._do(delete(label, examples))

    async def examples(
        self,
        label: str | None = None,
        *,
        state: Literal["any", "waiting", "learned"] = "any",
        after: int = 0,
        limit: int = 100,
    ) -> schemas.ExampleList:
        return await self._do(examples(label, state, after, limit))

    async def add(self, label: str | None, image: Any) -> schemas.AddedExample:
        return await self._do(add(label, await self._read(image)))

    async def label(self, ids: Sequence[int], name: str) -> Changed:
        return await self._do(label(ids, name))

    async def label_group(self, group: int, name: str) -> Changed:
        return await self._do(label_group(group, name))

    async def remove(self, ids: Sequence[int]) -> Changed:
        return await self._do(remove(ids))

    async def right(self, item: int) -> Changed:
        return await self._do(feedback(item, True, None))

    async def wrong(self, item: int, label: str) -> Changed:
        return await self._do(feedback(item, False, label))

    async def group(self) -> schemas.TeachingJob:
        return await self._do(group())

    async def learn(self, *, accept: bool = False, force: bool = False) -> schemas.TeachingJob:
        return await self._do(learn(accept, force))

    async def job(self, number: int) -> schemas.TeachingJob:
        return await self._do(job(number))

    async def wait(self, started: schemas.TeachingJob, timeout: float = 300.0) -> schemas.TeachingJob:
        async with asyncio.timeout(timeout):
            while is_open(found := await self.job(started.id)):
                await asyncio.sleep(POLL)
        return found

    async def accept(self, number: int, *, force: bool = False) -> schemas.Accepted:
        return await self._do(accept(number, force))

    async def discard(self, number: int) -> schemas.TeachingJob:
        return await self._do(discard(number))

    async def versions(self) -> schemas.VersionList:
        return await self._do(versions())

    async def roll_back(self, version: str) -> schemas.Accepted:
        return await self._do(roll_back(version))

    async def log(self, limit: int = 100) -> schemas.Log:
        return await self._do(log(limit))

    async def import_archive(self, content: bytes) -> schemas.Imported:
        return await self._do(import_archive(content))

    async def _do(self, call: Call[T]) -> T:
        found: T = await self._send(call)
        return found


def is_open(found: schemas.TeachingJob) -> bool:
    """Whether a job has more to do: it runs, or will publish its result by itself."""
    objected = found.learned is not None and not found.learned.gate
    return found.state == "running" or (found.state == "done" and found.accepts and not objected)
