"""What travels between a quarantine and those who label it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from serving.quarantine import Kind, State
from serving.schemas import ModelName, Wire, says

LARGEST_ID = 2**31 - 1
MOST_IDS = 50_000
Id = Annotated[int, Field(strict=True, ge=1, le=LARGEST_ID)]

_NOON = "2024-01-01T12:00:00.000Z"


class ItemEntry(Wire):
    """One image in quarantine."""

    id: int = says("its number, never used again", 17)
    state: State = says("new, named (a new class), known (a class that the model has), junk or learned", "named")
    kind: Kind = says("unknown, or audit: accepted, and kept for a later look", "unknown")
    group: int | None = says("the group that it is in, if it is in one", 3)
    label: str | None = says("what a person called it", "8")
    labelled_by: str | None = says("who did", "ada")
    labelled_at: str | None = says("when", _NOON)
    learned_in: str | None = says("version of the model that learned it", None)
    received_at: str = says("when it came", _NOON)
    seen_at: str = says("when it came last", _NOON)
    copies: int = says("how often it came", 2)
    width: int = says("pixels", 16)
    height: int = says("pixels", 16)
    model_version: str = says("version of the model that did not know it", "ef3557a7ea7e")
    best_guess: str | None = says("what that model would have said", "5")
    p_value: float | None = says("how well it fitted the task that it fits best", 0.0032)


class ItemList(Wire):
    """Some items of a group, or of none, by number."""

    items: tuple[ItemEntry, ...] = Field(description="in the order of their numbers")
    next: int | None = says("give it as `after` to get the next ones; null if there are none", 117)


class GroupEntry(Wire):
    """Images that look alike, as found by training.discover and changed by people."""

    id: int = says("its number, never used again", 3)
    size: int = says("how many images", 24)
    copies: int = says("how often they came, together", 31)
    cohesion: float = says("0 to 1; higher is tighter", 0.83)
    near_class: str | None = says("the known class that is nearest, if one is near", "7")
    shifted: bool = says("looks like near_class changed, rather than like something new", False)
    state: State | None = says("what all its images share, if they do", None)
    label: str | None = says("what all its images are called, if they are called the same", None)
    states: dict[State, int] = says("images by state", {"named": 23, "junk": 1})
    labels: dict[str, int] = says("images by label", {"8": 23})
    items: tuple[ItemEntry, ...] = Field(description="the first of them; /unknowns/items has the rest")


class Ungrouped(Wire):
    """Images in no group: they came after the last training.discover, or look like no other."""

    size: int = says("how many", 5)
    items: tuple[ItemEntry, ...] = Field(description="the first of them; /unknowns/items has the rest")


class NewClass(Wire):
    """A class that was named and not learned yet."""

    label: str = says("what people called it", "8")
    images: int = says("how many", 23)
    ready: bool = says("whether those are enough to learn it", True)
    in_model: bool = says("the model that is served has such a class by now: mark them as known", False)


class ChangeEntry(Wire):
    """What somebody did."""

    at: str = says("when", _NOON)
    who: str = says("as they call themselves", "ada")
    what: str = says("name, known, junk, clear, move, merge or delete", "name")
    items: int = says("to how many images", 24)
    detail: str = says("the label, or where to", "8")


class Commands(Wire):
    """What is done on the command line, where the training code is."""

    discover: str = says("groups what is new", "python -m training.discover --quarantine URL --bundle BUNDLE")
    learn: str = says("learns what was named", "python -m training.fit --add-unknowns RUN --quarantine URL")


class Overview(Wire):
    """All that the page shows at first."""

    user: str = says("who asks", "ada")
    model: ModelName
    known: tuple[str, ...] = says("classes of the model that is served", ["0", "1", "2"])
    states: dict[State, int] = says("images by state", {"new": 40, "named": 23, "junk": 1})
    groups: tuple[GroupEntry, ...] = Field(description="those with new images first, each in the order of discovery")
    ungrouped: Ungrouped
    classes: tuple[NewClass, ...] = Field(description="named and not learned yet")
    minimum: int = says("images that a class needs to be learned, unless the command says otherwise", 20)
    commands: Commands
    changes: tuple[ChangeEntry, ...] = Field(description="who did what, the latest first")


class ChosenBody(Wire):
    """Which images: by number, or a whole group."""

    ids: Annotated[tuple[Id, ...], Field(min_length=1, max_length=MOST_IDS)] | None = says(
        "numbers of images", [17, 18], default=None
    )
    group: Id | None = says("number of a group", 3, default=None)

    @model_validator(mode="after")
    def _one_of_both(self) -> ChosenBody:
        if (self.ids is None) == (self.group is None):
            raise ValueError("ids or group, and not both")
        return self


class LabelBody(ChosenBody):
    """What images show: all of a group but what is junk or learned, unless they are given by number."""

    label: str = says("a class", "8")


class MoveBody(Wire):
    """Where images belong."""

    ids: Annotated[tuple[Id, ...], Field(min_length=1, max_length=MOST_IDS)] = says("numbers of images", [17, 18])
    group: Id | None = says("number of a group; null for none", 3)


class MergeBody(Wire):
    """Groups that are one."""

    groups: Annotated[tuple[Id, ...], Field(min_length=2, max_length=MOST_IDS)] = says(
        "numbers of groups; all images go into the first", [3, 5]
    )


class Changed(Wire):
    """Done."""

    items: tuple[int, ...] = says("numbers of the images that it was done to", [17, 18])


class Merged(Wire):
    """They are one group now."""

    group: int = says("its number", 3)


class Deleted(Wire):
    """Gone, with their files."""

    deleted: int = says("how many", 1)
