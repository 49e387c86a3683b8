"""The configuration of a network. Importing it does not import torch."""

from dataclasses import dataclass

from models.backbones import BACKBONES
from models.masks import MECHANISMS

ROTATIONS = 4
"""CSI's rotations of an image: by 0, 90, 180 and 270 degrees."""


@dataclass(frozen=True)
class NetworkConfig:
    """Everything that determines a network's shape before its first task."""

    method: str
    """The mask mechanism that keeps the tasks apart."""
    backbone: str
    height: int
    width: int
    channels: int
    mean: float
    std: float
    base: int
    """Channels of the backbone's first layer."""
    hidden: int = 0
    norm: bool = True
    hidden_norm: bool = False
    """Whether the convnet's hidden layer is normalised as well."""
    padded: bool = True
    pooled: bool = True
    """Whether the convnet halves its feature maps by pooling or, with a fraction of the work, by strides."""
    last_kernel: int = 2
    """The side of the convnet's third convolution, if the network pools; one that has strides has 3x3."""
    averaged: bool = False
    """Whether the convnet's hidden layer gets the means of the last feature maps, and not all of their pixels."""
    dropout: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    """The convnet's dropout, after each of its three convolutions and after the hidden layer."""
    projection: int = 128
    """Dimensions of the contrastive loss; 0 for a network that is trained without it."""
    density: float = 0.32
    """The share of all weights that Sup keeps for a task; no layer keeps more than half of its own."""
    links: float = 0.0
    """Replaces Sup's overall density: a layer keeps this many weights per unit before and after it, at most half."""
    rotations: int = ROTATIONS
    """The number of rotations of an image that the network sees: all four, or 1 if it was trained without them."""

    def __post_init__(self) -> None:
        MECHANISMS.check(self.method)
        BACKBONES.check(self.backbone)
        if self.std <= 0:
            raise ValueError(f"std is {self.std}; allowed: above 0")
        if self.rotations not in (1, ROTATIONS):
            raise ValueError(f"rotations is {self.rotations}; allowed: 1, {ROTATIONS}")
