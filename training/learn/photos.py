"""The preset for photographs: a frozen, pre-trained trunk, statistics of its encoded vectors, and adapters on them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from PIL import Image, UnidentifiedImageError

from models.config import NetworkConfig
from models.masks import MECHANISMS
from models.suggest import unknown_name
from models.trunks import DEFAULT_TRUNK
from models.trunks.patches import NAME as PATCHES
from models.trunks.trunk import TrunkRequest, TrunkSpec
from serving.bundle.sections import ImageSpec
from training.config import VECTOR, FeatureLearning, HeadLearning, Preset
from training.presets import PRESETS

PHOTOS = "photos"
"""The name of the preset."""
NO_TRUNK = "none"
"""`--trunk none`: learn from scratch."""
LEAST_SIDE = 32
"""Smaller images are taken for drawings or digits, and not for photographs."""
SAMPLED = 24
"""Images of a folder that are looked at."""
GREY_DIFFERENCE = 8
"""Channels of a grey image differ by at most this, after JPEG."""
WIDTH = 128
"""Units of each layer of the adapters, of all tasks together."""

Loss = Literal["csi", "ce"]


def chosen_trunk(chosen: argparse.Namespace) -> TrunkRequest | None:
    """The trunk that the options of `openworld fit` ask for, or that suits the images; None: learn from scratch."""
    named, own = chosen.trunk, ("trunk_weights", "trunk_option", "quick")
    if named == NO_TRUNK or (named is None and chosen.preset not in (None, PHOTOS)):
        _refuse(chosen, "without a trunk", *own)
        if chosen.preset == PHOTOS:
            raise ValueError(f"--preset {PHOTOS} needs a trunk; allowed with --trunk {NO_TRUNK}: --preset images")
        return None
    if named is None and chosen.preset is None and not (chosen.data and shows_photos(Path(chosen.data))):
        _refuse(chosen, "without a trunk (--trunk, or photographs in --data)", *own)
        return None
    benchmark_of(chosen.preset)
    request = TrunkRequest(named or DEFAULT_TRUNK, chosen.size, chosen.trunk_weights, dict(chosen.trunk_option or ()))
    _refuse(chosen, "with a trunk, on whose vectors adapters are learned", "backbone", "buffer")
    if without_adapters(chosen):
        learned = ("method", "loss", "width", "epochs", "batch_size")
        _refuse(chosen, f"with --quick or --trunk {PATCHES}, by which no adapters are learned", *learned)
    return request


def without_adapters(chosen: argparse.Namespace) -> bool:
    """Whether a run with a trunk has statistics only: if it is to be quick, or its trunk is learned from its images."""
    return bool(chosen.quick) or chosen.trunk == PATCHES


def _refuse(chosen: argparse.Namespace, when: str, *names: str) -> None:
    if given := [f"--{name.replace('_', '-')}" for name in names if getattr(chosen, name) is not None]:
        raise ValueError(f"{', '.join(given)} means nothing {when}: leave it out")


def benchmark_of(name: str | None) -> Preset | None:
    """The preset whose data set and tasks a run with a trunk takes, if one is named besides `photos`."""
    if name in (None, PHOTOS):
        return None
    if name not in PRESETS:
        raise ValueError(unknown_name("preset", str(name), (PHOTOS, *PRESETS)))
    if PRESETS[name].images_per_class is not None:
        raise ValueError(
            f"--preset {name} learns from some of the images only, which a run with a trunk does not; allowed: "
            f"--preset {name.removesuffix('-cpu')}"
        )
    return PRESETS[name]


def photos_preset(
    trunk: TrunkSpec,
    method: str = "hat",
    width: int | None = None,
    loss: Loss = "csi",
    benchmark: Preset | None = None,
) -> Preset:
    """The preset for images that `trunk` encodes; `method`, `width` and `loss` are those of adapters on its vectors.

    Name, data set and tasks are those of `benchmark`, if given.
    """
    if method not in MECHANISMS:
        raise ValueError(unknown_name("method", method, MECHANISMS))
    if width is not None and width < 1:
        raise ValueError(f"width is {width}; allowed: 1 or more units")
    # A network that is learned by cross-entropy sees neither rotations nor pairs of views.
    network = NetworkConfig(method, "adapter", *VECTOR, trunk.dim, mean=0.0, std=1.0, base=width or WIDTH)
    network = network if loss == "csi" else replace(network, rotations=1, projection=0)
    preset = Preset(
        name=PHOTOS,
        dataset="folder",
        image=ImageSpec(height=trunk.size, width=trunk.size, mode="RGB"),
        network=network,
        features=FeatureLearning(20, 64, optimizer="adam", lr=1e-3, warmup_epochs=1, loss=loss),
        head=HeadLearning(epochs=8, batch_size=64, lr=5e-3),
    )
    if benchmark is None:
        return preset
    kept = ("name", "dataset", "classes_per_task", "held_out")
    return replace(preset, **{name: getattr(benchmark, name) for name in kept})


def with_learning(preset: Preset, epochs: int | None, batch_size: int | None) -> Preset:
    """The preset with other numbers for step 1 of learning."""
    changes: dict[str, Any] = {"epochs": epochs, "batch_size": batch_size}
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(preset, features=replace(preset.features, **given)) if given else preset


def shows_photos(folder: Path) -> bool:
    """Whether most of a few images below a folder are in colour and not tiny; unreadable files do not count."""
    found = [verdict for file in _sample(folder) if (verdict := _is_photo(file)) is not None]
    return 2 * sum(found) > len(found)


def _sample(folder: Path) -> list[Path]:
    """Some files, from as many class folders as possible, the same each time."""
    folders = sorted(path for path in (folder, *folder.glob("*"), *folder.glob("*/*")) if path.is_dir())
    contents = [sorted(path for path in each.iterdir() if path.is_file()) for each in folders]
    turns = [files[turn] for turn in range(SAMPLED) for files in contents if turn < len(files)]
    return [path for path in turns if not path.name.startswith(".")][:SAMPLED]


def _is_photo(file: Path) -> bool | None:
    try:
        with Image.open(file) as image:
            if min(image.size) < LEAST_SIDE:
                return False
            # A JPEG is decoded at a fraction of its size.
            image.draft("RGB", (LEAST_SIDE, LEAST_SIDE))
            small = image.convert("RGB").resize((LEAST_SIDE, LEAST_SIDE))
    except (OSError, UnidentifiedImageError, ValueError, Image.DecompressionBombError):
        return None
    channels = [band.tobytes() for band in small.split()]
    return any(max(values) - min(values) > GREY_DIFFERENCE for values in zip(*channels, strict=True))
