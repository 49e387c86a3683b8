from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from serving.bundle.decision import OUTPUT_NAMES
from serving.bundle.errors import BundleError, ImageError, ProviderError
from serving.bundle.model import BundleModel
from serving.bundle.providers import CPU
from serving.bundle.sections import ImageSpec
from tests.helpers_serving import GRAPH, golden_of, golden_pixels, reseal, tiny_graph, write_bundle


def test_golden_images_pass_the_self_test(model: BundleModel) -> None:
    model.self_test()


def test_cuda_libraries_are_looked_for_before_a_session_is_asked_for(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CUDA libraries from packages are not on a search path; onnxruntime's output about that goes to stderr."""
    done: list[str] = []

    def preload() -> None:
        done.append("preloaded")
        print("cannot find libcudnn")

    def refuse(*_: object) -> None:
        done.append("opened")
        raise RuntimeError("no device")

    monkeypatch.setattr(ort, "preload_dlls", preload)
    monkeypatch.setattr("serving.bundle.session.open_session", refuse)
    with pytest.raises(ProviderError, match=r"CUDA does not work here.*no device"):
        BundleModel.load(bundle, provider="cuda")
    assert done == ["preloaded", "opened"]
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "cannot find libcudnn\n")


def test_a_batch_is_its_images(model: BundleModel) -> None:
    pixels = golden_pixels()
    together = model.run(pixels)
    for row, image in enumerate(pixels):
        alone = model.run(image[np.newaxis])
        for name in OUTPUT_NAMES:
            np.testing.assert_allclose(alone[name][0], together[name][row], rtol=1e-5)


@pytest.mark.parametrize("wrong", OUTPUT_NAMES)
def test_outputs_that_changed_since_export_are_refused(
    bundle: Path, tmp_path: Path, wrong: str, model: BundleModel
) -> None:
    golden = golden_of(model)
    golden[wrong] = golden[wrong] * np.float32(1.1) + np.float32(0.1)
    damaged = BundleModel.load(write_bundle(tmp_path / "bundle", golden=golden), provider="cpu")
    with pytest.raises(BundleError, match=rf"{wrong} of the images in golden.npz on {CPU}: got .* was recorded; .* > "):
        damaged.self_test()


def test_golden_outputs_may_differ_by_rounding(tmp_path: Path, model: BundleModel) -> None:
    golden = golden_of(model)
    for name in OUTPUT_NAMES:
        golden[name] = golden[name] * np.float32(1.0005)
    BundleModel.load(write_bundle(tmp_path / "bundle", golden=golden), provider="cpu").self_test()


def test_golden_outputs_of_another_shape_are_refused(tmp_path: Path, model: BundleModel) -> None:
    golden = golden_of(model)
    golden["logits"] = golden["logits"][:, :3]
    with pytest.raises(BundleError, match=r"recorded \(3, 3\); needed \(3, 4\)"):
        BundleModel.load(write_bundle(tmp_path / "bundle", golden=golden), provider="cpu").self_test()


def test_a_graph_of_another_size_is_refused(tmp_path: Path) -> None:
    graph = tiny_graph(ImageSpec(height=4, width=8, mode="RGB"))
    with pytest.raises(BundleError, match=r"pixels is tensor\(uint8\) \['batch', 4, 8, 3\]; needed .* 8, 8, 3\]"):
        BundleModel.load(write_bundle(tmp_path / "bundle", graph=graph), provider="cpu")


def test_a_graph_without_a_needed_output_is_refused(tmp_path: Path) -> None:
    graph = tiny_graph()
    del graph.graph.output[1]
    with pytest.raises(BundleError, match=r"outputs \['features', 'logits', .*\]; needed \['logits', 'distances', "):
        BundleModel.load(write_bundle(tmp_path / "bundle", graph=graph), provider="cpu")


def test_a_graph_with_a_fixed_batch_is_refused(tmp_path: Path) -> None:
    graph = tiny_graph()
    graph.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    with pytest.raises(BundleError, match="needed"):
        BundleModel.load(write_bundle(tmp_path / "bundle", graph=graph), provider="cpu")


def test_a_graph_that_is_not_one_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    reseal(copy, GRAPH, b"not a graph")
    with pytest.raises(BundleError, match=r"model\.fp32\.onnx: onnxruntime cannot open it"):
        BundleModel.load(copy, provider="cpu")


def test_numbers_that_cannot_be_decided_on_are_an_error_of_the_model(tmp_path: Path) -> None:
    graph = tiny_graph()
    nodes = graph.graph.node
    place = next(number for number, node in enumerate(nodes) if "logits" in node.output)
    nodes[place].output[0] = "finite"
    # 0 / 0 for a black image.
    added = [
        helper.make_node("ReduceMax", ["mean", "middle"], ["brightest"], keepdims=1),
        helper.make_node("Div", ["brightest", "brightest"], ["share_of_itself"]),
        helper.make_node("Mul", ["finite", "share_of_itself"], ["logits"]),
    ]
    for offset, node in enumerate(added):
        nodes.insert(place + 1 + offset, node)
    model = BundleModel.load(write_bundle(tmp_path / "bundle", graph=graph), provider="cpu")
    model.self_test()
    with pytest.raises(ImageError, match="logits not finite"):
        model.predict(np.zeros((1, 8, 8, 3), np.uint8))


def test_a_graph_with_another_input_type_is_refused(tmp_path: Path) -> None:
    graph = tiny_graph()
    graph.graph.input[0].type.tensor_type.elem_type = TensorProto.FLOAT
    with pytest.raises(BundleError, match=r"pixels is tensor\(float\)"):
        BundleModel.load(write_bundle(tmp_path / "bundle", graph=graph), provider="cpu")


def test_an_unknown_provider_is_refused(bundle: Path) -> None:
    with pytest.raises(ProviderError, match="provider is 'tpu'; allowed: auto, cuda, cpu"):
        BundleModel.load(bundle, provider="tpu")


def test_without_a_device_auto_is_the_cpu_and_cuda_fails(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert BundleModel.load(bundle, provider="auto").provider == CPU
    with pytest.raises(ProviderError, match=r"CUDA does not work here \(no NVIDIA device is visible\): "):
        BundleModel.load(bundle, provider="cuda")


def test_auto_falls_back_when_cuda_is_there_but_does_not_work(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("serving.bundle.providers.nvidia_visible", lambda: True)
    with caplog.at_level("INFO"):
        assert BundleModel.load(bundle, provider="auto").provider == CPU
    assert "the CPU is used" in caplog.text
    assert f"runs in fp32 on {CPU}" in caplog.text
