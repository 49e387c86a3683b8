"""Requests and responses of the routes under /teach."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from serving.bundle.run_verdict import TaughtGrade
from serving.http.schemas import Answer, ApiModel, ModelName, field
from serving.quarantine.api.schemas import ChangeEntry, Id, Ids, ItemEntry, Time
from serving.quarantine.records import ItemKind

_NOON = "2024-01-01T12:00:00.000Z"


class ClassResult(ApiModel):
    """A class whose examples a lesson changes."""

    label: str = field("name of the class", "cow")
    new: bool = field("whether the served model does not know it", True)
    added: int = field("examples that the lesson adds", 12)
    removed: int = field("examples that it takes out", 0)
    images: int = field("images that the class rests on then", 12)
    of: int = field("its examples, each of which is left out in turn", 12)
    right_before: int = field("how many of these the served model recognises while they are left out", 0)
    right_after: int = field("how many the candidate recognises while they are left out", 11)
    known_after: int = field("how many the candidate accepts as known", 12)
    grade: TaughtGrade = field("how far it can be relied on", "good")
    advice: str = field("what would help; empty if nothing has to", "")


class ClassLossEntry(ApiModel):
    """A class that was known before: how many of its images were right before, and are right then."""

    label: str = field("name of the class", "cat")
    images: int = field("number of images, or of vectors that stand in for them", 25)
    before: int = field("right by the served model", 25)
    after: int = field("right by the candidate", 24)
    taken_for: tuple[tuple[str, int], ...] = field("what the others are taken for, and how many", [["cow", 1]])


class OldClassesResult(ApiModel):
    """What a lesson costs the classes that were known before."""

    images: int = field("images, or vectors that stand in for them", 1500)
    before: float | None = field("share that the served model answers right", 0.953)
    after: float | None = field("share that the candidate answers right", 0.951)
    worse: tuple[ClassLossEntry, ...] = Field(description="classes that lose too much: the gate objects")
    changed: tuple[ClassLossEntry, ...] = Field(description="classes with more or fewer right answers")
    missing: tuple[str, ...] = field("classes that nothing could be compared of", [])


class KnownImagesResult(ApiModel):
    """How many known images of earlier classes a lesson would make unknown."""

    images: int = field("images of earlier classes, or vectors that stand in for them", 1500)
    known: int = field("how many of them the served model accepts as known", 1430)
    lost: int = field("how many of these the candidate calls unknown", 12)
    alpha: float = field("share that may become unknown", 0.05)
    too_many: bool = field("whether certainly a larger share does: the gate objects", False)


class ShortClassEntry(ApiModel):
    """A class with too few examples: if it is new it waits, and if it was taught it stays as it is."""

    label: str = field("name of the class", "cow")
    images: int = field("examples that it would have", 1)
    missing: int = field("how many more it needs", 1)
    learned: bool = field("whether the model has learned it, and too few of its examples would be left", False)


class LearnResult(ApiModel):
    """What a candidate would change."""

    classes: tuple[ClassResult, ...]
    accuracy_before: float | None = field(
        "share of these examples that the served model recognises, each left out in turn", 0.1
    )
    accuracy_after: float | None = field("share that the candidate recognises, each left out in turn", 0.95)
    deleted: tuple[str, ...] = field("classes that are taken out", [])
    renamed: dict[str, str] = field("classes with another name", {})
    merged: dict[str, str] = field("classes whose examples become those of another one", {})
    too_few: tuple[ShortClassEntry, ...] = Field(
        default=(), description="classes that were left as they are, because they have too few examples"
    )
    old_classes: OldClassesResult
    known_images: KnownImagesResult | None = Field(
        default=None, description="what becomes unknown; null in a result of an earlier version"
    )
    gate: bool = field("whether no earlier class loses too much, and not too many known images become unknown", True)
    max_loss: float = field("points that an earlier class may lose", 5.0)
    waiting_unknown: int = field("unlabelled images that the served model does not know", 120)
    waiting_known: int = field("how many of them the candidate knows", 80)
    waiting_by_class: dict[str, int] = field("the same by label", {"cow": 80})
    rejects_unknown: bool = field("false if there are too few images to call any image unknown", True)
    seconds: dict[str, float] = field("how long each step took", {"learning": 2.1})


class GroupResult(ApiModel):
    """What grouping has found."""

    images: int = field("unlabelled images", 240)
    known_by_now: int = field("of these, how many the served model knows", 12)
    groups: int = field("number of groups", 4)
    loose: int = field("images in no group", 31)


class TeachingJob(ApiModel):
    """A background job of the server: learning or grouping."""

    id: int = field("its number", 7)
    kind: Literal["learn", "group", "auto"] = field("what it does; auto: it groups and learns automatically", "learn")
    state: Literal["running", "done", "failed", "accepted", "discarded"] = field("how far it is", "running")
    progress: float = field("0 to 1", 0.4)
    step: str = field("what it does now", "learning cow, pig")
    who: str = field("who began it", "ada")
    started_at: Time = field("when it was begun", _NOON)
    seconds: float = field("how long it took, or takes so far", 2.5)
    base: str = field("the version that it continues", "ef3557a7ea7e")
    candidate: str | None = field("the version that it made", "859549a0961c")
    error: str | None = field("why it failed", None)
    accepts: bool = field("whether it publishes its result automatically", False)
    learned: LearnResult | None = Field(description="the result of learning")
    grouped: GroupResult | None = Field(description="the result of grouping")


class TeachStatus(ApiModel):
    """Whether this server can be taught, and what waits."""

    enabled: bool = field("whether it can be taught", True)
    reason: str | None = field("why it cannot be taught", None)
    user: str = field("name of the caller", "ada")
    auto: bool = field("whether the server learns groups of unknown images automatically", False)
    model: ModelName
    waiting: int = field("examples that wait to be added", 24)
    removed: int = field("examples that wait to be taken out", 0)
    classes: dict[str, int] = field("examples that wait, by label", {"cow": 12, "pig": 12})
    unknown: int = field("unlabelled images", 120)
    minimum: int = field("examples of a class that are advised", 20)
    least: int = field("examples that a new class needs", 2)
    too_few: tuple[ShortClassEntry, ...] = Field(
        description="classes that the next lesson leaves as they are, because they have too few examples"
    )
    ready: bool = field("whether a lesson would learn something", True)
    unnamed: tuple[str, ...] = field(
        "classes that the server has learned automatically and that need a name", ["new-1"]
    )
    job: TeachingJob | None = Field(
        description="the job that runs or waits to be accepted, or the last one of the last hour"
    )


class ExampleEntry(ApiModel):
    """A labelled image."""

    id: int = field("its number in the quarantine", 17)
    label: str = field("name of its class", "cow")
    state: Literal["waiting", "learned"] = field("whether the served model has learned it as this", "waiting")
    labelled_by: str | None = field("who labelled it", "ada")
    labelled_at: Time | None = field("when it was labelled", _NOON)


class ExampleDetail(ExampleEntry):
    """A labelled image with what is known about it."""

    received_at: Time = field("when it first arrived", _NOON)
    copies: int = field("how often it arrived", 1)
    width: int = field("pixels", 640)
    height: int = field("pixels", 480)
    kind: ItemKind = field("unknown, audit, or example: given by a person", "unknown")
    best_guess: str | None = field("best guess of the model that answered it", "dog")
    known: bool | None = field("whether that model knew it", False)
    p_value: float | None = field("its p-value then", 0.004)


class ExampleList(ApiModel):
    """Labelled images by number."""

    items: tuple[ExampleDetail, ...]
    next: int | None = field("pass it as `after` to get the next images; null if there are none", 117)


class ClassEntry(ApiModel):
    """A class of the model, or one that has examples or a name and waits to be learned."""

    label: str = field("name of the class", "cow")
    in_model: bool = field("whether the served model has it", True)
    task: int | None = field("number of its task", 3)
    origin: Literal["fit", "taught", "waiting"] = field("learned by a run, taught, or not learned yet", "taught")
    images: int = field("images that the served model has learned it from, those of the run included", 12)
    learned: int = field("examples that the served model was taught", 12)
    waiting: int = field("examples that the next lesson adds", 3)
    removed: int = field("examples that the next lesson takes out", 0)
    extended: bool = field("whether examples were added to it after it was learned", False)
    taught_by: str | None = field("who taught it last", "ada")
    taught_at: str | None = field("when that was", "2024-01-01T12:00:00+00:00")
    created_by: str | None = field("who began it, if it has no example yet", None)
    grade: TaughtGrade | None = field("how far it can be relied on, if it has taught examples", "few examples")
    advice: str = field("what would help; empty if nothing has to", "")
    examples: tuple[ExampleEntry, ...] = Field(description="some of its examples that are in the quarantine")


class ClassList(ApiModel):
    """All classes: those that wait first, then those that were taught, then those of the run."""

    version: str = field("the served version", "ef3557a7ea7e")
    classes: tuple[ClassEntry, ...]
    export_parts: int = field("archives of an export in parts, each of which can be imported", 1)


Label = Annotated[str, Field(description="name of a class", examples=["cow"])]


class ClassBody(ApiModel):
    label: Label


class RenameBody(ApiModel):
    label: Label
    to: str = field("its new name", "cattle")


class MergeClassesBody(ApiModel):
    labels: Annotated[tuple[str, ...], Field(min_length=1, max_length=100)] = field("classes to merge", ["cows"])
    into: str = field("the class that they become examples of", "cow")


class DeleteClassBody(ApiModel):
    label: Label
    examples: Literal["keep", "delete"] = field(
        "keep the images, without a label, or delete them with their files", "keep", default="keep"
    )


class ClassChanged(ApiModel):
    """The result of a change: if the model has the class, everything changes when the job's result is published."""

    items: int = field("examples that were changed at once", 12)
    job: TeachingJob | None = Field(description="the job that changes the model, if the model has the class")


