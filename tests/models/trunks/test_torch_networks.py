"""Networks of torchvision and timm with weights from a file: the graph equals the network in torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from models.trunks import torch_networks
from models.trunks.cache_settings import FOLDER_VARIABLE
from models.trunks.maps import with_maps
from models.trunks.trunk import Trunk, TrunkError, open_trunk, reopen
from serving.bundle.graph_outputs import output_names
from training.data.encoder import Encoder

pytestmark = pytest.mark.long

pytest.importorskip("onnxscript", reason="torch exports networks with it")
SIZE = 64


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv(FOLDER_VARIABLE, str(folder))
        yield folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of a small network, in both formats, with normalisations that are not the identity."""
    from torchvision import models

    torch.manual_seed(0)
    network = models.get_model("resnet18", weights=None)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    folder = tmp_path_factory.mktemp("weights")
    torch.save(network.state_dict(), folder / "weights.pth")
    save_file(network.state_dict(), folder / "weights.safetensors")
    return folder


@pytest.fixture(scope="module")
def trunk(weights: Path) -> Trunk:
    return open_trunk("torchvision:resnet18", size=SIZE, weights=weights / "weights.safetensors")


def test_the_graph_equals_the_network(trunk: Trunk, weights: Path, tmp_path: Path) -> None:
    from torchvision import models

    encoder = Encoder(trunk, provider="cpu", folder=tmp_path / "cache")
    network = models.get_model("resnet18", weights=None)
    network.load_state_dict(torch.load(weights / "weights.pth", weights_only=True))
    network.fc = nn.Identity()
    pixels = np.random.default_rng(0).integers(0, 256, (4, SIZE, SIZE, 3), dtype=np.uint8)
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.no_grad():
        features = network.eval()((torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - mean) / std)
    wanted = nn.functional.normalize(features, dim=1).numpy()
    assert trunk.spec.depths == (512,)
    np.testing.assert_allclose(encoder.encode(pixels), wanted, atol=1e-5)
    with_its_map = with_maps(trunk.model)
    assert with_its_map is not None
    assert output_names(with_its_map) == ["encoded", "map0"]


def failing(*_: object, **__: object) -> None:
    raise RuntimeError("no such operator")


def test_the_same_weights_are_exported_once_whatever_their_file(
    trunk: Trunk, weights: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_networks.torch.onnx, "export", failing)
    again = reopen(trunk.spec, weights=weights / "weights.pth")
    assert again.digest == trunk.digest
    (file,) = (own_cache / "graphs").iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(TrunkError, match=r"torch cannot export it for images of 64 pixels \(no such operator\)"):
        reopen(trunk.spec, weights=weights / "weights.pth")
    file.write_bytes(content)


def test_an_export_that_differs_from_torch_is_refused(trunk: Trunk, tmp_path: Path) -> None:
    assert trunk.probe is not None
    other = replace(trunk, probe=trunk.probe._replace(encoded=np.roll(trunk.probe.encoded, 1, axis=1)))
    with pytest.raises(TrunkError, match="the exported graph differs from the network in torch"):
        Encoder(other, provider="cpu", folder=tmp_path / "cache")


def test_weights_of_another_network_and_unknown_names_are_refused(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(TrunkError, match=r"weights.pth: not the weights of torchvision:resnet34: (Missing|Unexpected)"):
        open_trunk("torchvision:resnet34", weights=weights / "weights.pth")
    with pytest.raises(TrunkError, match=r"network of torchvision is 'resnet19'; .*did you mean 'resnet1"):
        open_trunk("torchvision:resnet19")
    with pytest.raises(TrunkError, match="has no options; got mean=0"):
        open_trunk("torchvision:resnet18", options={"mean": "0"})
    torch.save({"a": [1, 2]}, tmp_path / "other.pth")
    with pytest.raises(TrunkError, match="not only named tensors"):
        open_trunk("torchvision:resnet18", weights=tmp_path / "other.pth")


def test_without_a_network_connection_a_file_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", offline)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    with pytest.raises(TrunkError, match=r"neither found nor downloaded .*: --trunk-weights FILE"):
        open_trunk("torchvision:resnet18")


def test_a_network_of_timm(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    name = "test_resnet"
    network = timm.create_model(name)
    torch.save(network.state_dict(), tmp_path / "weights.pth")
    trunk = open_trunk(f"timm:{name}", size=SIZE, weights=tmp_path / "weights.pth")
    encoder = Encoder(trunk, provider="cpu", folder=tmp_path / "cache")
    pixels = np.random.default_rng(0).integers(0, 256, (2, SIZE, SIZE, 3), dtype=np.uint8)
    assert encoder.encode(pixels).shape == (2, trunk.spec.dim)
    with pytest.raises(TrunkError, match=r"network of timm is 'test_resnett'; .*did you mean"):
        open_trunk("timm:test_resnett")
