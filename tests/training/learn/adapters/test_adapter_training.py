"""Adapters learn from encoded views, stay as they are when later tasks are learned, and bake into small layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from models.network import Network
from models.trunks.trunk import TrunkSpec
from training.config import Lesson, Preset, RunConfig
from training.data.images import Images
from training.host.seeds import seed_everything
from training.learn.adapters.adapter_training import as_rows, learn_features, learn_head, settle_norms
from training.learn.adapters.baking import baked_adapter, network_logits
from training.learn.adapters.views import MOST_PER_CLASS, AdapterData, EncodedViews, learned_and_held_out
from training.learn.optimizers import make_optimizer
from training.learn.photos import Loss, photos_preset

SPEC = TrunkSpec("small", "0" * 64, 64, (16, 32))
DIM, IMAGES = SPEC.dim, 24


def small_preset(method: str, loss: Loss = "csi") -> Preset:
    preset = photos_preset(SPEC, method, 32, loss)
    features = replace(preset.features, epochs=6, batch_size=16)
    return replace(preset, features=features, head=replace(preset.head, epochs=6))


def drawn_data(seed: int, rotations: int = 4, views: int = 2) -> AdapterData:
    """Two classes around means of their own, which a rotation moves."""
    generator = torch.Generator().manual_seed(seed)
    local = torch.arange(IMAGES) % 2
    means, turns = torch.randn(2, DIM, generator=generator), torch.randn(rotations, DIM, generator=generator)
    vectors = torch.randn(IMAGES, views, rotations, DIM, generator=generator) * 0.5
    vectors += means[local][:, None, None] + turns
    vectors /= vectors.norm(dim=3, keepdim=True)
    held = (means[local[:8]][:, None] + turns + 0.5 * torch.randn(8, rotations, DIM, generator=generator)).numpy()
    held /= np.linalg.norm(held, axis=2, keepdims=True)
    return AdapterData(("a", "b"), vectors, local, np.arange(8), held, local[:8].numpy())


def learn(network: Network, task: int, data: AdapterData, preset: Preset) -> None:
    seed_everything(0, task)
    network.add_task(data.classes)
    optimizer = make_optimizer("adam", network.trainable(task), preset.features.lr)
    for _ in learn_features(network, task, data, preset.features, optimizer, range(preset.features.epochs)):
        pass
    network.finish(task)
    settle_norms(network, task, data)
    if preset.features.loss == "csi":
        optimizer = make_optimizer("adam", list(network.head(task).parameters()), preset.head.lr)
        for _ in learn_head(network, task, data, preset.head, optimizer, range(preset.head.epochs)):
            pass
    network.eval()


@pytest.mark.parametrize(("method", "loss"), [("hat", "csi"), ("sup", "csi"), ("hat", "ce")])
def test_an_adapter_is_learned_baked_and_never_changes_again(method: str, loss: Loss) -> None:
    preset = small_preset(method, loss)
    rotations = preset.network.rotations
    network, data = Network(preset.network), drawn_data(1, rotations)
    learn(network, 0, data, preset)
    adapter = baked_adapter(network, 0)
    views = data.vectors[:, 0].numpy()
    got = adapter.logits(views)
    assert (got.argmax(axis=1) == data.local_classes.numpy()).mean() > 0.75
    expected = network_logits(network, 0, views)
    assert np.abs(got - expected).max() <= 0.02 * expected.std()
    np.testing.assert_array_equal(adapter.logits(views[:1]), got[:1])
    before = adapter.to_arrays()
    learn(network, 1, drawn_data(2, rotations), preset)
    after = baked_adapter(network, 0).to_arrays()
    assert before.keys() == after.keys()
    for name, values in before.items():
        assert np.array_equal(after[name], values), name
    assert np.array_equal(network_logits(network, 0, views), expected)


def test_only_live_units_are_stored() -> None:
    preset = small_preset("hat")
    network = Network(preset.network)
    learn(network, 0, drawn_data(1), preset)
    live = [len(units.live(0)) for units in network.masks[:2]]  # type: ignore[operator, union-attr]
    assert [len(layer.weight) for layer in baked_adapter(network, 0).layers] == live
    assert sum(live) < 2 * preset.network.base


def test_every_rotation_of_a_class_is_a_class_of_its_own() -> None:
    views = torch.arange(2 * 2 * 4 * DIM, dtype=torch.float32).view(2, 2, 4, DIM)
    rows, classes = as_rows(views, torch.tensor([0, 1]), 2)
    assert rows.shape == (16, DIM, 1, 1)
    assert classes.tolist() == [0, 2, 4, 6, 0, 2, 4, 6, 1, 3, 5, 7, 1, 3, 5, 7]
    assert torch.equal(rows[5, :, 0, 0], views[0, 1, 1])


def test_a_batch_has_different_views_of_each_photo() -> None:
    vectors = torch.arange(3.0).view(1, 3, 1, 1).expand(5, 3, 4, DIM)
    data = EncodedViews(vectors, torch.zeros(5, dtype=torch.int64), drawn=2)
    torch.manual_seed(0)
    seen: list[Tensor] = [batch[:, :, 0, 0] for batch in data.in_turn([torch.arange(5)] * 20)]
    drawn = torch.cat(seen)
    assert (drawn[:, 0] != drawn[:, 1]).all()
    assert drawn.unique().tolist() == [0, 1, 2]


def config_for(labels: tuple[str, ...]) -> RunConfig:
    return RunConfig(photos_preset(SPEC), 0, (Lesson((labels,), "folder"),), trunk=SPEC)


def images_of(**counts: int) -> Images:
    labels = np.array([label for label, count in counts.items() for _ in range(count)])
    return Images(np.zeros((len(labels), DIM), np.float32), labels)


def test_some_photos_of_each_class_judge_and_no_more_are_learned_than_needed() -> None:
    images = images_of(a=MOST_PER_CLASS + 200, b=5)
    taught, judging = learned_and_held_out(images, 0, 2, config_for(("a", "b")))
    assert not set(taught) & set(judging)
    assert (images.labels[taught] == "a").sum() == MOST_PER_CLASS
    assert [(images.labels[judging] == label).sum() for label in "ab"] == [40, 1]
    assert (images.labels[taught] == "b").sum() == 4


def test_a_source_with_its_own_validation_photos_keeps_them() -> None:
    taught, judging = learned_and_held_out(images_of(a=6, b=6), 4, 2, config_for(("a", "b")))
    assert judging.tolist() == [8, 9, 10, 11]
    assert set(taught) == set(range(8))
