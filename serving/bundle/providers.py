"""The execution providers that a graph can run on. Imports neither onnxruntime nor numpy."""

from __future__ import annotations

import os
from pathlib import Path

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
PROVIDER_CHOICES = ("auto", "cuda", "cpu")


def wants_cuda(choice: str) -> bool:
    """Whether a session on the GPU is to be tried for this choice of provider."""
    return choice == "cuda" or (choice == "auto" and nvidia_visible())


def nvidia_visible() -> bool:
    """A cheap check for a device: asking onnxruntime for CUDA where there is none takes time and prints errors."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
