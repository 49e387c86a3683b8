"""The settings of the pooled classifier, which training chooses on folds of its images."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

UnknownScore = Literal["relative", "mahalanobis", "lda", "ridge"]
UNKNOWN_SCORES: tuple[UnknownScore, ...] = get_args(UnknownScore)
"""The distances of an image from a class that an unknown score can add up; higher means more unknown."""


class Standardised(BaseModel):
    """One summand of the unknown score: (distance - center) / scale."""

    model_config = ConfigDict(frozen=True)

    name: UnknownScore
    center: float = Field(0.0, allow_inf_nan=False, description="median over known images that were left out")
    scale: float = Field(1.0, gt=0, allow_inf_nan=False, description="spread over known images that were left out")


class PooledSettings(BaseModel):
    """How logits and distances are computed from the statistics."""

    model_config = ConfigDict(frozen=True)

    shrinkage: float = Field(
        0.35, gt=0, le=1, description="share of its diagonal in the covariance of linear discriminant analysis"
    )
    ridge: float = Field(0.01, gt=0, description="penalty of ridge regression, in mean squared lengths of phi(x)")
    mix: float = Field(0.5, ge=0, le=1, description="share of ridge regression in the logits; the rest is LDA")
    lda_scale: float = Field(1.0, gt=0, description="spread of the LDA outputs over images that were left out")
    ridge_scale: float = Field(1.0, gt=0, description="spread of the ridge outputs over images that were left out")
    temperature: float = Field(1.0, gt=0, description="divides the mixed outputs, so that softmax is calibrated")
    unknown: tuple[Standardised, ...] = Field(
        (Standardised(name="mahalanobis", center=0.0, scale=1.0),),
        min_length=1,
        description="the summands of the distance from a class",
    )
    rank: int = Field(128, ge=0, description="eigenvectors that a quadratic form keeps in a bundle")

    @model_validator(mode="after")
    def _check(self) -> PooledSettings:
        names = self.unknown_names
        if len(set(names)) != len(names):
            raise ValueError(f"unknown: got {', '.join(names)}; allowed: each score once")
        return self

    @property
    def unknown_names(self) -> tuple[UnknownScore, ...]:
        return tuple(each.name for each in self.unknown)
