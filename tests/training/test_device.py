from __future__ import annotations

import contextlib

import pytest
import torch

from training.device import describe, mixed_precision, prepare

GPU = torch.device("cuda", 0)


def test_a_processor_is_spared_numbers_below_the_normal_range() -> None:
    least = torch.full((1000,), torch.finfo(torch.float32).tiny)
    torch.set_flush_denormal(False)
    assert (least / 2 > 0).all()
    prepare(torch.device("cpu"))
    try:
        assert (least / 2 == 0).all()
        # Of what lies within the range nothing is lost.
        assert (least * 2 > 0).all()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    ("has_it", "said"),
    [
        (True, "CUDA on Some GPU, mixed precision (bfloat16), channels last"),
        (False, "CUDA on Some GPU, full precision (it has no bfloat16), channels last"),
    ],
)
def test_a_gpu_without_bfloat16_learns_in_full_precision_and_says_so(
    has_it: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    # An old GPU says that it can do it too, but slowly.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_it or including_emulation)
    # Without a GPU torch would switch it off again.
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    assert describe(GPU) == said
    assert isinstance(mixed_precision(GPU), torch.autocast if has_it else contextlib.nullcontext)


def test_a_processor_learns_in_full_precision() -> None:
    assert isinstance(mixed_precision(torch.device("cpu")), contextlib.nullcontext)
