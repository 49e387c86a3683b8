"""The settings of the pooled classifier and of the detectors, which are chosen on folds of a task's images."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

UnknownScore = Literal["relative", "lda", "ridge"]
UNKNOWN_SCORES: tuple[UnknownScore, ...] = get_args(UnknownScore)
"""The distances of an image from a class that an unknown score can add up; higher means more unknown."""


class Standardised(BaseModel):
    """One summand of the unknown score: (distance - center) / scale."""

    model_config = ConfigDict(frozen=True)

    name: UnknownScore
    center: float = Field(default=0.0, allow_inf_nan=False, description="median over known images that were left out")
    scale: float = Field(
        default=1.0, gt=0, allow_inf_nan=False, description="spread over known images that were left out"
    )


class PooledSettings(BaseModel):
    """How logits and distances are computed from the statistics."""

    model_config = ConfigDict(frozen=True)

    shrinkage: float = Field(
        default=0.45, gt=0, le=1, description="share of its diagonal in the covariance of linear discriminant analysis"
    )
    ridge: float = Field(
        default=0.06, gt=0, description="penalty of ridge regression, in mean squared lengths of phi(x)"
    )
    expanded: bool = Field(default=False, description="whether ridge regression uses phi(x), and not x alone")
    mix: float = Field(default=0.5, ge=0, le=1, description="share of ridge regression in the logits; the rest is LDA")
    temperature: float = Field(
        default=0.1,
        gt=0,
        description="divides the logits, whose mean margin is 1, to calibrate them",
    )
    unknown: tuple[Standardised, ...] = Field(
        default=(Standardised(name="relative"),), min_length=1, description="the summands of the distance from a class"
    )

    @model_validator(mode="after")
    def _check(self) -> PooledSettings:
        names = self.unknown_names
        if len(set(names)) != len(names):
            raise ValueError(f"unknown: got {', '.join(names)}; allowed: each score once")
        return self

    @property
    def unknown_names(self) -> tuple[UnknownScore, ...]:
        return tuple(each.name for each in self.unknown)
