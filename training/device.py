"""Which device learns: CUDA when there is a GPU, the CPU when there is none, and never in silence."""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
"""glibc's numbers for `mallopt`."""


def choose_device() -> torch.device:
    """CUDA if it works, else CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def describe(device: torch.device) -> str:
    """The device in words for the log."""
    if device.type == "cuda":
        return f"CUDA on {torch.cuda.get_device_name(device)}, mixed precision (bfloat16)"
    return f"CPU with {torch.get_num_threads()} threads of {os.cpu_count()} cores (no GPU was found)"


def prepare(device: torch.device) -> None:
    """Settle what makes learning on the device fast, before the first tensor is made.

    On the CPU, freed memory is kept: handing the activations of every step back to the system and asking for them
    again costs up to 40 % of a step in page faults.
    """
    if device.type == "cpu":
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc keeps its own ways
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
            libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
            libc.mallopt(M_TOP_PAD, 64 << 20)


def mixed_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bfloat16 on CUDA only: on some CPUs its matrix product is an illegal instruction."""
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()
