"""The part of each class in the statistics, and vectors that stand in for its images."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.bundle.pooled import Projection, Statistics
from serving.bundle.pooled.factors import ClassFactor, ClassFactors


@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 3), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_factors_add_up_to_the_statistics(classes: int, images: int, rows: int, seed: int) -> None:
    random, projection = np.random.default_rng(seed), Projection(4, rows)
    encoded = random.standard_normal((classes * images, 4)).astype(np.float32)
    # Numbers that are the same for all images, as the trunk's often are.
    encoded[:, 1] = 0
    ids = np.repeat(np.arange(classes), images)
    factors = ClassFactors(projection).with_classes(encoded, ids)
    found, wanted = factors.statistics(), Statistics.of(encoded, ids, projection)
    assert found.counts.tolist() == wanted.counts.tolist()
    np.testing.assert_allclose(found.sums, wanted.sums, atol=1e-12)
    np.testing.assert_allclose(found.gram, wanted.gram, atol=1e-5)
    again = ClassFactors.from_arrays(factors.to_arrays()).statistics()
    assert np.array_equal(again.gram, found.gram)
    if classes > 1:
        without = factors.without(0).statistics()
        rest = Statistics.of(encoded[ids > 0], ids[ids > 0] - 1, projection)
        np.testing.assert_allclose(without.gram, rest.gram, atol=1e-5)


@pytest.mark.parametrize("images", [1, 2, 7, 40, 300])
def test_stand_ins_have_the_sums_of_the_class(images: int) -> None:
    phi = np.random.default_rng(images).standard_normal((images, 12)) + 3
    factor = ClassFactor.of(phi)
    found = factor.stand_ins(images, seed=1)
    assert found.shape == phi.shape
    # Those of a large class are drawn.
    mean, gram = (1e-5, 1e-4) if images <= 256 else (0.3, 2.0)
    np.testing.assert_allclose(found.mean(axis=0), phi.mean(axis=0), atol=mean)
    np.testing.assert_allclose(found.T @ found / images, phi.T @ phi / images, atol=gram)
    if images > 2:
        # They are no image of the class; two vectors follow from their mean and their difference.
        assert np.abs(found[:, None] - phi[None]).max(axis=2).min() > 1e-3


def test_a_factor_stores_no_single_vector() -> None:
    phi = np.random.default_rng(0).standard_normal((5, 30))
    rows = ClassFactor.of(phi).rows
    assert rows.shape == (4, 30)
    cosines = rows @ phi.T / np.linalg.norm(rows, axis=1)[:, None] / np.linalg.norm(phi, axis=1)
    assert np.abs(cosines).max() < 0.999
