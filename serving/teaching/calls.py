"""The requests of the client of /teach, with the types of their responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from serving.quarantine.api.schemas import Changed, ItemList, Merged, Overview
from serving.teaching.api import schemas

T = TypeVar("T", bound=BaseModel | bytes)

ExportFormat = Literal["folders", "label-studio"]

FILE = "application/octet-stream"


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request and the type of its response; bytes are a file."""

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


def groups(items: int) -> Call[Overview]:
    return Call(Overview, "GET", "/unknowns/groups", {"items": items})


def items(group: int, after: int, limit: int) -> Call[ItemList]:
    return Call(ItemList, "GET", "/unknowns/items", {"group": group, "after": after, "limit": limit})


def loose(after: int, limit: int) -> Call[schemas.LooseList]:
    return Call(schemas.LooseList, "GET", "/teach/loose", {"after": after, "limit": limit})


def image(item: int) -> Call[bytes]:
    return Call(bytes, "GET", f"/unknowns/items/{item}/image")


def split(ids: Sequence[int]) -> Call[schemas.SplitGroup]:
    return _change(schemas.SplitGroup, "/teach/groups/split", ids=list(ids))


def move(ids: Sequence[int], group: int | None) -> Call[Changed]:
    return _change(Changed, "/unknowns/move", again=True, ids=list(ids), group=group)


def merge_groups(groups: Sequence[int]) -> Call[Merged]:
    return _change(Merged, "/unknowns/merge", groups=list(groups))


def junk(ids: Sequence[int]) -> Call[Changed]:
    return _change(Changed, "/unknowns/junk", again=True, ids=list(ids))


def junk_group(group: int) -> Call[Changed]:
    return _change(Changed, "/unknowns/junk", again=True, group=group)


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


def export_archive(format: ExportFormat, label: str | None, part: int | None) -> Call[bytes]:
    optional = {"label": label, "part": part}
    given = {"format": format} | {name: value for name, value in optional.items() if value is not None}
    return Call(bytes, "GET", "/teach/export", given)


def _change(result: type[T], path: str, again: bool = False, **body: Any) -> Call[T]:
    return Call(result, "POST", path, json=body, again=again)
