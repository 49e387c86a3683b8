"""Requests and responses of the pages under /unknowns."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from serving.http.schemas import ApiModel, ModelName, field
from serving.quarantine.records import ItemKind, ItemState
from serving.telemetry.logs import timestamp

LARGEST_ID = 2**31 - 1
MOST_IDS = 50_000
Id = Annotated[int, Field(strict=True, ge=1, le=LARGEST_ID)]
Ids = Annotated[tuple[Id, ...], Field(min_length=1, max_length=MOST_IDS)]

Time = Annotated[str, BeforeValidator(lambda given: timestamp(given) if isinstance(given, float) else given)]
"""A time in UTC as text, which may be given in seconds since the epoch."""

_NOON = "2024-01-01T12:00:00.000Z"


class ItemEntry(ApiModel):
    """One image in the quarantine."""

    id: int = field("its number, never reused", 17)
    state: ItemState = field("new, named (a new class), known (a class of the model), junk or learned", "named")
    kind: ItemKind = field("unknown, or audit: accepted by the model and kept for review", "unknown")
    group: int | None = field("number of its group, if it has one", 3)
    label: str | None = field("label that a person gave it", "8")
    labelled_by: str | None = field("who labelled it", "ada")
    labelled_at: Time | None = field("when it happened", _NOON)
    learned_in: str | None = field("version of the model that learned it", None)
    received_at: Time = field("when it first arrived", _NOON)
    seen_at: Time = field("when it last arrived", _NOON)
    copies: int = field("how often it arrived", 2)
    width: int = field("pixels", 16)
    height: int = field("pixels", 16)
    model_version: str = field("version of the model that rejected it", "ef3557a7ea7e")
    best_guess: str | None = field("best guess of that model", "5")
    p_value: float | None = field("p-value of the task that fits it best", 0.0032)
    damage: str | None = field("what is wrong with its row, if it was changed from outside", None)


class ItemList(ApiModel):
    """Some images of a group, or of no group, by number."""

    items: tuple[ItemEntry, ...] = Field(description="in the order of their numbers")
    next: int | None = field("pass it as `after` to get the next images; null if there are none", 117)


class GroupEntry(ApiModel):
    """Similar images, as grouped by `openworld discover` and changed by people."""

    id: int = field("its number, never reused", 3)
    size: int = field("number of images", 24)
    copies: int = field("how often they arrived, in total", 31)
    cohesion: float = field("0 to 1; higher is tighter", 0.83)
    near_class: str | None = field("the nearest known class, if one is near", "7")
    shifted: bool = field("looks like a changed near_class rather than a new class", False)
    state: ItemState | None = field("state of all its images, if they agree", None)
    label: str | None = field("label of all its images, if they agree", None)
    states: dict[ItemState, int] = field("number of images by state", {"named": 23, "junk": 1})
    labels: dict[str, int] = field("number of images by label", {"8": 23})
    items: tuple[ItemEntry, ...] = Field(description="the first images; /unknowns/items has the rest")


class Ungrouped(ApiModel):
    """Images in no group: they arrived after the last `openworld discover`, or resemble no other."""

    size: int = field("number of images", 5)
    items: tuple[ItemEntry, ...] = Field(description="the first images; /unknowns/items has the rest")


MapMethod = Literal["pca", "umap"]


class PlacedItem(ApiModel):
    """An image in the quarantine and its place on the map."""

    id: int = field("its number", 17)
    x: float = field("its place", 0.31)
    y: float = field("its place", -1.2)
    group: int | None = field("number of its group, if it has one", 3)
    state: ItemState = field("new, named, known, junk or learned", "new")
    label: str | None = field("label that a person gave it", None)


class EmbeddingMap(ApiModel):
    """A flat map of the features: what is near looks alike to the model."""

    version: str = field("version of the bundle that the axes are from", "ef3557a7ea7e")
    method: MapMethod = field("how the places were found", "pca")
    methods: tuple[MapMethod, ...] = field("the methods that this server has; umap is an extra", ["pca", "umap"])
    computing: bool = field("whether places by umap are being computed; ask again in a few seconds", False)
    labels: tuple[str, ...] = field("the learned classes, by class_id", ["cup", "lamp"])
    learned: tuple[tuple[float, float, int], ...] = field(
        "x, y and class_id of some images of each learned class; empty if the bundle has no map", [[0.2, -1.1, 0]]
    )
    items: tuple[PlacedItem, ...] = Field(description="the images of the quarantine")
    left_out: int = field("images that have no place: another model kept features of another length", 0)


class NewClass(ApiModel):
    """A class that people named and no model has learned yet."""

    label: str = field("label that people gave it", "8")
    images: int = field("number of images", 23)
    ready: bool = field("whether there are enough images to learn it", True)
    in_model: bool = field("the served model has this class by now: mark the images as known", False)


class ChangeEntry(ApiModel):
    """One change that a person made."""

    at: Time = field("when it happened", _NOON)
    who: str = field("the name that the person gave", "ada")
    what: str = field("name, known, junk, clear, move, merge or delete", "name")
    items: int = field("number of images changed", 24)
    detail: str = field("the label, or the destination", "8")


class Commands(ApiModel):
    """Commands to run where the training code is installed."""

    discover: str = field("groups the new images", "openworld discover --quarantine URL --bundle BUNDLE")
    learn: str = field("learns the named classes", "openworld learn-unknowns RUN --quarantine URL")


class Overview(ApiModel):
    """Everything that the page shows at first."""

    user: str = field("name of the caller", "ada")
    model: ModelName
    known: tuple[str, ...] = field("classes of the served model", ["0", "1", "2"])
    states: dict[ItemState, int] = field("number of images by state", {"new": 40, "named": 23, "junk": 1})
    groups: tuple[GroupEntry, ...] = Field(description="groups with new images first, each in the order of discovery")
    ungrouped: Ungrouped
    classes: tuple[NewClass, ...] = Field(description="named and not learned yet")
    minimum: int = field("images that a class needs by default before it is learned", 20)
    commands: Commands
    changes: tuple[ChangeEntry, ...] = Field(description="changes, the latest first")


class ChosenBody(ApiModel):
    """The images to change: by number, or a whole group."""

    ids: Ids | None = field("numbers of images", [17, 18], default=None)
    group: Id | None = field("number of a group", 3, default=None)

    @model_validator(mode="after")
    def _one_of_both(self) -> ChosenBody:
        if (self.ids is None) == (self.group is None):
            raise ValueError("give ids or group, not both")
        return self


class LabelBody(ChosenBody):
    """A label for images; of a group, images that are junk or learned are left out."""

    label: str = field("name of a class", "8")


class MoveBody(ApiModel):
    """Images to move, and the group to move them to."""

    ids: Ids = field("numbers of images", [17, 18])
    group: Id | None = field("number of a group; null for no group", 3)


class MergeBody(ApiModel):
    """Groups to merge."""

    groups: Annotated[tuple[Id, ...], Field(min_length=2, max_length=MOST_IDS)] = field(
        "numbers of groups; all images move to the first", [3, 5]
    )


class Changed(ApiModel):
    """The images that were changed."""

    items: tuple[int, ...] = field("numbers of the changed images", [17, 18])


class Merged(ApiModel):
    """The merged group."""

    group: int = field("its number", 3)


class Deleted(ApiModel):
    """Images deleted with their files."""

    deleted: int = field("number of images", 1)
