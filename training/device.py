"""Which device learns: CUDA when there is a GPU, the CPU when there is none, and never in silence."""

from __future__ import annotations

import contextlib
import os

import torch


def choose_device() -> torch.device:
    """CUDA if it works, else CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def describe(device: torch.device) -> str:
    """The device in words for the log."""
    if device.type == "cuda":
        return f"CUDA on {torch.cuda.get_device_name(device)}, mixed precision (bfloat16)"
    return f"CPU with {torch.get_num_threads()} threads of {os.cpu_count()} cores (no GPU was found)"


def mixed_precision(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bfloat16 on CUDA only: on some CPUs its matrix product is an illegal instruction."""
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()
