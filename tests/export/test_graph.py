"""The ONNX graph says what the network says, under names that a person can read, and keeps bits as bits."""

from __future__ import annotations

import copy
import math
from functools import cache, partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from onnx.external_data_helper import ExternalDataInfo, uses_external_data
from onnx.reference import ReferenceEvaluator
from torch import nn

from export.bake import BakedTask, bake_task
from export.cascade import Rotated, cascaded, rotated_outputs, seen_again
from export.graph import GraphPlan, write_graph
from export.opened import run_graph, whole_session
from models.network import Network
from models.task_norm import TaskNorm
from models.weight_mask import MaskedConv2d, MaskedLinear
from serving.bundle import INPUT_NAME, graph_name, part_name
from serving.decision import FEATURES, NETWORK_NAMES, OUTPUT_NAMES, complete
from tests.export.networks import decider_for, image_spec, learned, pixels_for, written

IMAGES = 12


class Graphs:
    """Every graph is written once, when it is first asked for."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    @cache  # noqa: B019
    def folder(self, method: str, backbone: str, precision: str = "fp32", candidates: int | None = None) -> Path:
        return written(self._factory.mktemp("graph"), learned(method, backbone), precision, candidates)

    @cache  # noqa: B019
    def session(
        self, method: str, backbone: str, precision: str = "fp32", candidates: int | None = None
    ) -> ort.InferenceSession:
        return whole_session(self.folder(method, backbone, precision, candidates), precision)

    def model(
        self, method: str, backbone: str, precision: str = "fp32", candidates: int | None = None
    ) -> onnx.ModelProto:
        """The graph with its weights."""
        return onnx.load(self.folder(method, backbone, precision, candidates) / graph_name(precision))


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Graphs:
    return Graphs(tmp_path_factory)


@cache
def said_by(network: Network) -> Rotated:
    return rotated_outputs(network, decider_for(network), pixels_for(network, IMAGES))


def relative(got: NDArray[np.floating], wanted: NDArray[np.floating]) -> float:
    return float((np.abs(got - wanted) / (1 + np.abs(wanted))).max())


SHAPES = [("convnet", None), ("convnet", 1), ("convnet", 2), ("resnet18", None), ("resnet18", 1)]


@pytest.mark.parametrize(("backbone", "candidates"), SHAPES)
@pytest.mark.parametrize("method", ["hat", "sup"])
def test_the_graph_says_what_the_network_says(
    method: str, backbone: str, candidates: int | None, graphs: Graphs
) -> None:
    network = learned(method, backbone)
    rule, pixels = decider_for(network).rule, pixels_for(network, IMAGES)
    got = run_graph(graphs.session(method, backbone, "fp32", candidates), pixels)
    wanted = complete(cascaded(said_by(network), candidates), rule)
    for name in OUTPUT_NAMES:
        assert got[name].shape == wanted[name].shape
        assert np.ptp(wanted[name], axis=0).max() > 1e-3, name
        assert relative(got[name], wanted[name]) < 5e-5, name


def columns_agree(got: NDArray[np.floating], wanted: NDArray[np.floating]) -> float:
    """The worst correlation of a column: what is left of an image's own share in it."""
    return min(float(np.corrcoef(one, other)[0, 1]) for one, other in zip(got.T, wanted.T, strict=True))


@pytest.mark.parametrize("backbone", ["convnet", "resnet18"])
@pytest.mark.parametrize("method", ["hat", "sup"])
@pytest.mark.parametrize(("precision", "agreeing"), [("fp16", 0.999), ("int8", 0.9)])
def test_a_coarser_graph_says_almost_what_the_network_says(
    precision: str, agreeing: float, method: str, backbone: str, graphs: Graphs
) -> None:
    network = learned(method, backbone)
    got = run_graph(graphs.session(method, backbone, precision), pixels_for(network, IMAGES))
    wanted = said_by(network).full
    for name in NETWORK_NAMES:
        assert columns_agree(got[name], wanted[name]) > agreeing, name
    # What is made of logits and distances is as exact as ever.
    completed = complete(got, decider_for(network).rule)
    assert max(relative(got[name], completed[name]) for name in OUTPUT_NAMES) < 1e-5


