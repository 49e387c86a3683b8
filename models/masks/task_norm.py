"""Batch normalisation with separate statistics per task: shared statistics would cause forgetting."""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.masks.all_reduce import processes, summed
from models.masks.task_layer import Connection, Selection, TaskLayer, Units

MOMENTUM = 0.1


class TaskNorm(TaskLayer):
    """One BatchNorm per task over the units `after` it, with their gate folded into its scale and shift.

    A gate g is never negative, so relu(norm(x)) * g = relu(g * norm(x)): gating costs no extra pass over the images.
    """

    def __init__(self, after: Units, selection: Selection, affine: bool) -> None:
        super().__init__()
        self.connection = Connection(after, after)
        self.selection = selection
        self.affine = affine
        self.norms = nn.ModuleList()

    def grow(self) -> None:
        norm = nn.BatchNorm2d(self.connection.after.channels, affine=self.affine)
        self.norms.append(norm.to(self.connection.after.used.device))

    def trainable(self, task: int) -> Iterator[nn.Parameter]:
        yield from self.of(task).parameters()

    def task_numbers(self) -> int:
        """A scale and a shift per unit: learned ones, or those to which the statistics can be reduced."""
        return 2 * self.connection.after.channels

    def of(self, task: int) -> nn.BatchNorm2d:
        return cast(nn.BatchNorm2d, self.norms[task])

    def forward(self, images: Tensor) -> Tensor:
        norm = self.of(self.selection.task)
        gate = self.connection.after.gate()
        scale: Tensor | None = norm.weight
        shift: Tensor | None = norm.bias
        if gate is not None:
            scale = gate if scale is None else scale * gate
            shift = torch.zeros_like(gate) if shift is None else shift * gate
        if norm.training and processes() > 1:
            return _joint_batch_norm(images, norm, scale, shift)
        return functional.batch_norm(
            images, norm.running_mean, norm.running_var, scale, shift, norm.training, MOMENTUM, norm.eps
        )

    def live_affine(self, task: int) -> tuple[Tensor, Tensor]:
        """Scale and shift of a finished task's live units, with the statistics folded in."""
        norm = self.of(task)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = torch.rsqrt(norm.running_var.double() + norm.eps)
        shift = -norm.running_mean.double() * scale
        if self.affine:
            scale, shift = scale * norm.weight.detach(), shift * norm.weight.detach() + norm.bias.detach()
        live = self.connection.after.live(task)
        return scale[live], shift[live]


def _joint_batch_norm(images: Tensor, norm: nn.BatchNorm2d, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """`functional.batch_norm` in training mode, with the statistics of a batch that several processes share.

    Torch's own SyncBatchNorm works on CUDA only. Plain arithmetic on sums with gradients works on every device.
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    pixels = images.float()
    count = summed(pixels.new_tensor([pixels.numel() / pixels.shape[1]]))
    mean = summed(pixels.sum(dim=(0, 2, 3))) / count
    centred = pixels - mean[:, None, None]
    variance = summed(centred.square().sum(dim=(0, 2, 3))) / count
    with torch.no_grad():
        norm.running_mean.lerp_(mean, MOMENTUM)
        norm.running_var.lerp_(variance * count / (count - 1), MOMENTUM)
    spread = torch.rsqrt(variance + norm.eps)
    normalised = centred * (spread if scale is None else spread * scale)[:, None, None]
    return (normalised if shift is None else normalised + shift[:, None, None]).to(images.dtype)
