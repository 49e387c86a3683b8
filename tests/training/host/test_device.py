from __future__ import annotations

import contextlib
import ctypes

import pytest
import torch

from training.host.device import (
    M_MMAP_THRESHOLD,
    M_TOP_PAD,
    M_TRIM_THRESHOLD,
    describe,
    mixed_precision,
    prepare,
)

GPU = torch.device("cuda", 0)


def test_denormal_numbers_are_flushed_to_zero_on_a_cpu() -> None:
    least = torch.full((1000,), torch.finfo(torch.float32).tiny)
    torch.set_flush_denormal(False)
    assert (least / 2 > 0).all()
    prepare(torch.device("cpu"))
    try:
        assert (least / 2 == 0).all()
        # Numbers within the normal range are unchanged.
        assert (least * 2 > 0).all()
    finally:
        torch.set_flush_denormal(False)


class Libc:
    """Accepts thresholds up to `most`, and records the accepted ones."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken: dict[int, int] = {}

    def mallopt(self, what: int, value: int) -> int:
        if what == M_MMAP_THRESHOLD and value > self.most:
            return 0
        self.taken[what] = value
        return 1


@pytest.mark.parametrize(("most", "taken"), [(1 << 40, 1 << 30), (32 << 20, 32 << 20), (0, None)])
def test_freed_memory_is_kept_up_to_the_limit_of_the_c_library(
    most: int, taken: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    libc = Libc(most)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(torch, "set_flush_denormal", lambda is_on: True)
    prepare(torch.device("cpu"))
    # The other two settings would keep the threshold at 128 kB.
    expected = set() if taken is None else {M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD}
    assert libc.taken.keys() == expected
    assert libc.taken.get(M_MMAP_THRESHOLD) == taken


@pytest.mark.parametrize(
    ("has_it", "description"),
    [
        (True, "CUDA on Some GPU, mixed precision (bfloat16), channels last"),
        (False, "CUDA on Some GPU, full precision (it has no bfloat16), channels last"),
    ],
)
def test_a_gpu_without_bfloat16_learns_in_full_precision_and_reports_it(
    has_it: bool, description: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    # An old GPU reports support too, but emulates it slowly.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_it or including_emulation)
    # Without a GPU torch would disable it again.
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    assert describe(GPU) == description
    assert isinstance(mixed_precision(GPU), torch.autocast if has_it else contextlib.nullcontext)


def test_a_cpu_learns_in_full_precision() -> None:
    assert isinstance(mixed_precision(torch.device("cpu")), contextlib.nullcontext)
