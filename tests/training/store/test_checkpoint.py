from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from models.network import Network
from tests.helpers import (
    adam,
    assert_same_tensors,
    learn_task,
    learn_task_features,
    learn_task_head,
    raise_at_call,
    random_images,
    tiny_config,
    tiny_network,
    tiny_task,
)
from training.store.checkpoint import CURRENT, FORMAT, PREVIOUS, Progress, RunError, load, save, write_json

CLASSES = [2, 3, 2]
NATS = {"features": 5, "fused": 6}
BETWEEN, FEATURES, HEAD, WHOLE = "between tasks", "mid features", "mid head", "whole run"


def half_learned(method: str, where: str) -> tuple[Network, torch.optim.Optimizer | None, Progress]:
    """A network as a run would save it there."""
    network = tiny_network(method)
    data = [tiny_task(1, seed=task, classes=classes) for task, classes in enumerate(CLASSES)]
    learn_task(network, data[0])
    if where == BETWEEN:
        return network, None, Progress(1, nats=NATS)
    network.add_task(CLASSES[1])
    optimizer = learn_task_features(network, 1, data[1])
    if where == FEATURES:
        return network, optimizer, Progress(1, "features", 1, 2.5, NATS)
    network.finish(1)
    optimizer = adam(list(network.head(1).parameters()))
    network.head(1).all_logits(torch.randn(2, network.connection.after.channels)).sum().backward()
    optimizer.step()
    if where == HEAD:
        return network, optimizer, Progress(1, "head", 1, 2.5, NATS)
    learn_task_head(network, 1, data[1])
    learn_task(network, data[2])
    return network, None, Progress(3, nats=NATS, decision="fused")


def parameters_of(network: Network, progress: Progress) -> list[torch.nn.Parameter]:
    return network.trainable(1) if progress.phase == "features" else list(network.head(1).parameters())


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    states = optimizer.state_dict()["state"].items()
    return {f"{number} {name}": value for number, state in states for name, value in state.items()}


@pytest.mark.parametrize("where", [FEATURES, HEAD, BETWEEN, WHOLE])
@pytest.mark.parametrize("method", ["hat", "sup"])
def test_network_and_optimizer_come_back_bit_for_bit(method: str, where: str, tmp_path: Path) -> None:
    network, optimizer, progress = half_learned(method, where)
    save(tmp_path, network, optimizer, progress)
    loaded = load(tmp_path)
    assert loaded.progress == progress
    fresh = Network(tiny_config(method))
    loaded.load_network(fresh, CLASSES)
    images = random_images(4, 1, seed=9)
    network.eval()
    fresh.eval()
    for task in range(progress.task):
        assert_same_tensors(fresh.measure(images, task), network.measure(images, task))
    state, wanted_state = fresh.state_dict(), network.state_dict()
    # Room for the next task may or may not be there yet; everything learned must be.
    assert_same_tensors({name: state[name] for name in wanted_state}, wanted_state)
    if optimizer is None:
        return
    assert state.keys() == wanted_state.keys()
    other = adam(parameters_of(fresh, progress))
    loaded.load_optimizer(other)
    assert_same_tensors(optimizer_state(other), optimizer_state(optimizer))
    assert [g["lr"] for g in other.param_groups] == [0.05]


def saved(folder: Path, *epochs: int) -> None:
    """Checkpoints of the same network at these epochs."""
    network = tiny_network()
    network.add_task(2)
    for epoch in epochs:
        save(folder, network, None, Progress(epoch=epoch))