@pytest.mark.parametrize(
    ("method", "backbone", "precision", "candidates"),
    [
        ("hat", "convnet", "int8", 1),
        ("sup", "convnet", "int8", 2),
        ("hat", "resnet18", "int8", 1),
        ("sup", "resnet18", "int8", 1),
        ("hat", "convnet", "fp16", 2),
        ("sup", "resnet18", "fp16", 1),
    ],
)
def test_a_coarser_cascade_turns_images_for_so_many_tasks(
    method: str, backbone: str, precision: str, candidates: int, graphs: Graphs
) -> None:
    network = learned(method, backbone)
    rule, pixels = decider_for(network).rule, pixels_for(network, IMAGES)
    full = run_graph(graphs.session(method, backbone, precision), pixels)["distances"]
    got = run_graph(graphs.session(method, backbone, precision, candidates), pixels)["distances"]
    upright = said_by(network).upright["distances"]
    # In half precision, sums over a batch of another size round otherwise.
    close = 2e-3 if precision == "fp16" else 1e-4
    turned = np.stack(
        [np.isclose(got[:, own], full[:, own], rtol=close, atol=close).all(axis=1) for own in rule.columns], axis=1
    )
    assert (turned.sum(axis=1) == candidates).all()
    kept = ~turned[:, rule.task_of_class]
    assert np.corrcoef(got[kept], upright[kept])[0, 1] > 0.97


def test_tasks_of_one_size_need_no_filling_up(tmp_path: Path) -> None:
    network = learned(sizes=(2, 2, 2))
    rule, pixels = decider_for(network).rule, pixels_for(network, IMAGES)
    got = run_graph(whole_session(written(tmp_path, network, "fp32", 1), "fp32"), pixels)
    wanted = complete(cascaded(rotated_outputs(network, decider_for(network), pixels), 1), rule)
    assert max(relative(got[name], wanted[name]) for name in OUTPUT_NAMES) < 1e-4


def test_a_task_that_falls_behind_by_a_margin_is_left_out(tmp_path: Path) -> None:
    network = learned(sizes=(2, 2, 2))
    decider, pixels = decider_for(network), pixels_for(network, IMAGES)
    said = rotated_outputs(network, decider, pixels)
    two = np.sort(complete(said.upright, decider.rule)["scores"], axis=1)[:, :2]
    # Half of the images have a second task within it.
    margin = float(np.median(two[:, 1] - two[:, 0]))
    again = seen_again(said, 2, margin).sum(axis=1)
    assert sorted(np.unique(again)) == [1, 2]
    graph = written(tmp_path, network, "fp32", 2, margin=margin * 1.0001)
    got = run_graph(whole_session(graph, "fp32"), pixels)
    wanted = complete(cascaded(said, 2, margin * 1.0001), decider.rule)
    assert max(relative(got[name], wanted[name]) for name in OUTPUT_NAMES) < 1e-4


@pytest.mark.parametrize(
    ("precision", "backbone", "candidates"),
    [("fp32", "convnet", 1), ("fp32", "convnet", 2), ("int8", "convnet", 1), ("fp32", "resnet18", 1)],
)
def test_an_image_is_answered_alone_as_among_others(
    precision: str, backbone: str, candidates: int, graphs: Graphs
) -> None:
    """A task that no image needs is skipped, and one that some need sees those only: no row may notice."""
    network = learned("hat", backbone)
    rule, pixels = decider_for(network).rule, pixels_for(network, IMAGES)
    foreign = complete(said_by(network).upright, rule)["scores"]
    best = foreign.argsort(axis=1)[:, :candidates]
    # Of each number of images that need a task there is a case: none, some, and alone all or none.
    assert len(np.unique(best)) > candidates
    session = graphs.session("hat", backbone, precision, candidates)
    together = run_graph(session, pixels)
    shuffled = run_graph(session, pixels[::-1].copy())
    alone = run_graph(session, pixels, size=1)
    for name in (*OUTPUT_NAMES, FEATURES):
        for other in (alone[name], shuffled[name][::-1]):
            np.testing.assert_allclose(other, together[name], rtol=1e-4, atol=1e-4, err_msg=name)


def test_only_the_tasks_that_may_win_see_an_image_turned(graphs: Graphs) -> None:
    network = learned("hat", "convnet")
    rule, pixels = decider_for(network).rule, pixels_for(network, IMAGES)
    full, upright = said_by(network).full, said_by(network).upright
    got = run_graph(graphs.session("hat", "convnet", "fp32", 1), pixels)["distances"]
    foreign = complete(upright, rule)["scores"]
    for row, best in enumerate(foreign.argmin(axis=1)):
        for task, own in enumerate(rule.columns):
            wanted = full if task == best else upright
            np.testing.assert_allclose(got[row, own], wanted["distances"][row, own], rtol=1e-4, atol=1e-5)
            other = upright if task == best else full
            assert not np.allclose(got[row, own], other["distances"][row, own], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["hat", "sup"])
