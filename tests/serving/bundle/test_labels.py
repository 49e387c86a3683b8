"""Names of classes that look the same to people are one class."""

from __future__ import annotations

import pytest

from serving.bundle.labels import alike, check_labels, plain, same_label

COMPOSED, DECOMPOSED = "caf\u00e9", "cafe\u0301"


@pytest.mark.parametrize("text", ["red panda", " red panda", "red panda ", "red  panda"])
def test_spaces_that_nobody_sees_make_no_other_name(text: str) -> None:
    assert plain(text) == "red panda"
    assert same_label(text, ["cat", "red panda"]) == "red panda"


def test_accents_make_the_same_name_however_they_are_stored() -> None:
    assert plain(DECOMPOSED) == plain(COMPOSED) == COMPOSED
    assert same_label(DECOMPOSED, [COMPOSED]) == COMPOSED
    assert same_label(COMPOSED, [DECOMPOSED]) == DECOMPOSED
    assert same_label("cafe", [COMPOSED]) is None


def test_a_model_that_has_both_spellings_keeps_them() -> None:
    both = [COMPOSED, DECOMPOSED, "cat", "cat "]
    check_labels(both)
    assert [same_label(label, both) for label in both] == both
    assert alike(both) == [(COMPOSED, DECOMPOSED), ("cat", "cat ")]
    assert alike(["cat", "Cat", "cat"]) == []
