"""Which device learns: CUDA when there is a GPU, the CPU when there is none, and never in silence."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

See = Callable[[Tensor, int, float | Tensor], Tensor]
"""What a network makes of images for a task, at a sharpness of its gates."""

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""glibc's numbers for `mallopt`."""
MMAP_THRESHOLDS = (1 << 30, 32 << 20)
"""The largest that is taken is used: glibc up to 2.34 takes no more than 32 MB."""
IMAGES_SHARE = 0.25
"""Of a GPU's free memory, for the images of a task; activations need the rest."""


def choose_device() -> torch.device:
    """CUDA if it works, else CPU; of several GPUs, the one that torchrun has meant for this process."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= count:
        raise ValueError(f"process {place} of this machine has no GPU; allowed: --nproc-per-node up to {count}")
    return torch.device("cuda", place)


def describe(device: torch.device) -> str:
    """The device in words for the log."""
    if device.type == "cuda":
        precision = "mixed precision (bfloat16)" if has_bfloat16() else "full precision (it has no bfloat16)"
        return f"CUDA on {torch.cuda.get_device_name(device)}, {precision}, channels last"
    return f"CPU with {torch.get_num_threads()} threads of {os.cpu_count()} cores (no GPU was found)"


def prepare(device: torch.device) -> None:
    """Settle what makes learning on the device fast, before the first tensor is made.

    On the CPU, freed memory is kept: handing the activations of every step back to the system and asking for them
    again costs up to 40 % of a step in page faults. And numbers too small for the normal range of a float count as
    zero: closing gates leave many of them in the gradients, and a processor takes a hundred times as long for each.
    """
    if device.type == "cpu":
        # Threads that torch starts later take it over from this one.
        torch.set_flush_denormal(True)
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc keeps its own ways
            libc = ctypes.CDLL(None)
            # Any of these calls ends the threshold's growing by itself: without the first, the others would do harm.
            if any(libc.mallopt(M_MMAP_THRESHOLD, size) for size in MMAP_THRESHOLDS):
                libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
                libc.mallopt(M_TOP_PAD, 64 << 20)


def has_room(device: torch.device, size: int) -> bool:
    """Whether so many bytes of images may lie on the device for as long as it learns them."""
    return device.type == "cpu" or size <= IMAGES_SHARE * torch.cuda.mem_get_info(device)[0]


def laid_out(images: Tensor, device: torch.device) -> Tensor:
    """Channels last on CUDA, whose bfloat16 convolutions want it; the layers after take over what they are given.

    Only images change, no parameter: an optimiser's state is read back from a checkpoint in the plain layout, and it
    must have the layout of its parameter.
    """
    return images.contiguous(memory_format=torch.channels_last) if device.type == "cuda" else images


def has_bfloat16() -> bool:
    """Whether the GPU in use computes in bfloat16 itself: older ones emulate it, slower than full precision."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def mixed_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bfloat16 on CUDA only, where the GPU has it: on some CPUs its matrix product is an illegal instruction."""
    if device.type == "cuda" and has_bfloat16():
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def compiled(see: See) -> See:
    """The same in one piece, compiled by torch.compile when it is first called and once more for an odd last batch."""
    # What was compiled for earlier tasks is never run again, and torch compiles one function only so many times.
    torch.compiler.reset()
    program: Callable[..., Tensor] = torch.compile(see)
    # A number would be compiled in, and every step has another one.
    return lambda images, task, sharpness: program(images, task, torch.as_tensor(sharpness))


@contextlib.contextmanager
def told_if_not_compiled() -> Iterator[None]:
    """What torch.compile cannot do here is a ValueError in one line; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        # Looked for by name: to import it takes seconds, and there is none unless something was compiled.
        if not any(base.__name__ == "BackendCompilerFailed" for base in type(error).__mro__):
            raise
        # What follows the first paragraph is advice for those who develop torch.
        reason = " ".join(str(error).partition("\n\n")[0].split())
        raise ValueError(f"--compile does not work here: {reason}; go on without it, with --resume") from error
