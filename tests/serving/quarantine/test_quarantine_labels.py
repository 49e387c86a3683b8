"""Operations on groups and labels, on SQLite and on PostgreSQL."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from serving.quarantine.records import FoundGroup, LabelError, LearnedError, StoreError, UnknownIdError
from serving.quarantine.store import Store
from tests.helpers_quarantine import arrivals


@pytest.fixture
def filled(store: Store) -> Store:
    """Items 1 to 8, in the groups 1 (of 1 to 4) and 2 (of 5 to 7)."""
    store.add(arrivals(range(8)))
    store.replace_groups([FoundGroup([1, 2, 3, 4], 0.9, None, False), FoundGroup([5, 6, 7], 0.5, "three", True)])
    return store


def members(store: Store) -> dict[int | None, list[int]]:
    found: dict[int | None, list[int]] = {}
    for item in store.items():
        found.setdefault(item.group, []).append(item.id)
    return found


def test_groups_are_as_they_were_found(filled: Store) -> None:
    assert members(filled) == {1: [1, 2, 3, 4], 2: [5, 6, 7], None: [8]}
    one, two = filled.groups()
    assert (one.id, one.size, one.copies, one.cohesion, one.near_class, one.shifted) == (1, 4, 4, 0.9, None, False)
    assert (two.id, two.size, two.copies, two.cohesion, two.near_class, two.shifted) == (2, 3, 3, 0.5, "three", True)
    assert (one.state, one.label, one.states) == ("new", None, {"new": 4})
    assert [item.id for item in filled.items(group=2)] == [5, 6, 7]
    assert [item.id for item in filled.items(group=None)] == [8]


def test_who_named_what_and_when_is_written_down(filled: Store) -> None:
    before = time.time()
    filled.name([1, 2], " eight ", "ann")
    filled.mark_known([3], "three", "bob")
    filled.mark_junk([4], "bob")
    labelled = [(item.state, item.label, item.labelled_by) for item in filled.items(group=1)]
    assert labelled == [("named", "eight", "ann")] * 2 + [("known", "three", "bob"), ("junk", None, "bob")]
    assert all(before <= (item.labelled_at or 0) <= time.time() for item in filled.items(group=1))
    (group, _) = sorted(filled.groups(), key=lambda group: group.id)
    assert (group.state, group.label) == (None, None)
    assert group.states == {"named": 2, "known": 1, "junk": 1}
    assert group.labels == {"eight": 2, "three": 1}
    filled.clear([1, 2, 3, 4], "ann")
    assert {(item.state, item.label, item.labelled_by, item.labelled_at) for item in filled.items(group=1)} == {
        ("new", None, None, None)
    }
    changes = [(change.who, change.what, change.items, change.detail) for change in filled.changes()]
    assert changes == [
        ("ann", "clear", 4, ""),
        ("bob", "junk", 1, ""),
        ("bob", "known", 1, "three"),
        ("ann", "name", 2, "eight"),
    ]
    assert [change.what for change in filled.changes(limit=1)] == ["clear"]


def test_a_group_is_called_what_all_its_members_are_called(filled: Store) -> None:
    filled.name([1, 2, 3, 4], "eight", "ann")
    two, one = filled.groups()
    assert (two.id, one.id) == (2, 1), "what is to be looked at comes first"
    assert (one.state, one.label) == ("named", "eight")
    filled.name([4], "nine", "ann")
    assert [(group.state, group.label) for group in filled.groups()] == [("new", None), ("named", None)]


def test_items_are_moved(filled: Store) -> None:
    filled.move([1, 8], 2, "ann")
    assert members(filled) == {1: [2, 3, 4], 2: [1, 5, 6, 7, 8]}
    filled.move([2, 3, 4], None, "ann")
    assert members(filled) == {None: [2, 3, 4], 2: [1, 5, 6, 7, 8]}
    assert [group.id for group in filled.groups()] == [2]
    assert [change.detail for change in filled.changes()] == ["out of every group", "to group 2"]


def test_groups_are_merged_into_the_first(filled: Store) -> None:
    assert filled.merge([2, 1], "ann") == 2
    assert members(filled) == {2: [1, 2, 3, 4, 5, 6, 7], None: [8]}
    (group,) = filled.groups()
    assert (group.size, group.cohesion, group.near_class, group.shifted) == (7, 0.5, None, False)
    assert [(change.who, change.what, change.items) for change in filled.changes()] == [("ann", "merge", 4)]


ACTIONS: dict[str, Callable[[Store, Sequence[int]], object]] = {
    "name": lambda store, ids: store.name(ids, "eight", "ann"),
    "known": lambda store, ids: store.mark_known(ids, "three", "ann"),
    "junk": lambda store, ids: store.mark_junk(ids, "ann"),
    "clear": lambda store, ids: store.clear(ids, "ann"),
    "move": lambda store, ids: store.move(ids, 2, "ann"),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_if_one_item_is_not_there_nothing_is_done(filled: Store, action: str) -> None:
    before = [(item.state, item.group) for item in filled.items()]
    with pytest.raises(UnknownIdError, match=r"^no item 98, 99$"):
        ACTIONS[action](filled, [1, 99, 98])
    with pytest.raises(UnknownIdError, match="no item given"):
        ACTIONS[action](filled, [])
    assert [(item.state, item.group) for item in filled.items()] == before
    assert filled.changes() == []


def test_a_group_that_is_not_there_is_named(filled: Store) -> None:
    with pytest.raises(UnknownIdError, match="no group 9"):
        filled.move([1], 9, "ann")
    with pytest.raises(UnknownIdError, match="no group 9"):
        filled.merge([1, 9], "ann")
    with pytest.raises(UnknownIdError, match="1 groups to merge; allowed: 2 or more"):
        filled.merge([1, 1], "ann")
    assert members(filled) == {1: [1, 2, 3, 4], 2: [5, 6, 7], None: [8]}


@pytest.mark.parametrize("label", ["", "  ", "unknown", "a\nb", "x" * 101])
def test_an_invalid_label_is_refused(filled: Store, label: str) -> None:
    with pytest.raises(LabelError, match=r"allowed: 1 to 100 printable characters without .* and not 'unknown'"):
        filled.name([1], label, "ann")
    with pytest.raises(LabelError, match="name of a person"):
        filled.name([1], "eight", "")
    assert filled.items()[0].state == "new"


def test_a_class_of_the_model_is_spelled_as_the_model_spells_it(filled: Store) -> None:
    """Models of before, or of others, may have names that no new class may have."""
    known = (" cat", "x" * 150, "unknown")
    for label in known:
        filled.mark_known([1], label, "ann")
        assert filled.items()[0].label == label
        filled.teach([2], f"{label.strip()} ", known, "ann")
        assert (filled.items()[1].label, filled.items()[1].state) == (label, "known")
    with pytest.raises(LabelError, match="allowed: 1 to 200 printable characters"):
        filled.mark_known([1], "x" * 201, "ann")
    filled.teach([2], " dog ", known, "ann")
    assert (filled.items()[1].label, filled.items()[1].state) == ("dog", "named")


# ---- groups found by discover


def test_new_groups_replace_old_ones_and_keep_labels(filled: Store) -> None:
    filled.name([1, 2], "eight", "ann")
    filled.name([5, 6, 7], "nine", "ann")
    filled.replace_groups([FoundGroup([3, 8, 99], 0.7, None, False), FoundGroup([98], 1.0, None, False)])
    # Item 4 is in no group now; labelled items stayed in their group.
    assert members(filled) == {1: [1, 2], 2: [5, 6, 7], 3: [3, 8], None: [4]}
    assert [(group.id, group.label) for group in filled.groups()] == [(3, None), (1, "eight"), (2, "nine")]
    filled.replace_groups([FoundGroup([1, 4], 0.7, None, False)])
    assert members(filled) == {1: [2], 2: [5, 6, 7], 4: [1, 4], None: [3, 8]}
    assert filled.items(ids=[1])[0].label == "eight"
    filled.replace_groups([])
    assert members(filled)[None] == [3, 4, 8]


def test_groups_that_make_no_sense_are_refused(filled: Store) -> None:
    for wrong in ([FoundGroup([1, 2], 0.5, None, False)] * 2, [FoundGroup([1], 1.5, None, False)]):
        with pytest.raises(ValueError, match=r"in more than one group: items \[1, 2\]|cohesion is 1.5"):
            filled.replace_groups(wrong)
    assert members(filled) == {1: [1, 2, 3, 4], 2: [5, 6, 7], None: [8]}


def test_a_group_goes_with_its_last_item_and_its_number_is_not_used_again(filled: Store) -> None:
    filled.delete([5, 6, 7])
    assert [group.id for group in filled.groups()] == [1]
    filled.replace_groups([FoundGroup([8], 0.5, None, False)])
    assert [group.id for group in filled.groups()] == [3]


# ---- learning


def test_what_was_named_can_be_learned_once(filled: Store) -> None:
    filled.name([1, 2], "nine", "ann")
    filled.name([3, 4, 5], "eight", "ann")
    filled.mark_known([6], "three", "ann")
    labelled = {label: [item.id for item in items] for label, items in filled.labelled().items()}
    assert labelled == {"eight": [3, 4, 5], "nine": [1, 2]}
    assert filled.count_labelled() == {"eight": 3, "nine": 2}
    # People continue to label while it is learned.
    filled.name([2], "eight", "bob")
    filled.clear([5], "bob")
    filled.delete([4])
    assert filled.mark_learned(labelled, "v2") == 2
    states = {item.id: (item.state, item.label, item.learned_in) for item in filled.items()}
    assert states[1] == ("learned", "nine", "v2")
    assert states[2] == ("named", "eight", None)
    assert states[3] == ("learned", "eight", "v2")
    assert states[5] == ("new", None, None)
    assert {label: [item.id for item in items] for label, items in filled.labelled().items()} == {"eight": [2]}


def test_what_was_learned_keeps_its_label(filled: Store) -> None:
    filled.name([1], "eight", "ann")
    filled.mark_learned({"eight": [1]}, "v2")
    for action in ("name", "known", "junk", "clear"):
        with pytest.raises(LearnedError, match="item 1 was learned as 'eight' in version v2"):
            ACTIONS[action](filled, [2, 1])
    assert filled.items(ids=[2])[0].state == "new"
    filled.move([1], 2, "ann")
    assert isinstance(LearnedError("x"), StoreError)


def test_names_that_look_the_same_are_one_class(filled: Store) -> None:
    for number, label in enumerate(("caf\u00e9", "cafe\u0301", " caf\u00e9", "red  panda", "red panda"), start=1):
        filled.name([number], label, "ada")
    assert filled.count_labelled() == {"caf\u00e9": 3, "red panda": 2}
    filled.begin_class("caf\u00e8", "ada")
    with pytest.raises(LabelError, match="exists"):
        filled.begin_class("cafe\u0300", "bob")
    filled.teach([6], "caf\u00e9", ["cafe\u0301"], "ada")
    assert [each.label for each in filled.examples("cafe\u0301")] == ["cafe\u0301"]
