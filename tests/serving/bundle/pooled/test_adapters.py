"""Adapters sharpen the classes within a task, and nothing else; a file gives them back to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from serving.bundle.lessons import archive
from serving.bundle.pooled import Detector, projection_for
from serving.bundle.pooled.adapters import PREFIX, Adapter, sharpened
from serving.bundle.pooled.float16_rows import rounded

DIM, UNITS, CLASSES = 24, 7, 3


def random_adapter(rotations: int = 1, *, ternary: bool = False, seed: int = 0) -> Adapter:
    random = np.random.default_rng(seed)
    first, second = random.normal(size=(UNITS, DIM)), random.normal(size=(5, UNITS))
    if ternary:
        sizes = random.uniform(0.1, 1, (UNITS, 1)).astype(np.float32)
        first = sizes * random.integers(-1, 2, first.shape)
    layers = [(first, random.normal(size=UNITS)), (second, random.normal(size=5))]
    inputs = random.normal(size=DIM), random.normal(size=DIM)
    heads, biases = random.normal(size=(rotations, 5, CLASSES)), random.normal(size=(rotations, CLASSES))
    return Adapter.of(inputs, layers, heads, biases, 1.7)


@pytest.mark.parametrize("ternary", [False, True])
@pytest.mark.parametrize("rotations", [1, 4])
def test_a_file_gives_the_same_logits_to_the_bit(rotations: int, ternary: bool) -> None:
    adapter = random_adapter(rotations, ternary=ternary)
    again = Adapter.from_arrays({**adapter.to_arrays(), "lda_bias": np.zeros(3)})
    assert again is not None
    vectors = np.random.default_rng(1).normal(size=(7, rotations, DIM))
    assert np.array_equal(again.logits(vectors), adapter.logits(vectors))
    assert (f"{PREFIX}layer0.kept" in adapter.to_arrays()) == ternary


def test_weights_of_one_size_take_two_bits_each() -> None:
    random = np.random.default_rng(0)
    weight = 0.3 * random.integers(-1, 2, (64, 800))
    inputs, heads, biases = (np.ones(800), np.zeros(800)), np.ones((1, 64, 2)), np.zeros((1, 2))
    adapter = Adapter.of(inputs, [(weight, np.zeros(64))], heads, biases, 1.0)
    assert sum(each.nbytes for each in adapter.to_arrays().values()) < 64 * 800 / 4 + 8000
    plain = Adapter.of(inputs, [(random.normal(size=(64, 800)), np.zeros(64))], heads, biases, 1.0)
    assert sum(each.nbytes for each in plain.to_arrays().values()) < 64 * 800 * 2 + 8000


def test_twenty_tasks_of_ten_classes_take_less_than_their_share() -> None:
    """The largest adapters that a task can have, and detectors of the relative score, which grow with the classes
    before: with the classifier of all classes at most 1.5 MB per task."""
    dim, units, tasks, classes = 2048, 128, 20, 10
    projection, random, size = projection_for(dim), np.random.default_rng(0), 0
    for task in range(tasks):
        ids = classes * task + np.arange(classes)
        rows, weights = (
            random.normal(size=(classes * (task + 1), dim)),
            random.normal(size=(classes, projection.length)),
        )
        detector = Detector(projection, ids, weights[0], rounded(rows), rounded(weights), weights[:, 0])
        layers = [(random.normal(size=(units, width)), np.zeros(units)) for width in (dim, units)]
        heads, biases = random.normal(size=(4, units, classes)), np.zeros((4, classes))
        adapter = Adapter.of((np.ones(dim), np.zeros(dim)), layers, heads, biases, 1.0)
        size += len(archive({**detector.to_arrays(), **adapter.to_arrays()}))
    classifier = np.zeros((tasks * classes, projection.length), np.float32)
    assert size + classifier.nbytes <= 1.5e6 * tasks


def test_a_row_does_not_depend_on_its_batch() -> None:
    adapter, vectors = random_adapter(4), np.random.default_rng(2).normal(size=(7, 4, DIM)).astype(np.float32)
    together = adapter.logits(vectors)
    for row in range(7):
        assert np.array_equal(adapter.logits(vectors[row : row + 1])[0], together[row])


def test_the_upright_part_is_that_of_the_first_rotation() -> None:
    adapter = random_adapter(4)
    vectors = np.random.default_rng(3).normal(size=(2, 1, DIM))
    hidden = vectors[:, 0].astype(np.float32) * adapter.inputs[0] + adapter.inputs[1]
    for weight, bias in adapter.layers:
        hidden = np.maximum(hidden @ weight.T + bias, 0)
    expected = 1.7 * (hidden @ adapter.heads[0] + adapter.biases[0])
    np.testing.assert_allclose(adapter.upright().logits(vectors), expected, rtol=1e-5)


def test_a_file_without_an_adapter_has_none() -> None:
    assert Adapter.from_arrays({"lda_bias": np.zeros(3)}) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layer1.bias", np.zeros(4, np.float32)),
        ("factors", np.zeros(DIM + 1, np.float32)),
        ("heads", np.zeros((1, 6, CLASSES), np.float16)),
        ("layer0.weight", np.zeros((UNITS + 1, DIM), np.float16)),
        ("biases", np.full((1, CLASSES), np.nan, np.float32)),
    ],
)
def test_parts_that_do_not_fit_are_refused(name: str, value: NDArray[Any]) -> None:
    arrays = {**random_adapter().to_arrays(), PREFIX + name: value}
    with pytest.raises(ValueError, match="adapter: "):
        Adapter.from_arrays(arrays)
    del arrays[f"{PREFIX}heads"]
    with pytest.raises(KeyError):
        Adapter.from_arrays(arrays)


def softmax(values: NDArray[Any]) -> NDArray[Any]:
    exponentials = np.exp(values - values.max(axis=1, keepdims=True))
    result: NDArray[Any] = exponentials / exponentials.sum(axis=1, keepdims=True)
    return result


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.3, 1.0]), st.floats(0.1, 20))
def test_the_task_keeps_its_probability_and_its_classes_are_mixed(seed: int, weight: float, size: float) -> None:
    random = np.random.default_rng(seed)
    columns = [slice(0, 2), slice(2, 5)]
    pooled, adapted = random.normal(size=(6, 5)) * size, [random.normal(size=(6, each)) * size for each in (2, 3)]
    before, after = softmax(pooled), softmax(sharpened(pooled, columns, adapted, weight).astype(np.float64))
    for place, own in zip(columns, adapted, strict=True):
        np.testing.assert_allclose(after[:, place].sum(axis=1), before[:, place].sum(axis=1), atol=1e-5)
        within = after[:, place] / after[:, place].sum(axis=1, keepdims=True)
        expected = softmax((1 - weight) * np.log(softmax(pooled[:, place])) + weight * np.log(softmax(own)))
        np.testing.assert_allclose(within, expected, atol=1e-4)
