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
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from serving.quarantine.api.schemas import Changed, ItemList, Merged, Overview
from serving.teaching import calls
from serving.teaching.api import schemas
from serving.teaching.calls import Call

T = TypeVar("T", bound=BaseModel | bytes)

POLL = 0.2
"""Seconds between two looks at a job."""


class Teaching:
    """Requests under /teach that block until the response arrives. `read` returns the bytes of an image file."""

    def __init__(self, send: Callable[[Call[Any]], Any], read: Callable[[Any], bytes]) -> None:
        self._send, self._read = send, read

    def status(self) -> schemas.TeachStatus:
        """Whether the server can be taught, what waits, and the job that runs."""
        return self._do(calls.status())

    def classes(self, examples: int = 6) -> schemas.ClassList:
        """All classes, with counts and some examples."""
        return self._do(calls.classes(examples))

    def create(self, label: str) -> schemas.ClassChanged:
        """Begin a class that has no example yet."""
        return self._do(calls.create(label))

    def rename(self, label: str, to: str) -> schemas.ClassChanged:
        """Give a class another name."""
        return self._do(calls.rename(label, to))

    def merge(self, labels: Sequence[str], into: str) -> schemas.ClassChanged:
        """Make the examples of classes those of another class."""
        return self._do(calls.merge(labels, into))

    def delete(self, label: str, *, examples: Literal["keep", "delete"] = "keep") -> schemas.ClassChanged:
        """Take a class out, as if it had never been learned."""
        return self._do(calls.delete(label, examples))

    def examples(
        self,
        label: str | None = None,
        *,
        state: Literal["any", "waiting", "learned"] = "any",
        after: int = 0,
        limit: int = 100,
    ) -> schemas.ExampleList:
        """Labelled images."""
        return self._do(calls.examples(label, state, after, limit))

    def add(self, label: str | None, image: Any) -> schemas.AddedExample:
        """Store an image as an example of a class, or without a label."""
        return self._do(calls.add(label, self._read(image)))

    def label(self, ids: Sequence[int], name: str) -> Changed:
        """Make images of the quarantine examples of a class."""
        return self._do(calls.label(ids, name))

    def label_group(self, group: int, name: str) -> Changed:
        """Make all images of a group examples of a class."""
        return self._do(calls.label_group(group, name))

    def remove(self, ids: Sequence[int]) -> Changed:
        """Make images no longer examples; the next lesson takes them out."""
        return self._do(calls.remove(ids))

    def right(self, item: int) -> Changed:
        """The answer for an image in the quarantine was right."""
        return self._do(calls.feedback(item, True, None))

    def wrong(self, item: int, label: str) -> Changed:
        """The answer for an image in the quarantine was wrong: it shows this class."""
        return self._do(calls.feedback(item, False, label))

    def group(self) -> schemas.TeachingJob:
        """Start grouping the unlabelled images."""
        return self._do(calls.group())

    def groups(self, items: int = 24) -> Overview:
        """The groups, each with its first images, and the images in no group; `items` of each, at most 500."""
        return self._do(calls.groups(items))

    def items(self, group: int, *, after: int = 0, limit: int = 100) -> ItemList:
        """The images of a group."""
        return self._do(calls.items(group, after, limit))

    def loose(self, *, after: int = 0, limit: int = 100) -> schemas.LooseList:
        """Unlabelled images in no group, with the group that each resembles."""
        return self._do(calls.loose(after, limit))

    def image(self, item: int) -> bytes:
        """The file of an image as it was sent."""
        return self._do(calls.image(item))

    def split(self, ids: Sequence[int]) -> schemas.SplitGroup:
        """Make images a group of their own."""
        return self._do(calls.split(ids))

    def move(self, ids: Sequence[int], group: int | None) -> Changed:
        """Move images to a group, or out of their groups."""
        return self._do(calls.move(ids, group))

    def merge_groups(self, groups: Sequence[int]) -> Merged:
        """Move the images of groups to the first of them."""
        return self._do(calls.merge_groups(groups))

    def junk(self, ids: Sequence[int]) -> Changed:
        """Mark images as useless."""
        return self._do(calls.junk(ids))

    def junk_group(self, group: int) -> Changed:
        """Mark all images of a group as useless."""
        return self._do(calls.junk_group(group))

    def learn(self, *, accept: bool = False, force: bool = False) -> schemas.TeachingJob:
        """Start learning what is labelled."""
        return self._do(calls.learn(accept, force))

    def job(self, number: int) -> schemas.TeachingJob:
        """A job, with its progress and its result."""
        return self._do(calls.job(number))

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
        return self._do(calls.accept(number, force))

    def discard(self, number: int) -> schemas.TeachingJob:
        """Remove the candidate of a job."""
        return self._do(calls.discard(number))

    def versions(self) -> schemas.VersionList:
        """The versions on the shelf."""
        return self._do(calls.versions())

    def roll_back(self, version: str) -> schemas.Accepted:
        """Serve a version of the shelf again."""
        return self._do(calls.roll_back(version))

    def log(self, limit: int = 100) -> schemas.Log:
        """Who did what, the latest first."""
        return self._do(calls.log(limit))

    def import_archive(self, content: bytes) -> schemas.Imported:
        """Add the labelled images of a zip archive."""
        return self._do(calls.import_archive(content))

    def export_archive(
        self, format: calls.ExportFormat = "folders", label: str | None = None, *, part: int | None = None
    ) -> bytes:
        """A zip archive of labels and images, of one class or of all; or a part of it that can be imported, from 1 to
        `classes().export_parts`."""
        return self._do(calls.export_archive(format, label, part))

    def _do(self, call: Call[T]) -> T:
        found: T = self._send(call)
        return found


