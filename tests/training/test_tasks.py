from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers import LABELS, TINY_PRESET, tiny_source
from training.config import Lesson, RunConfig
from training.datasets import DataError
from training.tasks import TaskData, check_classes, in_tasks_of, parse_tasks, task_data

TASKS = (("zero", "one"), ("three", "two"))
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("cat,dog; ship,truck", (("cat", "dog"), ("ship", "truck"))),
        (" cat , dog ;ship;", (("cat", "dog"), ("ship",))),
        ("red panda", (("red panda",),)),
        (" ; , ;", ()),
        ("", ()),
        ('"salt, pepper",dog; "a;b" , "say ""hi"""', (("salt, pepper", "dog"), ("a;b", 'say "hi"'))),
        ('5" nail, "old" car', (('5" nail', '"old" car'),)),
    ],
)
def test_tasks_on_the_command_line(text: str, tasks: tuple[tuple[str, ...], ...]) -> None:
    assert parse_tasks(text) == tasks


def test_classes_are_dealt_out_in_order_and_the_last_task_takes_what_is_left() -> None:
    assert in_tasks_of("abcde", 2) == (("a", "b"), ("c", "d"), ("e",))


def test_a_task_needs_a_class() -> None:
    with pytest.raises(ValueError, match="classes per task is -1; allowed: 1 or more"):
        in_tasks_of("abc", -1)


def test_a_class_without_images_is_named_with_those_there_are() -> None:
    with pytest.raises(DataError, match="no images of 'cat', 'dog'; the data has: zero, one, two, three, four"):
        check_classes((("zero", "cat"), ("dog",)), tiny_source())


def of_task(task: int, seed: int = 0, limit: int | None = None) -> TaskData:
    preset = replace(TINY_PRESET, images_per_class=limit)
    return task_data(tiny_source(), RunConfig(preset, seed, (Lesson(TASKS, "tiny"),)), task, CPU)


def test_a_task_sees_its_own_images_only_and_numbers_classes_by_its_labels() -> None:
    data, source = of_task(1), tiny_source()
    assert data.labels == ("three", "two")
    assert data.classes == 2
    seen = torch.cat([data.train.pixels, data.validation.pixels])[:, 0].numpy()
    classes = torch.cat([data.train.local_classes, data.validation.local_classes])
    label_of = {
        image.tobytes(): str(name) for image, name in zip(source.train.pixels, source.train.labels, strict=True)
    }
    assert [label_of[image.tobytes()] for image in seen] == [data.labels[number] for number in classes]
    assert len(seen) == len(set(map(np.ndarray.tobytes, seen))) == 20
    assert (len(data.train), len(data.validation)) == (12, 8)


def test_no_more_images_of_a_class_than_asked_for() -> None:
    data = of_task(0, limit=5)
    assert torch.cat([data.train.local_classes, data.validation.local_classes]).bincount().tolist() == [5, 5]


def test_the_images_of_a_task_depend_on_the_seed() -> None:
    first, again, other = (of_task(0, seed).train.pixels for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_images_are_shares_of_white_with_channels_first() -> None:
    data = of_task(0).train
    assert data.pixels.dtype == torch.uint8
    images = data.images(slice(0, 3))
    assert images.shape == (3, 1, 8, 8)
    torch.testing.assert_close(images, data.pixels[:3].float() / 255)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ((("zero", "one"), ("one",)), "each class belongs to one task; given twice: one"),
        ((LABELS, ()), "every task needs at least one class"),
        ((), "every task needs at least one class"),
    ],
)
def test_impossible_tasks_are_refused(tasks: tuple[tuple[str, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RunConfig(TINY_PRESET, 0, (Lesson(tasks, "tiny"),))
