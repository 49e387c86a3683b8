"""HAT: gates on units; a weight between two units that finished tasks use never changes again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from models.masks.step_hooks import Protection
from models.masks.task_layer import Connection, Selection, Units, WeightLayer
from models.mechanism import LearningSettings, Mechanism

LOGIT_LIMIT = 6.0
EXPONENT_LIMIT = 50.0


class UnitMask(Units):
    """Per-task gates over `channels` units: sigmoid(sharpness * logit) while learning, 0 or 1 ever after."""

    def __init__(self, channels: int, selection: Selection) -> None:
        super().__init__(channels)
        self.selection = selection
        self.logits = nn.ParameterList()
        self.register_buffer("used", torch.zeros(channels, dtype=torch.bool))

    def grow(self) -> None:
        self.logits.append(nn.Parameter(torch.randn(self.channels, device=self.used.device)))

    def trainable(self, task: int) -> Iterator[nn.Parameter]:
        yield self.logits[task]

    def task_numbers(self) -> int:
        return self.channels

    def gate(self) -> Tensor:
        logit: Tensor = self.logits[self.selection.task]
        if self.selection.sharpness is None:
            return (logit > 0).to(logit.dtype)
        return torch.sigmoid(self.selection.sharpness * logit)

    def usage(self, task: int) -> Tensor:
        logits: Tensor = self.logits[task]
        return logits.detach() > 0

    def live(self, task: int) -> Tensor:
        return self.usage(task).nonzero().flatten()

    def finish(self, task: int) -> None:
        if not (self.logits[task] > 0).any():
            # With every gate closed, the output would be the same for any image: open the gate closest to opening.
            with torch.no_grad():
                self.logits[task][self.logits[task].argmax()] = 1.0
        self.used |= self.logits[task] > 0

    def compensate(self, task: int, sharpness: float, max_sharpness: float) -> None:
        """Undo the effect of annealing on the logits' gradient (HAT, Eq. 5), before the optimiser's step."""
        logit = self.logits[task]
        if logit.grad is None:
            return
        scaled = (sharpness * logit.detach()).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT)
        factor = (torch.cosh(scaled) + 1) / (torch.cosh(logit.detach()) + 1)
        logit.grad.mul_(factor * (max_sharpness / sharpness))

    def clamp(self, task: int) -> None:
        """Keep the logits in the range where the sigmoid still has a gradient, after the optimiser's step."""
        with torch.no_grad():
            self.logits[task].clamp_(-LOGIT_LIMIT, LOGIT_LIMIT)


def sparsity(masks: Iterable[UnitMask]) -> Tensor:
    """Share of the units still free that the selected task opens (the paper's L_r without its lambda)."""
    opened, free = [], []
    for mask in masks:
        available = (~mask.used).to(torch.float32)
        opened.append((mask.gate() * available).sum())
        free.append(available.sum())
    return torch.stack(opened).sum() / torch.stack(free).sum().clamp(min=1)


class GatedLayer(WeightLayer):
    """Weights that all tasks share, between the gated units before and after them."""

    weight: nn.Parameter

    def __init__(self, connection: Connection, bias: bool = True) -> None:
        super().__init__(connection)
        self.weight = nn.Parameter(torch.empty(self.shape))
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        self.bias = nn.Parameter(torch.zeros(self.shape[0])) if bias else None

    def trainable(self, task: int) -> Iterator[nn.Parameter]:
        yield self.weight
        if self.bias is not None:
            yield self.bias

    def frozen(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Weights between two used units, biases of used units (the paper's min(a_i, a_j))."""
        before, after, inputs_per_unit = self.connection[:3]
        joined = after.used[:, None] & before.used.repeat_interleave(inputs_per_unit)[None, :]
        yield self.weight, joined.reshape(*joined.shape, *[1] * (self.weight.dim() - 2)).expand_as(self.weight)
        if self.bias is not None:
            yield self.bias, after.used

    def shared_numbers(self) -> int:
        return self.weight.numel() + (0 if self.bias is None else self.bias.numel())

    def effective_weight(self) -> Tensor:
        return self.weight

    def live_weight(self, task: int) -> Tensor:
        return self.connection.live_weights(self.weight.detach(), task)


def sharpness_at(position: float, maximum: float) -> float:
    """HAT's s: from 1 / maximum at the first batch of an epoch (position 0) to maximum at the last (1)."""
    return 1 / maximum + (maximum - 1 / maximum) * position


class HatHooks(Protection):
    """Protection of used weights, the sparsity term, and the annealing of the gates."""

    def __init__(self, hat: Hat, task: int, settings: LearningSettings) -> None:
        super().__init__(hat.layers)
        self._masks = hat.unit_masks()
        self._task = task
        self._max_sharpness = settings.max_sharpness
        self._weight = settings.sparsity_first if task == 0 else settings.sparsity_later
        self._sharpness = settings.max_sharpness

    def begin_step(self, position: float) -> float:
        self._sharpness = sharpness_at(position, self._max_sharpness)
        return self._sharpness

    def regulariser(self) -> Tensor:
        return self._weight * sparsity(self._masks)

    def before_step(self) -> None:
        for mask in self._masks:
            mask.compensate(self._task, self._sharpness, self._max_sharpness)

    def after_step(self) -> None:
        super().after_step()
        for mask in self._masks:
            mask.clamp(self._task)


class Hat(Mechanism):
    """Hard attention to the task (Serra et al., 2018), as the paper uses it."""

    def new_units(self, channels: int) -> UnitMask:
        return UnitMask(channels, self.selection)

    def layer(self, connection: Connection, bias: bool) -> GatedLayer:
        return GatedLayer(connection, bias)

    def step_hooks(self, task: int, settings: LearningSettings) -> HatHooks:
        return HatHooks(self, task, settings)

    def unit_masks(self) -> list[UnitMask]:
        return [mask for mask in self.masks if isinstance(mask, UnitMask)]
