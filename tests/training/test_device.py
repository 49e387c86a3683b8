from __future__ import annotations

import torch

from training.device import prepare


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
