"""`torchvision:NAME` and `timm:NAME`: networks with their published weights, or with weights from a file.

The layer that classifies is left out, so that a vector is what it would classify. The network is exported by torch, and
what it computes in torch is kept as a probe, which the graph must reproduce.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from models.suggest import unknown_name
from models.trunks.stored_graphs import stored
from models.trunks.trunk import Probe, Trunk, TrunkError, TrunkRequest, TrunkSpec
from models.trunks.weights import load_tensors
from models.trunks.wrapped import LEAST_OPSET, Normalisation, Wrapped, image_input, wrap

PROBES = 3
FORM = 1
"""Changes whenever the graph around an exported network changes."""
EXPORTER_INSTALL = "pip install -e '.[photos]'"

log = logging.getLogger(__name__)


def open_torchvision(request: TrunkRequest) -> Trunk:
    """A classification network of torchvision."""
    from torchvision import models

    request.check_options()
    name = request.argument
    networks = models.list_models(module=models)
    if name not in networks:
        raise TrunkError(unknown_name("network of torchvision", name, networks))
    published = models.get_model_weights(name).DEFAULT
    transforms = published.transforms()
    network = models.get_model(name, weights=None)
    tensors = _tensors(request, lambda: published.get_state_dict(progress=False, check_hash=True))
    _load(network, tensors, request)
    normalisation = Normalisation(tuple(transforms.mean), tuple(transforms.std))
    return _exported(request, _without_classifier(network), tensors, transforms.crop_size[0], normalisation)


def open_timm(request: TrunkRequest) -> Trunk:
    """A network of timm."""
    try:
        import timm
        from timm.data import resolve_model_data_config
    except ImportError:
        raise TrunkError(f"trunk {request.name} needs the package timm: pip install -e '.[timm]'") from None
    request.check_options()
    name = request.argument
    if not timm.is_model(name):
        raise TrunkError(unknown_name("network of timm", name, timm.list_models()))
    network = timm.create_model(name)
    tensors = _tensors(request, lambda: timm.create_model(name, pretrained=True).state_dict())
    _load(network, tensors, request)
    network.reset_classifier(0)
    config = resolve_model_data_config(network)
    normalisation = Normalisation(tuple(config["mean"]), tuple(config["std"]))
    return _exported(request, network, tensors, config["input_size"][-1], normalisation)


def _tensors(request: TrunkRequest, download: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The weights from the given file, or the published ones."""
    if request.weights is not None:
        return load_tensors(request.weights)
    try:
        return download()
    except Exception as error:
        # Without a network, the libraries raise many kinds of errors.
        reason = " ".join(str(error).split())[:300]
        raise TrunkError(
            f"the weights of {request.name} can be neither found nor downloaded ({reason}); allowed: a network "
            "connection, or a file with them: --trunk-weights FILE"
        ) from error


def _load(network: nn.Module, tensors: Mapping[str, Tensor], request: TrunkRequest) -> None:
    try:
        network.load_state_dict(dict(tensors))
    except RuntimeError as error:
        reason = " ".join(" ".join(str(error).split("\n")[1:3]).split())[:300]
        raise TrunkError(f"{request.weights}: not the weights of {request.name}: {reason}") from error


def _without_classifier(network: nn.Module) -> nn.Module:
    """The network with its last linear layer replaced by the identity."""
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise TrunkError(f"{type(network).__name__} has no linear layer that classifies; allowed: other networks")
    network.set_submodule(linear[-1], nn.Identity())
    return network


def state_sha256(tensors: Mapping[str, Tensor]) -> str:
    """The checksum of weights, whatever file they are in."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _exported(
    request: TrunkRequest, network: nn.Module, tensors: Mapping[str, Tensor], usual: int, normalisation: Normalisation
) -> Trunk:
    size, sha256 = request.size or usual, state_sha256(tensors)
    network.eval()
    key = {"name": request.name, "sha256": sha256, "size": size, "normalisation": normalisation}
    versions = {"form": FORM, "torch": str(torch.__version__)}
    wrapped = stored(key | versions, lambda: _export(request, network, size, normalisation))
    spec = TrunkSpec(request.name, sha256, size, wrapped.depths)
    return Trunk(spec, wrapped.model, probe=_probe(network, size, normalisation))


def _export(request: TrunkRequest, network: nn.Module, size: int, normalisation: Normalisation) -> Wrapped:
    # The exporter describes its steps.
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    log.info("%s is exported to ONNX for images of %d x %d pixels, which is kept ...", request.name, size, size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                network,
                (torch.zeros(2, 3, size, size),),
                dynamo=True,
                opset_version=LEAST_OPSET,
                input_names=["images"],
                output_names=["features"],
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                verbose=False,
            )
        assert program is not None
        model = program.model_proto
        return wrap(model, image_input(model), size, normalisation)
    except ImportError as error:
        raise TrunkError(f"trunk {request.name} needs the package {error.name}: {EXPORTER_INSTALL}") from error
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise TrunkError(
            f"trunk {request.name}: torch cannot export it for images of {size} pixels ({reason}); allowed: another "
            "--size, another network, or onnx:FILE"
        ) from error


@torch.no_grad()
def _probe(network: nn.Module, size: int, normalisation: Normalisation) -> Probe:
    """What the network computes in torch, scaled to unit length."""
    coarse = torch.rand(PROBES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    smooth = nn.functional.interpolate(coarse, (size, size), mode="bicubic").clamp(0, 1)
    pixels = (255 * smooth).to(torch.uint8)
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in normalisation)
    features = network((pixels.float() / 255 - mean) / std).flatten(start_dim=1)
    vectors = nn.functional.normalize(features.double(), dim=1)
    return Probe(np.ascontiguousarray(pixels.permute(0, 2, 3, 1).numpy()), vectors.float().numpy())
