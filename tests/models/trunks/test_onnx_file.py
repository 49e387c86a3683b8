"""A feature extractor that the user brings as an ONNX file becomes a trunk, or is refused with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from models.trunks.trunk import Trunk, TrunkError, open_trunk, reopen
from serving.bundle.manifest import Graph
from serving.bundle.session import open_session, session_options
from training.data.encoder import Encoder

SIDE, WIDTH = 48, 5
WEIGHT = np.random.default_rng(0).normal(size=(WIDTH, 3)).astype(np.float32)


def write_model(
    path: Path,
    *,
    shape: Sequence[int | str] = ("batch", 3, SIDE, SIDE),
    kind: int = TensorProto.FLOAT,
    outputs: Sequence[str] = ("features",),
    opset: int = 18,
    metadata: dict[str, str] | None = None,
    external: bool = False,
    more_inputs: Sequence[str] = (),
) -> Path:
    """A model whose output `features` [n, 5] is the mean colour times WEIGHT; `maps`, `tokens` have more axes."""
    rows = shape[3:] == (3,) or shape[3:] == ["3"]
    nodes = [helper.make_node("Cast", ["images"], ["floats"], to=TensorProto.FLOAT)]
    nodes += [helper.make_node("Transpose", ["floats"], ["planes"], perm=[0, 3, 1, 2] if rows else [0, 1, 2, 3])]
    nodes += [
        helper.make_node("Conv", ["planes", "weight"], ["maps"]),
        helper.make_node("GlobalAveragePool", ["maps"], ["average"]),
        helper.make_node("Flatten", ["average"], ["features"]),
        helper.make_node("Neg", ["features"], ["opposite"]),
        helper.make_node("Reshape", ["maps", "sides"], ["lines"]),
        helper.make_node("Transpose", ["lines"], ["tokens"], perm=[0, 2, 1]),
        helper.make_node("ReduceMax", ["features"], ["largest"], keepdims=0),
    ]
    weight = numpy_helper.from_array(WEIGHT[:, :, None, None], "weight")
    sides = numpy_helper.from_array(np.array([0, WIDTH, -1]), "sides")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    inputs = [helper.make_tensor_value_info("images", kind, shape)]
    inputs += [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", 8]) for name in more_inputs]
    graph = helper.make_graph(nodes, "extractor", inputs, values, [weight, sides])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    helper.set_model_props(model, metadata or {})
    if external:
        onnx.save(model, path, save_as_external_data=True, location=f"{path.name}.data", size_threshold=0)
    else:
        onnx.save(model, path)
    return path


def pixels_of(count: int = 3, side: int = SIDE) -> NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def encode(trunk: Trunk, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    session = open_session(Graph(trunk.model, {}), session_options(1))
    return np.asarray(session.run(["encoded"], {"pixels": pixels})[0])


def expected(pixels: NDArray[np.uint8], mean: Any, std: Any) -> NDArray[np.float64]:
    colours = ((pixels / 255 - np.array(mean)) / np.array(std)).mean(axis=(1, 2))
    vectors = colours @ WEIGHT.T.astype(np.float64)
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize(
    ("model", "options", "normalised"),
    [
        ({}, {}, IMAGENET),
        ({"opset": 13}, {}, IMAGENET),
        ({"external": True}, {}, IMAGENET),
        ({"shape": ("batch", SIDE, SIDE, 3)}, {}, IMAGENET),
        ({"shape": (1, 3, SIDE, SIDE)}, {}, IMAGENET),
        ({"kind": TensorProto.FLOAT16}, {"mean": "0.5", "std": "0.5"}, (0.5, 0.5)),
        ({"kind": TensorProto.UINT8}, {}, (0, 1 / 255)),
        ({}, {"mean": "0.1,0.2,0.3", "std": "0.5"}, ((0.1, 0.2, 0.3), 0.5)),
        ({"metadata": {"mean": "0.25", "std": "2"}}, {}, (0.25, 2)),
        ({"metadata": {"mean": "0.25", "std": "2"}}, {"mean": "0", "std": "1"}, (0, 1)),
        ({"metadata": {"Image.NominalPixelRange": "Normalized_1_1"}}, {}, (0.5, 0.5)),
        ({"metadata": {"Image.NominalPixelRange": "NominalRange_0_255"}}, {}, (0, 1 / 255)),
        ({"outputs": ("maps",)}, {}, IMAGENET),
        ({"outputs": ("tokens",)}, {"pool": "mean"}, IMAGENET),
        ({"outputs": ("features", "maps", "tokens")}, {}, IMAGENET),
        ({"outputs": ("opposite", "features")}, {"output": "features"}, IMAGENET),
    ],
)
def test_a_model_is_read_as_it_was_meant(
    tmp_path: Path, model: dict[str, Any], options: dict[str, str], normalised: tuple[Any, Any]
) -> None:
    file = write_model(tmp_path / "model.onnx", **model)
    trunk = open_trunk(f"onnx:{file}", options=options)
    assert (trunk.spec.size, trunk.spec.depths) == (SIDE, (WIDTH,))
    pixels = pixels_of()
    exact = 3e-3 if model.get("kind") == TensorProto.FLOAT16 else 1e-5
    np.testing.assert_allclose(encode(trunk, pixels), expected(pixels, *normalised), atol=exact)
    Encoder(trunk, provider="cpu", folder=tmp_path / "cache")
    # The options that follow from the model are part of the spec, so that the same trunk is opened again.
    assert reopen(trunk.spec).digest == trunk.digest


def test_several_outputs_are_depths_of_one_vector(tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.onnx", outputs=("features", "opposite", "tokens"))
    trunk = open_trunk(f"onnx:{file}", options={"output": "opposite,tokens"})
    assert trunk.spec.depths == (WIDTH, WIDTH)
    pixels = pixels_of()
    encoded = encode(trunk, pixels)
    np.testing.assert_allclose(encoded[:, :WIDTH], -expected(pixels, *IMAGENET) / 2**0.5, atol=1e-5)
    np.testing.assert_allclose(encoded[:, WIDTH:], expected(pixels[:, :1, :1], *IMAGENET) / 2**0.5, atol=1e-5)


def test_a_model_for_any_size_takes_the_one_that_is_given(tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.onnx", shape=("batch", 3, "height", "width"))
    assert open_trunk(f"onnx:{file}").spec.size == 224
    trunk = open_trunk(f"onnx:{file}", size=96)
    np.testing.assert_allclose(encode(trunk, pixels_of(side=96)), expected(pixels_of(side=96), *IMAGENET), atol=1e-5)
    open_shape = write_model(tmp_path / "open.onnx", shape=("a", "b", "c", "d"))
    with pytest.raises(TrunkError, match="leaves open where the channels are; give it with --trunk-option layout=nchw"):
        open_trunk(f"onnx:{open_shape}")
    assert open_trunk(f"onnx:{open_shape}", size=64, options={"layout": "nchw"}).spec.options["layout"] == "nchw"


@pytest.mark.parametrize(
    ("model", "options", "size", "reason"),
    [
        ({"more_inputs": ["text"]}, {}, None, r"inputs are images .*, text \[batch, 8\]; allowed: one, for images"),
        ({"kind": TensorProto.INT32}, {}, None, "input 'images' is INT32; allowed: FLOAT or FLOAT16, normalised, or"),
        ({"shape": ("batch", 1, SIDE, SIDE)}, {}, None, "cannot be a batch of colour images; allowed"),
        ({"shape": ("batch", 3, SIDE, 32)}, {}, None, f"is for images of {SIDE} x 32 pixels; allowed: square ones"),
        ({}, {}, 64, f"it is for images of {SIDE} x {SIDE} pixels; got --size 64"),
        ({}, {"layout": "nhwc"}, None, "cannot be a batch of colour images with layout=nhwc"),
        ({}, {"layout": "nchv"}, None, "layout is 'nchv'; allowed: nchw, nhwc; did you mean 'nchw'?"),
        ({"outputs": ("features", "opposite")}, {}, None, r"several outputs may be meant; .* output=features"),
        ({"outputs": ("largest",)}, {}, None, "no output can be used; allowed"),
        ({}, {"output": "pooled"}, None, r"there is no output pooled; the model has features \[batch, 5\]"),
        ({}, {"mean": "0.1,0.2"}, None, "mean is '0.1,0.2'; allowed: one number or three"),
        ({}, {"std": "0"}, None, "std is '0'; allowed: above 0"),
        ({}, {"maen": "0"}, None, "allowed: mean, std, output, layout, pool; did you mean 'mean'?"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_reason(
    tmp_path: Path, model: dict[str, Any], options: dict[str, str], size: int | None, reason: str
) -> None:
    file = write_model(tmp_path / "model.onnx", **model)
    with pytest.raises(TrunkError, match=reason):
        open_trunk(f"onnx:{file}", size=size, options=options)


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.onnx").write_text("no model")
    (tmp_path / "empty.onnx").touch()
    for name, reason in (("text.onnx", "not an ONNX model"), ("empty.onnx", "no nodes"), ("gone.onnx", "--trunk-weig")):
        with pytest.raises(TrunkError, match=reason):
            open_trunk(f"onnx:{tmp_path / name}")
    for name in ("onnx", "onnx:", "onxx:a.onnx", "efficientnet-lite0:a"):
        with pytest.raises(TrunkError, match=r"trunk is .*; allowed: .*onnx:FILE"):
            open_trunk(name)


def test_a_moved_file_is_given_and_another_one_is_refused(tmp_path: Path) -> None:
    file = write_model(tmp_path / "model.onnx", external=True)
    spec = open_trunk(f"onnx:{file}").spec
    assert spec.public_name == "onnx:model.onnx"
    place = tmp_path / "elsewhere"
    place.mkdir()
    for name in ("model.onnx", "model.onnx.data"):
        (tmp_path / name).rename(place / name)
    with pytest.raises(TrunkError, match="--trunk-weights FILE"):
        reopen(spec)
    assert reopen(spec, weights=place / "model.onnx").spec == spec
    # The weights are in the second file.
    content = bytearray((place / "model.onnx.data").read_bytes())
    content[0] ^= 1
    (place / "model.onnx.data").write_bytes(content)
    with pytest.raises(TrunkError, match=r"the weights have sha256 .* but the run was learned with"):
        reopen(spec, weights=place / "model.onnx")


def test_a_model_for_single_images_is_refused_before_anything_is_encoded(tmp_path: Path) -> None:
    """Its reshape has the batch written into it, which no shape shows."""
    nodes = [
        helper.make_node("Conv", ["images", "weight"], ["maps"]),
        helper.make_node("GlobalAveragePool", ["maps"], ["average"]),
        helper.make_node("Reshape", ["average", "sides"], ["features"]),
    ]
    constants = [
        numpy_helper.from_array(WEIGHT[:, :, None, None], "weight"),
        numpy_helper.from_array(np.array([1, WIDTH]), "sides"),
    ]
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, SIDE, SIDE])
    features = helper.make_tensor_value_info("features", TensorProto.FLOAT, [1, WIDTH])
    graph = helper.make_graph(nodes, "extractor", [images], [features], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), tmp_path / "m.onnx")
    with pytest.raises(TrunkError, match="a batch of any length"):
        Encoder(open_trunk(f"onnx:{tmp_path / 'm.onnx'}"), provider="cpu", folder=tmp_path / "cache")
