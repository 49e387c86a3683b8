"""Files of a bundle: only live channels, masks as bits, integers of the smallest type, and no duplicates."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from onnx.reference import ReferenceEvaluator
from torch import nn

from export.graph.assemble import GraphPlan, write_graph
from export.graph.baked_task import BakedTask, bake_task
from export.graph.session import whole_session
from models.masks.supermask import MaskedLayer
from models.masks.task_norm import TaskNorm
from models.network import Network
from serving.bundle.layout import graph_name, part_name
from tests.export.conftest import Graphs
from tests.export.networks import decider_for, image_spec, learned, written
from tests.helpers import unit_masks


@pytest.mark.parametrize("candidates", [None, 1])
@pytest.mark.parametrize(("method", "precision"), [("hat", "fp32"), ("hat", "int8"), ("sup", "int8")])
def test_weights_lie_in_the_files_of_their_owners(
    method: str, precision: str, candidates: int | None, graphs: Graphs
) -> None:
    folder = graphs.folder(method, "convnet", precision, candidates)
    model = onnx.load(folder / graph_name(precision), load_external_data=False)
    outside = {
        tensor.name: ExternalDataInfo(tensor).location
        for tensor in model.graph.initializer
        if uses_external_data(tensor)
    }
    assert outside
    for name, location in outside.items():
        numbers_of_body = name.split("/")[1] == "body" and not name.endswith("/packed")
        assert location == part_name(name.split("/")[0], precision if numbers_of_body else None)
    owners = {location.split(".")[0] for location in outside.values()}
    assert owners == {"task0", "task1", "task2"} | ({"shared"} if method == "sup" else set())
    assert {path.name for path in folder.iterdir()} == {graph_name(precision), *outside.values()}
    # The graph itself contains only shapes, indices and the constants of the decision.
    inline = sum(len(tensor.raw_data) for tensor in model.graph.initializer if not uses_external_data(tensor))
    assert inline < 3000


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("method", ["hat", "sup"])
def test_the_files_of_weights_do_not_depend_on_the_cascade(method: str, precision: str, graphs: Graphs) -> None:
    with_all, with_one = (
        {
            path.name: path.read_bytes()
            for path in graphs.folder(method, "resnet18", precision, candidates).glob("*.bin")
        }
        for candidates in (None, 1)
    )
    assert with_all == with_one
    assert {part_name("task1"), part_name("task1", precision)} <= with_all.keys()


@pytest.mark.parametrize("method", ["hat", "sup"])
def test_what_precision_does_not_change_is_stored_once(method: str, tmp_path: Path) -> None:
    network = learned(method, "convnet")
    written(tmp_path, network)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.bin")}
    for precision in ("int8", "fp16"):
        written(tmp_path, network, precision)
    after = {path.name: path.read_bytes() for path in tmp_path.glob("*.bin")}
    assert {name: after[name] for name in before} == before
    assert after.keys() - before.keys() == {f"task{task}.{key}.bin" for task in range(3) for key in ("int8", "fp16")}


def test_a_precision_with_other_numbers_in_common_is_refused(tmp_path: Path) -> None:
    network = learned("hat", "convnet")
    written(tmp_path, network)
    content = bytearray((tmp_path / "task1.bin").read_bytes())
    content[0] ^= 1
    (tmp_path / "task1.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"task1\.bin: a graph of another precision has other numbers there"):
        written(tmp_path, network, "int8")
    content[0] ^= 1
    (tmp_path / "task1.bin").write_bytes(content + b"?")
    with pytest.raises(ValueError, match=r"task1\.bin: a graph of another precision has more numbers there"):
        written(tmp_path, network, "int8")


def stored_values(model: onnx.ModelProto) -> dict[str, NDArray[np.generic]]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


@pytest.mark.parametrize("precision", ["fp32", "int8", "fp16"])
def test_signs_are_stored_once_and_masks_once_per_task_as_bits(precision: str, graphs: Graphs) -> None:
    network = learned("sup", "resnet18")
    # The projection is only used in training and is not exported.
    layers = [module for part in network.body for module in part.modules() if isinstance(module, MaskedLayer)]
    stored = stored_values(graphs.model("sup", "resnet18", precision))
    packed = {name: values for name, values in stored.items() if name.endswith("/packed")}
    tasks = len(network.heads)
    assert sum(name.startswith("shared/") and "/signs/" in name for name in packed) == len(layers)
    assert sum(name.startswith("task") and "/mask/" in name for name in packed) == len(layers) * tasks
    assert all(values.dtype == np.uint8 for values in packed.values())
    bits = sum(values.nbytes for values in packed.values())
    assert bits == sum(-(-math.prod(layer.shape) // 8) for layer in layers) * (1 + tasks)
    assert not any(name.endswith("/weight") for name in stored if "/body/" in name)


def value_of(model: onnx.ModelProto, name: str) -> NDArray[np.floating]:
    """The output of a node on constants, computed by the reference implementation."""
    alone = onnx.ModelProto()
    alone.CopyFrom(model)
    del alone.graph.node[:], alone.graph.output[:], alone.graph.input[:]
    wanted, needed = {name}, []
    for node in reversed(model.graph.node):
        if wanted & set(node.output):
            needed.append(node)
            wanted |= set(node.input)
    alone.graph.node.extend(reversed(needed))
    alone.graph.output.append(onnx.ValueInfoProto(name=name))
    return np.asarray(ReferenceEvaluator(alone).run([name], {})[0])


def convolutions_of(network: Network, task: int) -> list[nn.Conv2d]:
    """The baked ones."""
    baked = bake_task(network, decider_for(network).scorers, task)
    return [layer for layer in baked.body.modules() if isinstance(layer, nn.Conv2d)]


@pytest.mark.parametrize("backbone", ["convnet", "resnet18"])
def test_ternary_weights_are_exact_in_int8(backbone: str, graphs: Graphs) -> None:
    network = learned("sup", backbone)
    model = graphs.model("sup", backbone, "int8")
    convolutions = [node for node in model.graph.node if node.op_type == "Conv" and node.name.startswith("task1/body/")]
    baked = convolutions_of(network, 1)
    assert len(convolutions) == len(baked)
    for node, layer in zip(convolutions, baked, strict=True):
        weight = value_of(model, node.input[1])
        np.testing.assert_allclose(weight, layer.weight.detach().numpy(), rtol=3e-7, atol=0)


def test_weights_of_hat_are_seven_bits_of_each_rows_largest(graphs: Graphs) -> None:
    network = learned("hat", "convnet")
    stored = stored_values(graphs.model("hat", "convnet", "int8"))
    layer = convolutions_of(network, 1)[0]
    rows, steps = stored["task1/body/0/0/weight"], stored["task1/body/0/0/weight_scale"]
    assert rows.dtype == np.int8
    # Two products of 255 * 63 fit into 16 bits; with 127 they would not.
    assert (np.abs(rows.astype(int)).max(axis=(1, 2, 3)) == 63).all()
    assert 2 * 255 * 63 < 2**15 < 2 * 255 * 127
    error = np.abs(rows * steps[:, None, None, None] - layer.weight.detach().numpy())
    assert (error <= steps[:, None, None, None] * 0.5001).all()


@pytest.mark.parametrize("method", ["hat", "sup"])
def test_a_bias_that_dwarfs_its_weights_fits_in_32_bits(method: str, tmp_path: Path) -> None:
    network = copy.deepcopy(learned(method, "convnet"))
    layers = [layer for layer in network.task_layers() if isinstance(layer, TaskNorm)]
    norm = layers[1].of(1)
    first = int(layers[1].connection.after.live(1)[0])
    with torch.no_grad():
        if norm.affine:
            norm.weight[first], norm.bias[first] = 1e-7, 2.0
        else:
            assert norm.running_mean is not None
            norm.running_mean[first] = -1e9
    # Both precisions, since shared data is written once.
    for precision in ("fp32", "int8"):
        written(tmp_path, network, precision)
    whole_session(tmp_path, "int8")
    stored = stored_values(onnx.load(tmp_path / graph_name("int8")))
    bias = stored["task1/body/1/0/bias"] * stored["task1/body/1/0/bias_scale"].astype(np.float64)
    wanted = convolutions_of(network, 1)[1].bias
    assert wanted is not None
    np.testing.assert_allclose(bias, wanted.detach().numpy(), rtol=1e-3, atol=1e-3)


def test_heads_distances_and_linear_layers_stay_floating_point(graphs: Graphs) -> None:
    model = graphs.model("hat", "convnet", "int8")
    made_by = {name: node for node in model.graph.node for name in node.output}
    for kind in ("MatMul", "Gemm"):
        layers = [node for node in model.graph.node if node.op_type == kind]
        assert layers
        for node in layers:
            assert not any(name in made_by and made_by[name].op_type == "DequantizeLinear" for name in node.input[1:])
    assert stored_values(model)["task0/head/weight"].dtype == np.float32


def test_gates_leave_only_live_channels_in_the_graph(graphs: Graphs) -> None:
    network = learned("hat", "convnet")
    stored = stored_values(graphs.model("hat", "convnet"))
    first, second = unit_masks(network)[:2]
    for task in range(len(network.heads)):
        assert stored[f"task{task}/body/1/0/weight"].shape[:2] == (len(second.live(task)), len(first.live(task)))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_layer_without_onnx_is_refused_by_name(precision: str, tmp_path: Path) -> None:
    network = learned("hat", "convnet")

    def bake(task: int) -> BakedTask:
        baked = bake_task(network, decider_for(network).scorers, task)
        if task == 1:
            baked.body.append(nn.Sigmoid())
        return baked

    plan = GraphPlan(image_spec(network), 0.5, 0.25, decider_for(network).rule, precision, None, {})
    with pytest.raises(TypeError, match=r"task1/body/4: no .*ONNX is known for Sigmoid"):
        write_graph(tmp_path, bake, plan)
