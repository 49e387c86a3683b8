"""The int8 graph of a trunk: which nodes it has, how ranges are chosen, and how close it is."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from export.graph import trunk_int8
from export.graph.trunk_int8 import plan_of, quantization_of, quantize
from export.graph.trunk_ranges import measure_ranges
from models.trunks.graph import Depth, TrunkGraph
from models.trunks.trunk import open_trunk
from serving.bundle.directory import WriteError
from serving.bundle.manifest import Graph
from serving.bundle.session import open_session, session_options

SIZE = 64


def photos(count: int) -> NDArray[np.uint8]:
    random = np.random.default_rng(count)
    coarse = random.integers(0, 256, (count, 8, 8, 3)).repeat(8, axis=1).repeat(8, axis=2)
    return np.clip(coarse + random.normal(0, 20, coarse.shape), 0, 255).astype(np.uint8)


def encode(content: bytes, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    session = open_session(Graph(content, {}), session_options(1))
    return np.asarray(session.run(["encoded"], {"pixels": pixels})[0])


@pytest.fixture(scope="module")
def lite() -> onnx.ModelProto:
    return onnx.load_from_string(open_trunk("efficientnet-lite0", size=SIZE).model)


def test_int8_of_lite0_is_close_and_its_mean_is_that_of_fp32(lite: onnx.ModelProto) -> None:
    measured, fresh = photos(12), photos(9)
    content = quantize(lite, measured)
    assert len(content) < 0.3 * len(lite.SerializeToString())
    exact, coarse = (encode(each, fresh) for each in (lite.SerializeToString(), content))
    cosine = (exact * coarse).sum(axis=1) / np.linalg.norm(coarse, axis=1)
    assert cosine.min() > 0.98
    both = [encode(each, measured).mean(axis=0) for each in (lite.SerializeToString(), content)]
    np.testing.assert_allclose(*both, atol=1e-4)
    # ReLU6 is part of quantising, except after the layers that stay in fp32.
    kinds = Counter(node.op_type for node in onnx.load_from_string(content).graph.node)
    assert kinds["Conv"] == 49
    assert kinds["Clip"] <= 3
    assert kinds["QuantizeLinear"] >= 46
    assert encode(content, fresh[:1]) == pytest.approx(coarse[:1], abs=1e-6)


def small_model(*, kernel: NDArray[np.float32], limit: float | None = None) -> onnx.ModelProto:
    """Pixels as floats, one convolution with ReLU or ReLU6, and the means of its maps."""
    graph = TrunkGraph()
    scaled = graph.add("Mul", "scaled", [graph.planes(), graph.constant("share", 1 / 255)])
    maps = graph.add("Conv", "conv", [scaled, graph.constant("kernel", kernel)])
    if limit is None:
        maps = graph.add("Relu", "relu", [maps])
    else:
        maps = graph.add("Clip", "relu", [maps, graph.constant("zero", 0.0), graph.constant("limit", limit)])
    width = len(kernel)
    graph.join([Depth(graph.averaged("maps", maps), np.zeros(width), np.ones(width))])
    return onnx.load_from_string(graph.model(SIZE, width))


def test_a_bias_is_added_for_the_mean_error_of_rounded_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose rounding errors all have one sign: without the correction their outputs would be off by that sum."""
    kernel = np.full((2, 3, 1, 1), 0.5 + 0.35 / 63, np.float32)
    kernel[:, 0] = 1.0
    model, pixels = small_model(kernel=kernel), photos(6)
    monkeypatch.setattr(trunk_int8, "FIRST", 0)
    measured = measure_ranges(model, plan_of(model.graph).tensors, pixels)
    wanted = encode_maps(model, pixels)
    plan = plan_of(model.graph)
    found = encode_maps(onnx.load_from_string(trunk_int8.write_int8(model, plan, measured)), pixels)
    step = quantization_of(measured["relu"].low, measured["relu"].high).scale
    assert abs(float((found - wanted).mean())) < 0.2 * step
    monkeypatch.setattr(trunk_int8._Int8Writer, "_mean_error", lambda self, node, error: np.zeros(len(error)))
    plain = encode_maps(onnx.load_from_string(trunk_int8.write_int8(model, plan, measured)), pixels)
    assert abs(float((plain - wanted).mean())) > 3 * abs(float((found - wanted).mean()))


def encode_maps(model: onnx.ModelProto, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    opened.graph.output.append(helper.make_tensor_value_info("maps/vector", TensorProto.FLOAT, None))
    session = open_session(Graph(opened.SerializeToString(), {}), session_options(1))
    return np.asarray(session.run(["maps/vector"], {"pixels": pixels})[0])


def test_an_activation_is_part_of_quantising(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = np.random.default_rng(0).normal(size=(4, 3, 3, 3)).astype(np.float32)
    monkeypatch.setattr(trunk_int8, "FIRST", 0)
    for limit in (0.5, None):
        model = small_model(kernel=kernel, limit=limit)
        content = quantize(model, photos(6))
        kinds = Counter(node.op_type for node in onnx.load_from_string(content).graph.node)
        assert kinds["Clip"] + kinds["Relu"] == 0
        exact, coarse = (encode(each, photos(5)) for each in (model.SerializeToString(), content))
        np.testing.assert_allclose(coarse, exact, atol=0.02)


def test_a_range_is_cut_where_a_single_value_would_cost_all_others() -> None:
    graph = TrunkGraph()
    graph.add("Identity", "maps", [graph.planes()])
    graph.join([Depth(graph.averaged("maps2", "maps"), np.zeros(3), np.ones(3))])
    model = onnx.load_from_string(graph.model(SIZE, 3))
    pixels = np.random.default_rng(0).integers(0, 12, (300, SIZE, SIZE, 3), dtype=np.uint8)
    assert measure_ranges(model, ["maps"], pixels)["maps"].high == pytest.approx(11, abs=0.5)
    pixels[0, 0, 0, 0] = 110
    found = measure_ranges(model, ["maps"], pixels)["maps"]
    assert found.low == 0
    assert 11 <= found.high < 60
    np.testing.assert_allclose(found.means, pixels.mean(axis=(0, 1, 2)), rtol=1e-3)


def test_zero_is_exact_in_every_range() -> None:
    for low, high in ((0.0, 6.0), (-1.3, 2.9), (0.5, 3.0), (-4.0, -1.0), (0.0, 0.0)):
        scale, zero = quantization_of(low, high)
        assert 0 <= zero <= 255
        assert scale > 0
        assert scale * (255 - zero) >= high - scale
        assert -scale * zero <= low + scale


def test_a_trunk_without_convolutions_is_refused() -> None:
    graph = TrunkGraph()
    graph.join([Depth(graph.averaged("mean", graph.planes()), np.zeros(3), np.ones(3))])
    with pytest.raises(WriteError, match="int8: the trunk has 0 convolutions"):
        quantize(onnx.load_from_string(graph.model(SIZE, 3)), photos(3))


def test_weights_of_layers_over_several_channels_have_seven_bits(lite: onnx.ModelProto) -> None:
    model = onnx.load_from_string(quantize(lite, photos(3)))
    largest = {True: 0, False: 0}
    for tensor in model.graph.initializer:
        if tensor.name.endswith("/weight/int"):
            values = numpy_helper.to_array(tensor)
            depthwise = values.shape[1] == 1
            largest[depthwise] = max(largest[depthwise], int(np.abs(values.astype(int)).max()))
    assert largest == {True: 127, False: 63}
