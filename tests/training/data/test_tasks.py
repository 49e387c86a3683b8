from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers import LABELS, TINY_PRESET, random_pixels, tiny_source
from training.config import Lesson, RunConfig
from training.data import tasks
from training.data.images import DataError
from training.data.tasks import (
    Batchable,
    TaskData,
    check_classes,
    check_new,
    in_tasks_of,
    parse_tasks,
    side_stream,
    task_data,
)

TASKS = (("zero", "one"), ("three", "two"))
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "expected"),
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
def test_tasks_on_the_command_line(text: str, expected: tuple[tuple[str, ...], ...]) -> None:
    assert parse_tasks(text) == expected


def test_classes_are_dealt_out_in_order_and_the_last_task_takes_what_is_left() -> None:
    assert in_tasks_of("abcde", 2) == (("a", "b"), ("c", "d"), ("e",))


def test_a_task_needs_a_class() -> None:
    with pytest.raises(ValueError, match="classes per task is -1; allowed: 1 or more"):
        in_tasks_of("abc", -1)


def test_a_class_without_images_is_named_with_those_there_are() -> None:
    with pytest.raises(DataError, match="no images of 'cat', 'dog'; the data has: zero, one, two, three, four"):
        check_classes((("zero", "cat"), ("dog",)), tiny_source().classes)


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


# ---- images that stay in host memory


class Streams:
    """Records the calls to a GPU's streams, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.count = 0
        patch.setattr(tasks, "side_stream", lambda device: self)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda device: self)
        patch.setattr(torch.Tensor, "pin_memory", lambda pixels: self.note(f"fetch {len(pixels)}") or pixels)
        patch.setattr(torch.Tensor, "record_stream", lambda pixels, stream: self.note(f"use {len(pixels)}"))

    def note(self, what: str) -> None:
        self.done.append(what)

    def record_event(self) -> int:
        self.count += 1
        return self.count

    def wait_event(self, event: int) -> None:
        self.note(f"wait for {event}")


def test_images_in_host_memory_are_fetched_one_batch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams(monkeypatch)
    # `meta` stands for a GPU: another device than that of the pixels.
    data = Batchable(random_pixels(6, 1), torch.zeros(6, dtype=torch.long, device="meta"))
    for images in data.in_turn(torch.arange(6).split([1, 2, 3])):
        assert images.device == data.device
        streams.note(f"learn {len(images)}")
    assert streams.done == [
        *("fetch 1", "fetch 2", "wait for 1", "use 1", "learn 1"),
        *("fetch 3", "wait for 2", "use 2", "learn 2"),
        *("wait for 3", "use 3", "learn 3"),
    ]
    assert not list(data.in_turn([]))


def test_devices_without_streams_fetch_ahead_all_the_same() -> None:
    assert side_stream(torch.device("meta")) is None
    data = Batchable(random_pixels(3, 1), torch.zeros(3, dtype=torch.long, device="meta"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "pin_memory", lambda pixels: pixels)
        assert [len(images) for images in data.in_turn(torch.arange(3).split(2))] == [2, 1]
    here = Batchable(random_pixels(3, 1), torch.arange(3))
    batches = list(here.in_turn(torch.tensor([2, 0, 1]).split(2)))
    assert torch.equal(torch.cat(batches), here.images(torch.tensor([2, 0, 1])))


def test_a_class_that_looks_like_a_learned_one_is_not_new() -> None:
    config = RunConfig(TINY_PRESET, 0, (Lesson((("red  panda", "caf\u00e9"),), "digits"),))
    for label in ("red panda", "cafe\u0301"):
        with pytest.raises(DataError, match="has already learned"):
            check_new(((label, "dog"),), config)
    check_new((("dog",),), config)
