"""Reads files of weights without running code that they contain."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from models.trunks.trunk import TrunkError


def load_state(file: Path) -> dict[str, NDArray[np.float64]]:
    """The tensors of a state dict by name, as float64; raises a TrunkError if the file holds anything else."""
    return {name: tensor.double().numpy() for name, tensor in load_tensors(file).items()}


def load_tensors(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, or of a state dict that torch.save wrote."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, SafetensorError, pickle.UnpicklingError) as error:
        reason = str(error).split("\n")[0]
        raise TrunkError(f"{file}: not weights that can be read ({reason}); allowed: {ALLOWED}") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise TrunkError(f"{file}: holds {type(loaded).__name__}, and not only named tensors; allowed: {ALLOWED}")
    return loaded


ALLOWED = "a safetensors file, or a state dict of tensors written by torch.save"