class LearnBody(ApiModel):
    accept: bool = field("publish the result automatically unless the gate objects", False, default=False)
    force: bool = field("... even if the gate objects", False, default=False)


class AcceptBody(ApiModel):
    job: Id = field("number of a finished job", 7)
    force: bool = field("even if the gate objects", False, default=False)


class DiscardBody(ApiModel):
    job: Id = field("number of a finished job", 7)


class Accepted(ApiModel):
    """All workers of this server serve this version now."""

    version: str = field("the served version", "859549a0961c")
    before: str = field("the version before", "ef3557a7ea7e")
    changed: bool = field("false if it was served before", True)
    workers: int = field("workers that serve it", 2)


class AddedExample(ApiModel):
    """An image that is in the quarantine now."""

    id: int = field("its number", 17)
    label: str | None = field("name of its class", "cow")
    duplicate: bool = field("whether the quarantine had it, or one that looks the same", False)
    label_before: str | None = field("the label that it had before", None)
    answer: Answer = Field(description="what the served model answers for it")


class RemoveBody(ApiModel):
    ids: Ids = field("numbers of images", [17, 18])


class FeedbackBody(ApiModel):
    """Feedback of a person on the answer for an image in the quarantine."""

    id: Id = field("number of the image", 17)
    right: bool = field("whether the best guess was right", False)
    label: str | None = field("what it shows, if it was wrong", "cow", default=None)

    @model_validator(mode="after")
    def _label_if_wrong(self) -> FeedbackBody:
        if self.right == (self.label is not None):
            raise ValueError("give label exactly if the answer was wrong")
        return self


