from __future__ import annotations

import contextlib
import ctypes

import pytest
import torch

from training.device import (
    M_MMAP_THRESHOLD,
    M_TOP_PAD,
    M_TRIM_THRESHOLD,
    describe,
    mixed_precision,
    prepare,
)

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


class Libc:
    """Takes no larger threshold than `most`, and notes what it took."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken: dict[int, int] = {}

    def mallopt(self, what: int, value: int) -> int:
        if what == M_MMAP_THRESHOLD and value > self.most:
            return 0
        self.taken[what] = value
        return 1


@pytest.mark.parametrize(("most", "taken"), [(1 << 40, 1 << 30), (32 << 20, 32 << 20), (0, None)])
def test_freed_memory_is_kept_as_far_as_the_c_library_lets_it(
    most: int, taken: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    libc = Libc(most)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(torch, "set_flush_denormal", lambda is_on: True)
    prepare(torch.device("cpu"))
    # The other two would hold the threshold where it is, at 128 kB.
    expected = set() if taken is None else {M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD}
    assert libc.taken.keys() == expected
    assert libc.taken.get(M_MMAP_THRESHOLD) == taken


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
