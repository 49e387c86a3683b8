"""Several processes that learn one run together, started by torchrun: one per GPU, or a few on CPUs.

All processes hold the same network and draw the same random numbers, but each computes only its share of every batch.
The losses of the shares add up to the loss of the joint batch, and so do the gradients. A single process runs the same
code with the whole batch as its share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist

from models.masks.all_reduce import processes, summed
from training.host.device import choose_device
from training.host.seeds import seed_everything

Result = TypeVar("Result")
TIMEOUT = timedelta(hours=2)
"""How long processes wait for the main one to download and read its images; torchrun reports dead processes at once."""


@contextmanager
def process_group() -> Iterator[None]:
    """Join the processes that torchrun started, if it did and unless they are joined already."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or processes() > 1:
        yield
        return
    device = choose_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()


def rank() -> int:
    """The number of this process, from zero."""
    return dist.get_rank() if processes() > 1 else 0


def is_main() -> bool:
    """Whether this process is the one that writes files and prints."""
    return rank() == 0


def barrier() -> None:
    if processes() > 1:
        dist.barrier()


def main_process_first(work: Callable[[], Result]) -> Result:
    """Call `work` in every process, in the main one before the others, which then find its downloads."""
    if not is_main():
        if not _broadcast_success():
            raise ValueError(f"process {rank()} stops: the main process could not begin and prints the reason")
        return work()
    try:
        result = work()
    except BaseException:
        with suppress(RuntimeError):  # the other processes may have ended already
            _broadcast_success(False)
        raise
    _broadcast_success(True)
    return result


def _broadcast_success(success: bool = False) -> bool:
    """The value of the main process, in every process."""
    if processes() == 1:
        return success
    value = torch.tensor([int(success)], device=choose_device())
    dist.broadcast(value, src=0)
    return bool(value.item())


@dataclass(frozen=True)
class Share:
    """The rows of a joint batch that this process computes: from `start` to before `stop`, of `total`."""

    start: int
    stop: int
    total: int

    @classmethod
    def of(cls, total: int) -> Share:
        """The share of a batch that this process computes; empty if there are more processes than rows."""
        return cls(total * rank() // processes(), total * (rank() + 1) // processes(), total)

    @classmethod
    def whole(cls, total: int) -> Share:
        return cls(0, total, total)

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    def times(self, copies: int) -> Share:
        """The share of a batch in which every row is repeated `times` times in place."""
        return Share(self.start * copies, self.stop * copies, self.total * copies)

    def rows_of_copies(self, copies: int, device: torch.device) -> Tensor:
        """The indices of its rows if the whole batch is repeated `times` times."""
        starts = torch.arange(copies, device=device)[:, None] * self.total
        return (starts + torch.arange(self.start, self.stop, device=device)).flatten()

    def gather(self, values: Tensor) -> Tensor:
        """[own rows, ...] -> [all rows, ...]; gradients flow back to the process of each row."""
        if processes() == 1:
            return values
        before = values.new_zeros(self.start, *values.shape[1:])
        after = values.new_zeros(self.total - self.stop, *values.shape[1:])
        return summed(torch.cat([before, values, after]))


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum the gradients of all processes: those of the joint loss, with the same bits in each process."""
    if processes() == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def broadcast_network(network: nn.Module) -> None:
    """Copy the values of the main process: other hardware may draw other numbers from the same seed."""
    if processes() > 1:
        for value in network.state_dict().values():
            if value.numel():
                dist.broadcast(value, src=0)


@contextmanager
def independent_dropout(dropout: float, batch: int) -> Iterator[None]:
    """Draw dropout masks independently in each process, and leave all other random numbers the same."""
    if processes() == 1 or dropout == 0:
        yield
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        seed_everything(torch.initial_seed(), "process", rank(), "batch", batch)
        yield