def test_convolutions_in_a_branch_have_weights_of_their_own(method: str, graphs: Graphs) -> None:
    # onnxruntime gives a convolution the fast layout only if the graph that it is in holds its weights.
    branches = [
        attribute.g
        for node in graphs.model(method, "convnet", "fp32", 1).graph.node
        for attribute in node.attribute
        if node.op_type == "If" and attribute.name == "then_branch"
    ]
    assert branches
    for branch in branches:
        made = {output for node in branch.node if node.op_type == "Reshape" for output in node.output}
        convolutions = [node for node in branch.node if node.op_type == "Conv"]
        assert convolutions
        assert {name for node in convolutions for name in node.input[1:]} <= made


def test_features_are_every_tasks_own_of_the_upright_image(graphs: Graphs) -> None:
    network = learned("hat", "convnet")
    pixels = pixels_for(network, 4)
    full, quick = (run_graph(graphs.session("hat", "convnet", "fp32", count), pixels) for count in (None, 1))
    live = [len(network.wires.after.live(task)) for task in range(len(network.heads))]
    assert full[FEATURES].shape == (4, sum(live))
    np.testing.assert_allclose(quick[FEATURES], full[FEATURES], rtol=1e-5, atol=1e-5)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        own = [
            network.detector(task).tied.standardised(network.rotated_depths(images, task)[1])[0]
            for task in range(len(network.heads))
        ]
    np.testing.assert_allclose(full[FEATURES], torch.cat(own, dim=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "int8", "fp16"])
def test_the_graph_is_checked_and_its_batch_is_free(precision: str, graphs: Graphs) -> None:
    path = graphs.folder("hat", "convnet", precision, 1) / graph_name(precision)
    onnx.checker.check_model(path, full_check=True)
    model = onnx.load(path)
    (pixels,) = model.graph.input
    assert (pixels.name, pixels.type.tensor_type.elem_type) == (INPUT_NAME, TensorProto.UINT8)
    batch, *shape = pixels.type.tensor_type.shape.dim
    assert batch.dim_param == "batch"
    assert [side.dim_value for side in shape] == [8, 8, 1]
    assert [output.name for output in model.graph.output] == [*OUTPUT_NAMES, FEATURES]
    assert all(output.type.tensor_type.elem_type == TensorProto.FLOAT for output in model.graph.output)
    assert {entry.key: entry.value for entry in model.metadata_props} == {"name": "tiny"}


@pytest.mark.parametrize("candidates", [None, 1])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_every_node_says_which_task_it_belongs_to(precision: str, candidates: int | None, graphs: Graphs) -> None:
    graph = graphs.model("hat", "resnet18", precision, candidates).graph
    nodes = [*graph.node]
    for branch in (attribute.g for node in graph.node for attribute in node.attribute if node.op_type == "If"):
        nodes += branch.node
    names = [node.name for node in nodes]
    assert len(set(names)) == len(names)
    rooms = {name.split("/")[0] for name in names}
    own = {"pixels", "task0", "task1", "logits", "distances", "features", "decision"}
    assert rooms == own | ({"cascade"} if candidates else set())
    assert "task1/body/2/first/Conv" in names
    assert ("task1/body/2/first/Conv@turned" in names) == (candidates is not None)


def test_writing_twice_gives_the_same_bytes(graphs: Graphs, tmp_path: Path) -> None:
    first = graphs.folder("sup", "convnet", "int8", 2)
    for path in written(tmp_path, learned("sup", "convnet"), "int8", 2).iterdir():
        assert path.read_bytes() == (first / path.name).read_bytes(), path.name


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
    # What is left in the graph is shapes, indices and the numbers of the decision.
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
def test_signs_are_stored_once_and_masks_once_a_task_as_bits(precision: str, graphs: Graphs) -> None:
    network = learned("sup", "resnet18")
    # The projection that only learning needs is not exported.
    layers = [
        module for part in network.body for module in part.modules() if isinstance(module, MaskedConv2d | MaskedLinear)
    ]
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
    """What a node on constants gives, worked out by the reference implementation."""
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
def test_ternary_weights_lose_nothing_in_whole_numbers(backbone: str, graphs: Graphs) -> None:
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
    first = int(layers[1].wires.after.live(1)[0])
    with torch.no_grad():
        if norm.affine:
            norm.weight[first], norm.bias[first] = 1e-7, 2.0
        else:
            assert norm.running_mean is not None
            norm.running_mean[first] = -1e9
    plan = GraphPlan(image_spec(network), 0.5, 0.25, decider_for(network).rule, "int8", None, {})
    write_graph(tmp_path, partial(bake_task, network, decider_for(network).scorers), plan)
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
    first, second = network.unit_masks()[:2]
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
