"""Two processes on the CPU learn what one process learns from the joint batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.helpers import assert_same_tensors, kill_at_save, random_images, random_pixels, run_tensors
from tests.training.in_two import CASES, METHODS, learned, whole_run
from training.config import Augmentation
from training.data.tasks import Batchable
from training.host import distributed as together
from training.host.device import channels_last_on_gpu, choose_device, has_room
from training.host.distributed import Share
from training.learn.augment import rotated_views
from training.store.checkpoint import load

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
Learned = dict[tuple[str, str, str], dict[str, Any]]


class Both(NamedTuple):
    """The results of each of two processes, the result of this process alone, and the folders that they wrote."""

    folder: Path
    learned: list[Learned]
    alone: Learned


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("both")
    command = [sys.executable, "-m", "tests.training.in_two", str(folder)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes) as two:
        with pytest.MonkeyPatch.context() as patch:
            kill_at_save(patch, 7, written=True)
            assert whole_run(folder / "begun", "hat") == 130
        assert two.stdin is not None
        two.stdin.write("begun\n")
        two.stdin.flush()
        alone = {case: learned(*case) for case in CASES}
        for method in METHODS:
            assert whole_run(folder / f"{method}-alone", method) == 0
        _, errors = two.communicate(timeout=900)
    assert two.returncode == 0, errors
    return Both(folder, [torch.load(folder / f"learned-{number}.pt") for number in range(2)], alone)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_losses_and_gradients_are_those_of_the_joint_batch(case: tuple[str, str, str], both: Both) -> None:
    alone = both.alone[case]
    one, other = (process[case] for process in both.learned)
    steps = len(alone["losses"])
    assert steps == len(one["losses"]) == 8
    # Only the first step starts from identical weights: Adam amplifies rounding errors of earlier steps.
    assert float(one["losses"][0] + other["losses"][0]) == pytest.approx(float(alone["losses"][0]), rel=1e-6)
    parts = [float(process["losses"][0]) for process in (one, other)]
    assert min(parts) > 0.1 * sum(parts)
    wanted = alone["gradients"][: len(alone["gradients"]) // steps]
    largest = max(float(gradient.abs().max()) for gradient in wanted)
    for got, gradient in zip(one["gradients"], wanted, strict=False):
        # The worst float32 error is that of a bias whose gradient is a small difference of large terms.
        allowed = min(1e-5 * max(1, largest), 3e-4 * float(gradient.abs().max()))
        torch.testing.assert_close(got, gradient, rtol=0, atol=allowed)
    assert sum(bool(gradient.any()) for gradient in wanted) > len(wanted) / 2


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_both_processes_have_the_same_network_and_forget_nothing(case: tuple[str, str, str], both: Both) -> None:
    one, other = (process[case] for process in both.learned)
    assert_same_tensors(one["network"], other["network"])
    before, after = one["answers"]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_a_whole_run_ends_as_that_of_one_process(method: str, both: Both) -> None:
    assert_close_runs(both.folder / f"{method}-0", both.folder / f"{method}-alone")
    assert (both.folder / f"{method}-0" / "metrics.json").exists()


def test_only_the_first_process_writes(both: Both) -> None:
    assert not list(both.folder.glob("*-1"))


def test_the_first_process_begins_alone_and_the_others_after_it_or_not_at_all(both: Both) -> None:
    one, other = (torch.load(both.folder / f"turn-{number}.pt") for number in range(2))
    assert one == {"found it there": False, "code": 2, "planned": [0]}
    assert other == {"found it there": True, "code": 2, "planned": []}


def test_a_run_that_one_process_began_is_resumed_by_two(both: Both) -> None:
    assert_close_runs(both.folder / "begun", both.folder / "hat-alone")


def assert_close_runs(got: Path, wanted_run: Path) -> None:
    assert load(got).progress.task == load(wanted_run).progress.task == 2
    mine, theirs = run_tensors(got), run_tensors(wanted_run)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        # The sign of an axis is arbitrary, and so is the sign of the coordinate along it.
        if name.endswith((".axes", ".scales", ".shifts")):
            continue
        found, wanted = mine[name].float(), value.float()
        # Shallow scores are squared distances of hundreds: near 0 they are differences of large terms.
        large = name.endswith((".own.shallow", ".left_out.shallow"))
        allowed = max(1e-3, 1e-4 * float(wanted.abs().max())) if large else 1e-3
        # Axes are rounded to 8 bits: a difference in their last bits may move a number by one of 127 steps.
        share = 0.02 if ".left_out." in name or ".own." in name else 1e-3
        torch.testing.assert_close(
            found, wanted, rtol=share, atol=allowed, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_shares_cover_a_batch_once_and_are_empty_where_it_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "processes", lambda: 3)
    for total in (1, 2, 3, 10, 64):
        rows: list[int] = []
        for number in range(3):
            monkeypatch.setattr(together, "rank", lambda number=number: number)
            share = Share.of(total)
            rows += range(total)[share.rows]
            assert share.times(8).total == 8 * total
        assert rows == list(range(total))


def test_a_view_is_changed_as_it_would_be_in_the_joint_batch() -> None:
    images, classes = random_images(5, 3), torch.arange(5)
    torch.manual_seed(0)
    whole, whole_classes = rotated_views(images, classes, 5, Augmentation(), 2)
    share = Share(2, 4, 5)
    torch.manual_seed(0)
    part, part_classes = rotated_views(images[share.rows], classes[share.rows], 5, Augmentation(), 2, share)
    rows = share.rows_of_copies(8, images.device)
    assert torch.equal(part, whole[rows])
    assert torch.equal(part_classes, whole_classes[rows])


def test_images_that_do_not_fit_a_gpu_stay_in_host_memory_and_are_copied_in_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    assert has_room(torch.device("cuda"), 250)
    assert not has_room(torch.device("cuda"), 251)
    assert has_room(torch.device("cpu"), 10**15)
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    # `meta` stands for a GPU: another device than that of the pixels.
    data = Batchable(random_pixels(4, 1), torch.zeros(4, dtype=torch.long, device="meta"))
    assert data.images(torch.tensor([2, 0])).device == data.device == torch.device("meta")
    assert [len(part) for part in pinned] == [2]


def test_each_process_of_a_machine_gets_its_own_gpu_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert choose_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="process 2 of this machine has no GPU; allowed: --nproc-per-node up to 2"):
        choose_device()


def test_only_a_gpu_gets_its_images_channels_last() -> None:
    images = random_images(2, 3)
    assert channels_last_on_gpu(images, torch.device("cpu")) is images
    turned = channels_last_on_gpu(images, torch.device("cuda"))
    assert turned.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(turned, images)