def test_a_checkpoint_is_a_json_header_and_raw_numbers_and_no_pickle(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    content = (tmp_path / CURRENT).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert json.loads(metadata["progress"])["epoch"] == 1
    assert metadata["format"] == str(FORMAT)
    assert max(entry["data_offsets"][1] for entry in header.values()) == len(content) - 8 - length


def test_the_checkpoint_before_is_kept_and_nothing_else(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([CURRENT, PREVIOUS])
    assert load(tmp_path).progress.epoch == 3
    (tmp_path / CURRENT).unlink()
    assert load(tmp_path).progress.epoch == 2


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": content[: len(content) // 2], "rubbish": os.urandom(len(content))}[how])


@pytest.mark.parametrize("how", ["empty", "cut", "rubbish"])
def test_a_corrupt_checkpoint_falls_back_to_the_one_before(how: str, tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    damage(tmp_path / CURRENT, how)
    assert load(tmp_path).progress.epoch == 1


@pytest.mark.parametrize("how", ["empty", "cut", "rubbish"])
def test_two_corrupt_checkpoints_are_both_named(how: str, tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    damage(tmp_path / CURRENT, how)
    damage(tmp_path / PREVIOUS, how)
    with pytest.raises(RunError) as caught:
        load(tmp_path)
    assert str(tmp_path / CURRENT) in str(caught.value)
    assert str(tmp_path / PREVIOUS) in str(caught.value)


def with_metadata(path: Path, **metadata: str) -> None:
    """Write a checkpoint again with other metadata."""
    with safe_open(path, framework="pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"progress": "{}"},
            r"written by an older version of openworld \(format 1; .*\): learn again with `openworld fit",
        ),
        ({"progress": "{}", "format": "1.5"}, r"written by an older version of openworld \(format 1\.5; "),
        ({"progress": "?", "format": "99"}, r"written by a newer version of openworld \(format 99; .*\): update it"),
    ],
)
def test_a_checkpoint_of_another_version_is_refused_with_what_to_do(
    metadata: dict[str, str], message: str, tmp_path: Path
) -> None:
    # The previous checkpoint is readable, but to fall back to it would lose work.
    saved(tmp_path, 1, 2)
    with_metadata(tmp_path / CURRENT, **metadata)
    with pytest.raises(RunError, match=message) as caught:
        load(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / CURRENT))


def test_a_file_that_is_no_checkpoint_is_named_with_what_to_do(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with_metadata(tmp_path / CURRENT, title="something else")
    with pytest.raises(RunError, match=r"not a checkpoint of a run; restore the file from a copy, or learn again with"):
        load(tmp_path)


def assert_misfit(caught: pytest.ExceptionInfo[RunError], folder: Path, remedy: str) -> None:
    assert str(caught.value).startswith(f"{folder / CURRENT}: does not fit config.json: ")
    assert str(caught.value).endswith(
        f"; restore the file from a copy, {remedy}or learn again with `openworld fit --out` and another folder"
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "message"), [(None, "Missing key.*conv.*weight"), ((1, 2, 3), r"size mismatch for .*conv.*\[1, 2, 3\]")]
)
def test_a_tensor_that_is_missing_or_of_another_shape_is_named(
    shape: tuple[int, ...] | None, message: str, tmp_path: Path
) -> None:
    saved(tmp_path, 1, 2)
    loaded = load(tmp_path)
    name = next(name for name in loaded.tensors if name.endswith("conv.weight"))
    if shape is None:
        del loaded.tensors[name]
    else:
        loaded.tensors[name] = torch.zeros(shape)
    with pytest.raises(RunError, match=message) as caught:
        loaded.load_network(tiny_network(), [2])
    assert_misfit(caught, tmp_path, f"move it away to continue from {PREVIOUS}, ")


def test_more_tasks_than_the_configuration_has_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(RunError, match=r"1 tasks; config\.json has 0") as caught:
        load(tmp_path).load_network(tiny_network(), [])
    assert_misfit(caught, tmp_path, "")


def test_a_buffer_without_its_classes_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    loaded = load(tmp_path)
    loaded.tensors["buffer.pixels"] = torch.zeros(2, 1)
    with pytest.raises(RunError, match=r"buffer\.pixels and buffer\.class_ids") as caught:
        loaded.buffer()
    assert_misfit(caught, tmp_path, "")


@pytest.mark.parametrize("shape", [None, (1, 2, 3)])
def test_an_optimizer_state_of_other_parameters_is_refused(shape: tuple[int, ...] | None, tmp_path: Path) -> None:
    weights = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    optimizer = adam(weights)
    sum(weight.sum() for weight in weights).backward()  # type: ignore[union-attr]
    optimizer.step()
    save(tmp_path, tiny_network(), optimizer, Progress())
    loaded = load(tmp_path)
    loaded.load_optimizer(adam(weights))
    if shape is None:
        del loaded.tensors["optimizer.1.exp_avg"]
    else:
        loaded.tensors["optimizer.1.exp_avg"] = torch.zeros(shape)
    with pytest.raises(RunError, match=r"the tensors optimizer\.1 are not those of a parameter") as caught:
        loaded.load_optimizer(adam(weights))
    assert_misfit(caught, tmp_path, "")


def test_a_folder_without_checkpoint_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"{tmp_path}: no checkpoint yet"):
        load(tmp_path)


@pytest.mark.parametrize("call", [1, 2])
def test_a_save_that_dies_leaves_a_loadable_checkpoint(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        raise_at_call(patch, os, "replace", call)
        with pytest.raises(OSError, match="replace died"):
            saved(tmp_path, 3)
    assert load(tmp_path).progress.epoch == 2
    saved(tmp_path, 4)
    assert load(tmp_path).progress.epoch == 4


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.json"
    write_json(path, {"accuracy": 0.5})
    with monkeypatch.context() as patch:
        raise_at_call(patch, os, "replace", 1)
        with pytest.raises(OSError, match="replace died"):
            write_json(path, {"accuracy": 0.75})
    assert json.loads(path.read_text()) == {"accuracy": 0.5}
    write_json(path, {"accuracy": 0.75})
    assert json.loads(path.read_text()) == {"accuracy": 0.75}
