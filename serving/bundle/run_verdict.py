"""How good a run is, in words: what its bundle records, and what servers show of it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Grade = Literal["good", "weak", "not working", "not measured"]

TaughtGrade = Literal["good", "weak", "not working", "few examples"]

PARTS = {"wp": "classes within a task", "tp": "task prediction", "unknown": "unknown detection"}
"""The parts of an answer that are judged, and their names for people."""


class PartVerdict(BaseModel):
    """One part of the answers of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grade: Grade = Field(description="good, weak, not working, or not measured", examples=["good"])
    numbers: str = Field(description="what it was judged by", examples=["TP 99.7 % of 361 images, guessing 25.2 %"])
    advice: str = Field(default="", description="what would help; empty if nothing has to", examples=[""])


class TaughtVerdict(BaseModel):
    """How far a class that a server was taught, or taught more of, can be relied on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str = Field(description="the class", examples=["cow"])
    grade: TaughtGrade = Field(description="good, weak, not working, or few examples", examples=["few examples"])
    images: int = Field(description="its images, those of the run included", examples=[12])
    examples: int = Field(description="how many of them were taught", examples=[12])
    right: int = Field(
        description="how many of these are answered right, each left out of the statistics in turn", examples=[11]
    )
    advice: str = Field(description="what would help; empty if nothing has to", examples=["20 or more ..."])


class RunVerdict(BaseModel):
    """Whether each part of the answers is good, weak or does not work; all of it was measured before export."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    summary: str = Field(description="all of it in a few sentences", examples=["Task prediction is good (...)."])
    wp: PartVerdict = Field(description="the class, if the task is given (WP)")
    tp: PartVerdict = Field(description="the task (TP)")
    unknown: PartVerdict = Field(description="telling known images from unknown ones")
    note: str = Field(
        default="", description="what to expect of a run with few images; empty if there are enough", examples=[""]
    )

    @property
    def parts(self) -> dict[str, PartVerdict]:
        """Name for people -> verdict."""
        return {title: getattr(self, name) for name, title in PARTS.items()}

    @property
    def warning(self) -> str | None:
        """What does not work, in one sentence; None if everything that was measured works at least a little."""
        failed = {title: part for title, part in self.parts.items() if part.grade == "not working"}
        if not failed:
            return None
        reasons = "; ".join(f"{title} ({part.numbers})" for title, part in failed.items())
        return f"Does not work here: {reasons}."


def summarise(wp: PartVerdict, tp: PartVerdict, unknown: PartVerdict, note: str = "") -> RunVerdict:
    """The verdict on a run, with its summary: one sentence of grades and numbers, the advice, and `note`."""
    judged = dict(zip(PARTS.values(), (wp, tp, unknown), strict=True))
    grades = "; ".join(f"{title}: {part.grade} ({part.numbers})" for title, part in judged.items())
    # Two parts may need the same remedy.
    advice = dict.fromkeys(part.advice for part in judged.values() if part.advice)
    summary = " ".join([f"{grades[0].upper()}{grades[1:]}.", *advice, *([note] if note else [])])
    return RunVerdict(summary=summary, wp=wp, tp=tp, unknown=unknown, note=note)


def not_measured(reason: str) -> RunVerdict:
    """The verdict on a run that could not be measured."""
    part = PartVerdict(grade="not measured", numbers=reason)
    return RunVerdict(summary=f"Not measured: {reason}.", wp=part, tp=part, unknown=part)
