"""The device that learns: CUDA if there is a GPU, else the CPU."""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Forward = Callable[[Tensor, int, float | Tensor], Tensor]
"""A forward pass: images, task and sharpness of the gates to features or projections."""

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""glibc's numbers for `mallopt`."""
MMAP_THRESHOLDS = (1 << 30, 32 << 20)
"""The largest one that glibc accepts is used: up to version 2.34 it accepts at most 32 MB."""
IMAGES_SHARE = 0.25
"""Share of the free memory of a GPU for the images of a task; activations need the rest."""


def choose_device() -> torch.device:
    """CUDA if it works, else CPU; of several GPUs, the one that torchrun assigned to this process."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    place, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if place >= count:
        raise ValueError(f"process {place} of this machine has no GPU; allowed: --nproc-per-node up to {count}")
    return torch.device("cuda", place)


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        precision = "mixed precision (bfloat16)" if has_bfloat16() else "full precision (it has no bfloat16)"
        return f"CUDA on {torch.cuda.get_device_name(device)}, {precision}, channels last"
    return f"CPU with {torch.get_num_threads()} threads of {os.cpu_count()} cores (no GPU was found)"


def prepare(device: torch.device) -> torch.device:
    """Apply process-wide settings that make learning fast, before the first tensor is made; returns the device.

    On the CPU, freed memory is kept: returning the activations of every step to the system and requesting them again
    costs up to 40 % of a step in page faults. Denormal floats are flushed to zero: closing gates leave many of them in
    the gradients, and a processor takes a hundred times as long for each.
    """
    if device.type == "cpu":
        # Threads that torch starts later inherit it from this one.
        torch.set_flush_denormal(True)
        with contextlib.suppress(OSError, AttributeError):  # C libraries other than glibc have no mallopt
            libc = ctypes.CDLL(None)
            # Setting any threshold disables glibc's own adjustment, so the others are set only if the first call
            # succeeds.
            if any(libc.mallopt(M_MMAP_THRESHOLD, size) for size in MMAP_THRESHOLDS):
                libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
                libc.mallopt(M_TOP_PAD, 64 << 20)
    return device


def has_room(device: torch.device, size: int) -> bool:
    """Whether images of this many bytes fit on the device while it learns from them."""
    return device.type == "cpu" or size <= IMAGES_SHARE * torch.cuda.mem_get_info(device)[0]


def channels_last_on_gpu(images: Tensor, device: torch.device) -> Tensor:
    """Channels last on CUDA, where bfloat16 convolutions need it; later layers keep the layout of their input.

    Only images change their layout. Parameters do not: the state of an optimiser, which a checkpoint stores in the
    default layout, must have the layout of its parameter.
    """
    return images.contiguous(memory_format=torch.channels_last) if device.type == "cuda" else images


def has_bfloat16() -> bool:
    """Whether the GPU has native bfloat16: older ones emulate it, which is slower than full precision."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def mixed_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bfloat16 only on a GPU that has it: on some CPUs its matrix product is an illegal instruction."""
    if device.type == "cuda" and has_bfloat16():
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def compiled(forward: Forward) -> Forward:
    """The same function, compiled by torch.compile at its first call and once more for a smaller last batch."""
    # Code compiled for earlier tasks is never used again, and torch limits recompilations of a function.
    torch.compiler.reset()
    program: Callable[..., Tensor] = torch.compile(forward)
    # A Python number would be compiled as a constant, and it changes with every step.
    return lambda images, task, sharpness: program(images, task, torch.as_tensor(sharpness))


@contextlib.contextmanager
def one_line_compile_errors() -> Iterator[None]:
    """Turn an error of torch.compile into a ValueError with a one-line message; other errors pass."""
    try:
        yield
    except RuntimeError as error:
        # Compared by name, because importing the class takes seconds.
        if not any(base.__name__ == "BackendCompilerFailed" for base in type(error).__mro__):
            raise
        # The paragraphs after the first are advice for developers of torch.
        reason = " ".join(str(error).partition("\n\n")[0].split())
        raise ValueError(f"--compile does not work here: {reason}; continue without it: --resume") from error
