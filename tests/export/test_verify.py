from __future__ import annotations

import copy
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from export import verify as parity
from export.verify import ALLOWED, BATCHES, ParityError, synthetic_images, verify
from models.network import Network
from serving.bundle import ImageSpec
from serving.decision import OUTPUT_NAMES
from tests.export.conftest import Exported
from tests.helpers import SPEC

PIXELS = synthetic_images(SPEC, 9)


def changed(network: Network, name: str, by: float) -> Network:
    """Another network: one tensor of this one is larger by a number."""
    other = copy.deepcopy(network)
    with torch.no_grad():
        other.state_dict(keep_vars=True)[name].add_(by)
    return other


def test_a_graph_of_this_network_passes_with_all_its_differences(exported: Exported) -> None:
    result = verify(exported.run.network, exported.run.rule, exported.bundle.graph, PIXELS)
    differences = {f"{name}_difference_batch_{size}" for name in OUTPUT_NAMES for size in BATCHES}
    assert result.keys() == differences | {"images", "allowed"}
    assert all(0 <= result[name] <= ALLOWED for name in differences)
    assert (result["images"], result["allowed"]) == (9, ALLOWED)


@pytest.mark.parametrize(
    ("tensor", "task", "output"),
    [("heads.0.bias", 0, "logits"), ("heads.1.bias", 1, "logits"), ("distances.1.means", 1, "distances")],
)
def test_a_graph_of_another_network_is_refused_by_task_output_and_limit(
    tensor: str, task: int, output: str, exported_hat: Exported
) -> None:
    other = changed(exported_hat.run.network, tensor, 100.0)
    message = rf"task {task}, {output}, batch 1: max \|difference\| / \(1 \+ \|value\|\) is .* > 0.0001"
    with pytest.raises(ParityError, match=message):
        verify(other, exported_hat.run.rule, exported_hat.bundle.graph, PIXELS)


def test_a_network_that_says_nan_is_refused(exported_hat: Exported) -> None:
    other = changed(exported_hat.run.network, "heads.1.bias", float("nan"))
    with pytest.raises(ParityError, match=r"task 1, logits, batch 1: .* is nan > 0.0001"):
        verify(other, exported_hat.run.rule, exported_hat.bundle.graph, PIXELS)


def test_a_graph_that_says_nan_is_refused(exported_hat: Exported) -> None:
    model = onnx.load_from_string(exported_hat.bundle.graph)
    for tensor in model.graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT:
            damaged = numpy_helper.to_array(tensor) * np.float32("nan")
            tensor.CopyFrom(numpy_helper.from_array(damaged, tensor.name))
    with pytest.raises(ParityError, match=r"task 0, logits, batch 1: .* is nan > 0.0001"):
        verify(exported_hat.run.network, exported_hat.run.rule, model.SerializeToString(), PIXELS)


def test_labels_that_differ_are_refused_even_if_every_difference_is_allowed(
    exported_hat: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "ALLOWED", float("inf"))
    contrary = copy.deepcopy(exported_hat.run.network)
    with torch.no_grad():
        for task in range(2):
            contrary.head(task).weight.neg_()
            contrary.head(task).bias.neg_()
    with pytest.raises(ParityError, match="batch 1: 9 of 9 labels differ between network and graph"):
        verify(contrary, exported_hat.run.rule, exported_hat.bundle.graph, PIXELS)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_synthetic_images_are_many_different_ones_and_the_same_each_time(mode: str) -> None:
    spec = ImageSpec(height=8, width=6, mode=mode)  # type: ignore[arg-type]
    images = synthetic_images(spec, 12)
    assert images.dtype == np.uint8
    assert images.shape == (12, *spec.shape)
    assert len({image.tobytes() for image in images}) == 12
    assert np.array_equal(images, synthetic_images(spec, 12))
    assert (images[0].max(), images[1].min()) == (0, 255)


def test_a_written_bundle_is_checked_again(
    exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = Path(shutil.copytree(exported.bundle.path, tmp_path / "copy"))
    assert parity.main([str(written)]) == 0
    assert "3 checksums and 8 golden answers are right" in capsys.readouterr().out
    with (written / "model.onnx").open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 1]))
    assert parity.main([str(written)]) == 2
    assert "corrupt" in capsys.readouterr().err
