"""Several processes that learn one run together, started by torchrun: one for each GPU, or a few on CPUs.

All of them hold the same network and draw the same random numbers, but each computes only its share of every batch.
Each has its part of the loss; the parts add up to the loss of the joint batch, and so do the gradients. One process
alone is the same code with a share that is the whole.
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

from models.joint import processes, summed
from training.device import choose_device
from training.randomness import seed_everything

Made = TypeVar("Made")
PATIENCE = timedelta(hours=2)
"""How long processes wait for the first one to fetch and read its images; of one that dies torchrun tells at once."""


@contextmanager
def joined() -> Iterator[None]:
    """Learn with the other processes that torchrun started, if it did and if they are not together yet."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or processes() > 1:
        yield
        return
    device = choose_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def number() -> int:
    """Of this process, from zero."""
    return dist.get_rank() if processes() > 1 else 0


def first() -> bool:
    """Whether this process is the one that writes and speaks."""
    return number() == 0


def wait() -> None:
    """Until every process has come this far."""
    if processes() > 1:
        dist.barrier()


def after_the_first(make: Callable[[], Made]) -> Made:
    """What every process makes for itself, the first one before the others: what it fetches they find there."""
    if not first():
        if not _told_by_the_first():
            raise ValueError(f"process {number()} stops: the first process could not begin, and says why")
        return make()
    try:
        made = make()
    except BaseException:
        with suppress(RuntimeError):  # where the others are gone already, nobody has to be told
            _told_by_the_first(False)
        raise
    _told_by_the_first(True)
    return made


def _told_by_the_first(word: bool = False) -> bool:
    """The first process's word, in every process."""
    if processes() == 1:
        return word
    told = torch.tensor([int(word)], device=choose_device())
    dist.broadcast(told, src=0)
    return bool(told.item())


@dataclass(frozen=True)
class Share:
    """The rows of a joint batch that this process computes: from `start` to before `stop`, of `total`."""

    start: int
    stop: int
    total: int

    @classmethod
    def of(cls, total: int) -> Share:
        """As even as can be; it is empty where a batch has fewer rows than there are processes."""
        return cls(total * number() // processes(), total * (number() + 1) // processes(), total)

    @classmethod
    def whole(cls, total: int) -> Share:
        """That of a process alone."""
        return cls(0, total, total)

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    def times(self, copies: int) -> Share:
        """The same of a batch in which every row stands so many times, next to itself."""
        return Share(self.start * copies, self.stop * copies, self.total * copies)

    def rows_of_copies(self, copies: int, device: torch.device) -> Tensor:
        """Where its rows are if the whole batch is repeated so many times."""
        starts = torch.arange(copies, device=device)[:, None] * self.total
        return (starts + torch.arange(self.start, self.stop, device=device)).flatten()

    def gather(self, values: Tensor) -> Tensor:
        """[own rows, ...] -> [all rows, ...], with gradients to the process that each row came from."""
        if processes() == 1:
            return values
        before = values.new_zeros(self.start, *values.shape[1:])
        after = values.new_zeros(self.total - self.stop, *values.shape[1:])
        return summed(torch.cat([before, values, after]))


def add_up_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """The gradients of the joint loss, from those of every process's part of it, the same bits on each."""
    if processes() == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, total in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def make_alike(network: nn.Module) -> None:
    """Start from the first process's values: other hardware may draw other ones from one seed."""
    if processes() > 1:
        for value in network.state_dict().values():
            if value.numel():
                dist.broadcast(value, src=0)


@contextmanager
def own_draws(dropout: float, batch: int) -> Iterator[None]:
    """Drop other units than the other processes do, and stay in step with them in all else that is random."""
    if processes() == 1 or dropout == 0:
        yield
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        seed_everything(torch.initial_seed(), "process", number(), "batch", batch)
        yield