class Resemblance(ApiModel):
    """The group that an image without a group resembles most."""

    group: int = field("number of the group", 2)
    similarity: float = field("cosine of the angle to its nearest images", 0.31)


class LooseItem(ItemEntry):
    """An image in no group."""

    looks_like: Resemblance | None


class LooseList(ApiModel):
    """Images in no group, by number."""

    items: tuple[LooseItem, ...]
    next: int | None = field("pass it as `after` to get the next images; null if there are none", 117)


class SplitGroup(ApiModel):
    """The new group."""

    group: int = field("its number", 9)


class VersionEntry(ApiModel):
    """One version on the shelf."""

    version: str = field("digest of the bundle", "859549a0961c")
    created: str = field("when it was made", "2024-01-01T12:00:00+00:00")
    current: bool = field("whether it is served", True)
    previous: bool = field("whether it was served before", False)
    classes: int = field("number of classes", 12)
    lessons: int = field("number of lessons since the run", 2)
    who: str | None = field("who made it", "ada")
    what: str = field("what it changed", "learned cow, pig")


class VersionList(ApiModel):
    """The versions on the shelf, the newest first."""

    versions: tuple[VersionEntry, ...]


class RollbackBody(ApiModel):
    version: Annotated[str, Field(min_length=1, max_length=100)] = field("a version on the shelf", "859549a0961c")


class Log(ApiModel):
    """Who did what, the latest first."""

    changes: tuple[ChangeEntry, ...]


class FailedFile(ApiModel):
    """A file that was not imported."""

    name: str = field("its name in the archive", "cow/7.jpg")
    reason: str = field("why", "image cannot be read")


class Imported(ApiModel):
    """What an import has changed."""

    added: int = field("images that are new in the quarantine", 40)
    duplicates: int = field("images that it had", 3)
    relabelled: int = field("of these, how many have another label now", 1)
    failed: tuple[FailedFile, ...]
    advice: str | None = field(
        "which images of Label Studio's tasks are not in the upload, and how to bring them",
        "1 image is not in the archive: 7.jpg. Put them into the archive.",
        default=None,
    )
