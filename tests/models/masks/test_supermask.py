from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.masks.supermask import MaskedLayer, pack_bits, spread_density, spread_links, top_share, unpack_bits
from models.masks.task_layer import Connection, Selection, Units
from models.network import Network
from tests.helpers import tiny_config


def linear(before: int, after: int) -> MaskedLayer:
    return MaskedLayer(Connection(Units(before), Units(after)), Selection())


def conv(before: int, after: int) -> MaskedLayer:
    return MaskedLayer(Connection(Units(before), Units(after), kernel_size=3), Selection())


def masked_linear(before: int, after: int, density: float) -> MaskedLayer:
    torch.manual_seed(0)
    layer = linear(before, after)
    layer.density = density
    layer.grow()
    return layer


@settings(derandomize=True, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_packed_bits_unpack_to_the_same_mask(bits: list[bool]) -> None:
    mask = torch.tensor(bits)
    packed = pack_bits(mask)
    assert packed.dtype == torch.uint8
    assert len(packed) == math.ceil(len(bits) / 8)
    assert torch.equal(unpack_bits(packed, mask.shape), mask)


def test_packing_keeps_the_shape_and_puts_the_lowest_bit_first() -> None:
    mask = torch.tensor([[True, False, False], [False, True, False]])
    assert pack_bits(mask).tolist() == [0b010001]
    assert torch.equal(unpack_bits(pack_bits(mask), mask.shape), mask)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0]), min_size=1, max_size=20), st.data())
def test_top_share_keeps_exactly_as_many_as_asked_even_among_ties(scores: list[float], data: st.DataObject) -> None:
    keep = data.draw(st.integers(1, len(scores)))
    magnitudes = torch.tensor(scores).abs()
    chosen = top_share(torch.tensor(scores), keep)
    assert int(chosen.sum()) == keep
    if keep < len(scores):
        assert magnitudes[chosen].min() >= magnitudes[~chosen].max()


def test_scores_get_the_gradient_of_the_mask_with_their_sign() -> None:
    layer = masked_linear(3, 2, density=0.5)
    assert bool((layer.scores < 0).any())
    assert bool((layer.scores > 0).any())
    features = torch.randn(4, 3)
    (layer(features) * torch.tensor([1.0, -2.0])).sum().backward()
    signed = torch.where(layer.signs, layer.magnitude, -layer.magnitude)
    wanted = torch.outer(torch.tensor([1.0, -2.0]), features.sum(dim=0)) * signed * layer.scores.detach().sign()
    torch.testing.assert_close(layer.scores.grad, wanted)


def test_effective_weights_are_plus_c_minus_c_or_zero_with_the_given_density() -> None:
    layer = masked_linear(20, 10, density=0.32)
    weights = layer.effective_weight().detach()
    c = math.sqrt(2 / (20 * 0.32))
    assert layer.magnitude == pytest.approx(c)
    torch.testing.assert_close(weights.unique(), torch.tensor([-c, 0.0, c]))
    assert int((weights != 0).sum()) == 64
    assert torch.equal(weights[weights != 0] > 0, layer.signs[weights != 0])


def test_learning_changes_which_weights_are_kept_and_never_their_signs() -> None:
    layer = masked_linear(8, 8, density=0.5)
    signs, mask = layer.signs.clone(), layer.effective_weight().detach() != 0
    optimizer = torch.optim.Adam(layer.parameters(), lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
    assert torch.equal(layer.signs, signs)
    assert not torch.equal(layer.effective_weight() != 0, mask)


def test_finishing_keeps_the_weights_and_drops_the_scores() -> None:
    layer = masked_linear(5, 3, density=0.4)
    learned = layer.effective_weight().detach()
    layer.finish(0)
    assert layer.scores.numel() == 0
    assert layer.get_buffer("mask_0").dtype == torch.uint8
    assert torch.equal(layer.effective_weight(), learned)
    assert torch.equal(layer.live_weight(0), learned)


def test_the_next_task_chooses_anew_and_the_old_one_keeps_its_choice() -> None:
    layer = masked_linear(8, 8, density=0.5)
    layer.finish(0)
    first = layer.effective_weight().detach()
    layer.grow()
    layer.selection.task = 1
    assert not torch.equal(layer.effective_weight(), first)
    layer.finish(1)
    layer.selection.task = 0
    assert torch.equal(layer.effective_weight(), first)


@pytest.mark.parametrize("negative", [False, True])
def test_a_weight_that_lowers_the_loss_is_selected_whatever_the_sign_of_its_score(negative: bool) -> None:
    layer = masked_linear(2, 1, density=0.5)
    with torch.no_grad():
        layer.signs.fill_(True)
        layer.scores.copy_(torch.tensor([[0.2, -0.1 if negative else 0.1]]))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    (-layer(torch.tensor([[0.0, 1.0]]))).sum().backward()
    optimizer.step()
    assert (layer.effective_weight() != 0).tolist() == [[False, True]]


@pytest.mark.parametrize("overall", [0.05, 0.32, 0.45, 0.5])
def test_densities_add_up_to_the_overall_share_and_none_is_above_a_half(overall: float) -> None:
    layers = [conv(3, 16), conv(16, 64), linear(64, 128)]
    spread_density(layers, overall)
    sizes = [math.prod(layer.shape) for layer in layers]
    kept = sum(layer.density * size for layer, size in zip(layers, sizes, strict=True))
    assert kept == pytest.approx(overall * sum(sizes))
    assert all(0 < layer.density <= 0.5 for layer in layers)


def test_small_layers_keep_half_and_large_ones_become_sparse_by_the_erdos_renyi_rule() -> None:
    layers = [linear(2, 2), linear(50, 50), linear(100, 100)]
    spread_density(layers, 0.3)
    # 0.3 of 12,504 weights are 3,751.2. The first layer keeps 2 of 4. Dimensions add up to 100 and 200 in the others.
    assert [layer.density for layer in layers] == pytest.approx([0.5, 3749.2 / 300 / 25, 3749.2 / 300 / 50])


def test_links_keep_as_many_weights_as_the_authors_networks_do() -> None:
    layers = [conv(3, 64), conv(64, 128), conv(128, 256), linear(256, 800), linear(800, 8)]
    spread_links(layers, 32)
    assert [layer.keep for layer in layers] == [864, 6144, 12288, 33792, 3200]


@pytest.mark.parametrize("density", [0.0, -0.1, 0.6])
def test_an_impossible_density_is_refused(density: float) -> None:
    with pytest.raises(ValueError, match=r"density is .*; allowed: above 0 and up to 0.5"):
        Network(tiny_config("sup", density=density))


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(ValueError, match="method is 'ewc'; allowed: hat, sup"):
        tiny_config("ewc")
