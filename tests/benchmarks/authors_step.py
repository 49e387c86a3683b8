"""Step 1 as the authors of the paper and of CSI lay it out, written anew and plainly: what our step 1 is timed against.

Their order of augmentation (mirrored copies, four rotations, colour jitter, grey, resized crop), all of it on whole
batches as theirs is; a gate is a pass over the images of its own; the loss takes exp and log of the whole similarity
matrix; gradients are multiplied by a mask after every step. Left out, though they do it in the same loop: a linear
classifier beside the loss, which learns along only to be printed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.config import NetworkConfig
from training.config import Augmentation

TINY = 1e-8


def resample(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Each image [n, ...] scaled and shifted ([n, 2] each) by an affine grid of its own."""
    affine = torch.eye(2, 3).repeat(len(images), 1, 1)
    affine[:, 0, 0], affine[:, 1, 1] = scale[:, 0], scale[:, 1]
    affine[:, :, 2] = shift
    grid = functional.affine_grid(affine, list(images.shape), align_corners=False)
    return functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


def mirrored(images: Tensor) -> Tensor:
    """Each image as it is or mirrored."""
    scale = torch.ones(len(images), 2)
    scale[:, 0] = torch.bernoulli(torch.full((len(images),), 0.5)) * 2 - 1
    return resample(images, scale, torch.zeros(len(images), 2))


def crop(images: Tensor, how: Augmentation) -> Tensor:
    """A random box of each image, stretched over the whole: the first that fits of ten tries."""
    count = len(images)
    area = torch.empty(10 * count).uniform_(*how.crop_area)
    aspect = torch.empty(10 * count).uniform_(*map(math.log, how.crop_aspect)).exp()
    size = torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()], dim=1)
    size = size[(size <= 1).all(dim=1)][:count]
    size = torch.cat([size, torch.ones(count - len(size), 2)])
    return resample(images, size, (torch.rand(count, 2) * 2 - 1) * (1 - size))


def factors(images: Tensor, spread: float) -> Tensor:
    return torch.empty(len(images), 1, 1, 1).uniform_(max(0.0, 1 - spread), 1 + spread)


def change_contrast(images: Tensor, how: Augmentation) -> Tensor:
    means = images.mean(dim=(2, 3), keepdim=True)
    return ((images - means) * factors(images, how.contrast) + means).clamp(0, 1)


def change_brightness(images: Tensor, how: Augmentation) -> Tensor:
    return (images * factors(images, how.brightness)).clamp(0, 1)


def change_hsv(images: Tensor, how: Augmentation) -> Tensor:
    """Hue, saturation and value at once."""
    red, green, blue = images[:, 0], images[:, 1], images[:, 2]
    high = images.max(dim=1)[0]
    chroma = high - images.min(dim=1)[0]
    hue = torch.atan2(math.sqrt(3) * (green - blue), 2 * red - green - blue) % (2 * math.pi) / (2 * math.pi)
    hsv = torch.stack([hue, chroma / high, high], dim=1)
    hsv[~torch.isfinite(hsv)] = 0
    turn = torch.empty(len(images), 1, 1).uniform_(-how.hue, how.hue)
    hsv[:, 0] = (hsv[:, 0] + turn) % 1
    hsv[:, 1] = hsv[:, 1] * factors(images, how.saturation)[:, 0]
    hsv[:, 2] = hsv[:, 2] * factors(images, how.brightness)[:, 0]
    hue, saturation, value = hsv.clamp(0, 1).split(1, dim=1)
    position = (torch.tensor([5.0, 3.0, 1.0]).view(3, 1, 1) + hue * 6) % 6
    return value - value * saturation * torch.min(position, 4 - position).clamp(0, 1)


def some(images: Tensor, changed: Tensor, share: float) -> Tensor:
    """A random share of the images changed, by arithmetic with a mask."""
    mask = torch.bernoulli(torch.full((len(images), 1, 1, 1), share))
    return images * (1 - mask) + changed * mask


def augment(images: Tensor, how: Augmentation) -> Tensor:
    """[n, channels, height, width] in [0, 1], the same out."""
    colour = images.shape[1] == 3
    changes = [change_contrast, change_hsv if colour else change_brightness]
    random.shuffle(changes)
    changed = images
    for change in changes:
        changed = change(changed, how)
    images = some(images, changed, how.jitter_share)
    if colour:
        grey = functional.conv2d(images, torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1))
        images = some(images, torch.cat([grey, grey, grey], dim=1), how.grey_share)
    return crop(images, how)