class AsyncTeaching:
    """The same as `Teaching`, for asyncio: each method returns what that of `Teaching` returns, to be awaited."""

    def __init__(self, send: Callable[[Call[Any]], Awaitable[Any]], read: Callable[[Any], Awaitable[bytes]]) -> None:
        self._send, self._read = send, read

    async def status(self) -> schemas.TeachStatus:
        return await self._do(calls.status())

    async def classes(self, examples: int = 6) -> schemas.ClassList:
        return await self._do(calls.classes(examples))

    async def create(self, label: str) -> schemas.ClassChanged:
        return await self._do(calls.create(label))

    async def rename(self, label: str, to: str) -> schemas.ClassChanged:
        return await self._do(calls.rename(label, to))

    async def merge(self, labels: Sequence[str], into: str) -> schemas.ClassChanged:
        return await self._do(calls.merge(labels, into))

    async def delete(self, label: str, *, examples: Literal["keep", "delete"] = "keep") -> schemas.ClassChanged:
        return await self._do(calls.delete(label, examples))

    async def examples(
        self,
        label: str | None = None,
        *,
        state: Literal["any", "waiting", "learned"] = "any",
        after: int = 0,
        limit: int = 100,
    ) -> schemas.ExampleList:
        return await self._do(calls.examples(label, state, after, limit))

    async def add(self, label: str | None, image: Any) -> schemas.AddedExample:
        return await self._do(calls.add(label, await self._read(image)))

    async def label(self, ids: Sequence[int], name: str) -> Changed:
        return await self._do(calls.label(ids, name))

    async def label_group(self, group: int, name: str) -> Changed:
        return await self._do(calls.label_group(group, name))

    async def remove(self, ids: Sequence[int]) -> Changed:
        return await self._do(calls.remove(ids))

    async def right(self, item: int) -> Changed:
        return await self._do(calls.feedback(item, True, None))

    async def wrong(self, item: int, label: str) -> Changed:
        return await self._do(calls.feedback(item, False, label))

    async def group(self) -> schemas.TeachingJob:
        return await self._do(calls.group())

    async def groups(self, items: int = 24) -> Overview:
        return await self._do(calls.groups(items))

    async def items(self, group: int, *, after: int = 0, limit: int = 100) -> ItemList:
        return await self._do(calls.items(group, after, limit))

    async def loose(self, *, after: int = 0, limit: int = 100) -> schemas.LooseList:
        return await self._do(calls.loose(after, limit))

    async def image(self, item: int) -> bytes:
        return await self._do(calls.image(item))

    async def split(self, ids: Sequence[int]) -> schemas.SplitGroup:
        return await self._do(calls.split(ids))

    async def move(self, ids: Sequence[int], group: int | None) -> Changed:
        return await self._do(calls.move(ids, group))

    async def merge_groups(self, groups: Sequence[int]) -> Merged:
        return await self._do(calls.merge_groups(groups))

    async def junk(self, ids: Sequence[int]) -> Changed:
        return await self._do(calls.junk(ids))

    async def junk_group(self, group: int) -> Changed:
        return await self._do(calls.junk_group(group))

    async def learn(self, *, accept: bool = False, force: bool = False) -> schemas.TeachingJob:
        return await self._do(calls.learn(accept, force))

    async def job(self, number: int) -> schemas.TeachingJob:
        return await self._do(calls.job(number))

    async def wait(self, started: schemas.TeachingJob, timeout: float = 300.0) -> schemas.TeachingJob:
        async with asyncio.timeout(timeout):
            while is_open(found := await self.job(started.id)):
                await asyncio.sleep(POLL)
        return found

    async def accept(self, number: int, *, force: bool = False) -> schemas.Accepted:
        return await self._do(calls.accept(number, force))

    async def discard(self, number: int) -> schemas.TeachingJob:
        return await self._do(calls.discard(number))

    async def versions(self) -> schemas.VersionList:
        return await self._do(calls.versions())

    async def roll_back(self, version: str) -> schemas.Accepted:
        return await self._do(calls.roll_back(version))

    async def log(self, limit: int = 100) -> schemas.Log:
        return await self._do(calls.log(limit))

    async def import_archive(self, content: bytes) -> schemas.Imported:
        return await self._do(calls.import_archive(content))

    async def export_archive(
        self, format: calls.ExportFormat = "folders", label: str | None = None, *, part: int | None = None
    ) -> bytes:
        return await self._do(calls.export_archive(format, label, part))

    async def _do(self, call: Call[T]) -> T:
        found: T = await self._send(call)
        return found


def is_open(found: schemas.TeachingJob) -> bool:
    """Whether a job has more to do: it runs, or will publish its result automatically."""
    objected = found.learned is not None and not found.learned.gate
    return found.state == "running" or (found.state == "done" and found.accepts and not objected)