def contrastive(vectors: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """exp, sum and log over the whole similarity matrix."""
    similarity = vectors @ vectors.t()
    similarity = similarity - similarity.max(dim=1, keepdim=True)[0].detach()
    similarity = torch.exp(similarity / temperature) * (1 - torch.eye(len(vectors)))
    losses = -torch.log(similarity / (similarity.sum(dim=1, keepdim=True) + TINY) + TINY)
    same = torch.eq(labels[:, None], labels[None, :]).float()
    return (same / (same.sum(dim=1, keepdim=True) + TINY) * losses).sum() / len(vectors)


class Gate(nn.Module):
    """A unit's sigmoid, multiplied in after the non-linearity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(channels))
        self.sharpness = 1.0

    def forward(self, units: Tensor) -> Tensor:
        gate = torch.sigmoid(self.sharpness * self.logits)
        return units * gate.view(1, -1, *[1] * (units.dim() - 2)).expand_as(units)


class Block(nn.Module):
    """A basic residual block with a gate after its first convolution and one after its sum."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.gate1 = Gate(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.gate2 = Gate(after)
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, images: Tensor) -> Tensor:
        out = self.gate1(functional.relu(self.bn1(self.conv1(images))))
        out = self.bn2(self.conv2(out))
        return self.gate2(functional.relu(out + self.shortcut(images)))


def resnet_body(config: NetworkConfig) -> tuple[nn.Sequential, int]:
    width = config.base
    stem = nn.Conv2d(config.channels, width, 3, 1, 1, bias=False)
    layers: list[nn.Module] = [stem, nn.BatchNorm2d(width), nn.ReLU(), Gate(width)]
    before = width
    for stage in range(4):
        for position in range(2):
            layers.append(Block(before, width * 2**stage, 2 if stage and not position else 1))
            before = width * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), before


def convnet_body(config: NetworkConfig) -> tuple[nn.Sequential, int]:
    layers: list[nn.Module] = []
    before, side = config.channels, config.height
    for factor, kernel, dropout in zip((1, 2, 4), (3, 3, 2), config.dropout[:3], strict=True):
        after, padding = config.base * factor, kernel // 2 if config.padded else 0
        layers += [nn.Conv2d(before, after, kernel, padding=padding, bias=not config.norm)]
        layers += [nn.BatchNorm2d(after)] if config.norm else []
        layers += [nn.ReLU(), nn.Dropout(dropout), nn.MaxPool2d(2), Gate(after)]
        before, side = after, (side + 2 * padding - kernel + 1) // 2
    layers += [nn.Flatten(), nn.Linear(before * side * side, config.hidden), nn.ReLU(), Gate(config.hidden)]
    return nn.Sequential(*layers), config.hidden


def make_steps(
    config: NetworkConfig, views: Augmentation, size: int, sharpness: Sequence[float]
) -> Callable[[], float]:
    """A step of learning at each sharpness, on `size` random images of two classes; it returns the last loss."""
    body, features = resnet_body(config) if config.backbone == "resnet18" else convnet_body(config)
    hidden = [nn.Linear(features, features), nn.ReLU(), Gate(features), nn.Linear(features, config.projection)]
    network = nn.Sequential(body, *hidden).train()
    gates = [module for module in network.modules() if isinstance(module, Gate)]
    free = {name: torch.ones_like(value) for name, value in network.named_parameters() if value.dim() > 1}
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    data, target = torch.rand(size, config.channels, config.height, config.width), torch.arange(size) % 2

    def step(sharpness: float) -> float:
        for gate in gates:
            gate.sharpness = sharpness
        both = data.repeat(2, 1, 1, 1)
        first, second = (mirrored(both) if views.flip else both).chunk(2)
        turned = [torch.cat([torch.rot90(view, turn, (2, 3)) for turn in range(4)]) for view in (first, second)]
        labels = torch.cat([target + 2 * turn for turn in range(4)]).repeat(2)
        images = augment(torch.cat(turned), views)
        optimizer.zero_grad()
        vectors = functional.normalize(network((images - config.mean) / config.std), dim=1)
        loss = contrastive(vectors, labels, 0.07)
        opened = sum(torch.sigmoid(gate.sharpness * gate.logits).sum() for gate in gates)
        loss = loss + 0.1 * opened / sum(gate.logits.numel() for gate in gates)
        loss.backward()
        for name, parameter in network.named_parameters():
            if name in free and parameter.grad is not None:
                parameter.grad.data *= free[name]
        for gate in gates:
            assert gate.logits.grad is not None
            scaled = (gate.sharpness * gate.logits.data).clamp(-50, 50)
            gate.logits.grad.data *= (torch.cosh(scaled) + 1) / (torch.cosh(gate.logits.data) + 1)
        optimizer.step()
        for gate in gates:
            gate.logits.data = gate.logits.data.clamp(-6, 6)
        return loss.item()

    return lambda: [step(value) for value in sharpness][-1]
