"""A bundle with a session that runs it, on the GPU if that demonstrably works."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import FEATURES, OUTPUT_NAMES, Verdicts, complete, decide
from serving.bundle.errors import BundleError, ImageError, ProviderError
from serving.bundle.explanation import MAP, Explanation, cell_vectors, explain
from serving.bundle.layout import GOLDEN, POOLED, adapter_name, detector_name, extension_name
from serving.bundle.manifest import EXPORT_AGAIN, INPUT_NAME, Bundle, Manifest, load_bundle
from serving.bundle.pooled import Detector, PooledClassifier
from serving.bundle.pooled_model import Consolidated, Extension, PooledModel, adapters_of
from serving.bundle.precisions import AUTO, PRECISION_CHOICES, PRECISIONS
from serving.bundle.providers import PROVIDER_CHOICES, wants_cuda
from serving.bundle.session import one_line, open_cuda_session, open_session, session_options

if TYPE_CHECKING:
    import onnxruntime as ort

ENCODED = "encoded"
"""The output of a trunk: one vector per image, [batch, dim]."""
TIMED_RUNS, TIMED_SECONDS = range(3, 200), 0.3
"""The number of timed runs of each precision, and about how many seconds they may take in all."""
WORTH_ROUNDING = 0.75
"""A reduced precision replaces fp32 only if an image takes at most this share of the time. The margin keeps the workers
of one server, which measure separately, from choosing differently."""

Part = TypeVar("Part", PooledClassifier, Detector, Extension)

log = logging.getLogger("bentoml.openworld")
"""Below BentoML's logger, which a server shows."""


@dataclass(frozen=True)
class BundleModel:
    """A bundle that is ready to answer."""

    bundle: Bundle
    precision: str
    session: ort.InferenceSession
    pooled: PooledModel | None = None
    """With a trunk: what classifies its encoded vectors."""
    explains: bool = False
    """Whether the bundle has feature maps, which an explanation needs."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        provider: str = "auto",
        precision: str = AUTO,
        threads: int = 0,
        alpha: float | None = None,
        like: BundleModel | None = None,
    ) -> BundleModel:
        """Read a bundle and open it on `provider` (auto, cuda, cpu) in `precision` (auto or one that it has).

        `threads` run the graph on the CPU; 0 leaves their number to onnxruntime. `alpha` replaces the bundle's own.
        `like` was loaded with the same options: if both have the same trunk, its session is used, in its precision.
        """
        if provider not in PROVIDER_CHOICES:
            raise ProviderError(f"provider is {provider!r}; allowed: {', '.join(PROVIDER_CHOICES)}")
        if precision not in PRECISION_CHOICES:
            raise ProviderError(f"precision is {precision!r}; allowed: {', '.join(PRECISION_CHOICES)}")
        bundle = load_bundle(path)
        if alpha is not None:
            bundle = replace(bundle, rule=bundle.rule.model_copy(update={"alpha": alpha}))
        if precision not in (AUTO, *bundle.manifest.precisions):
            allowed = ", ".join((AUTO, *bundle.manifest.precisions))
            raise BundleError(f"{bundle.path}: precision is {precision!r}; allowed with this bundle: {allowed}")
        if like is not None and _same_trunk(bundle.manifest, like.manifest):
            # Only read to check it: a file that is damaged now could not be opened at the next start.
            bundle.graph(like.precision)
            model = _checked(bundle, like.precision, like.session, like)
        else:
            model = _open(bundle, provider, precision, threads)
        name = f"{bundle.manifest.name} {bundle.manifest.version}"
        trunk = bundle.manifest.trunk
        how = model.precision if trunk is None else f"{model.precision} behind {trunk.name}"
        log.info("%s from %s runs in %s on %s", name, bundle.path, how, model.provider)
        return model

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @property
    def provider(self) -> str:
        """The provider that really runs the graph; a session may have fallen back from the requested one."""
        return str(self.session.get_providers()[0])

    def run(self, pixels: NDArray[np.uint8], *, features: bool = False) -> dict[str, NDArray[np.floating[Any]]]:
        """The outputs for uint8 [batch, height, width, channels]; `features` adds what the quarantine keeps: every
        task's standardised features, or the encoded vector of a trunk."""
        if self.pooled is not None:
            encoded = self.encode(pixels, self.pooled.rotations)
            outputs = complete(self.pooled.outputs(encoded), self.bundle.rule)
            upright = encoded if encoded.ndim == 2 else encoded[:, 0]
            return {**outputs, FEATURES: upright} if features else outputs
        names = [*OUTPUT_NAMES, FEATURES] if features else list(OUTPUT_NAMES)
        return dict(zip(names, self.session.run(names, {INPUT_NAME: pixels}), strict=True))

    def encode(self, pixels: NDArray[np.uint8], rotations: int = 1) -> NDArray[np.float32]:
        """The vectors of a trunk as `encode_rotations` returns them, for uint8 [batch, height, width, channels]."""
        return encode_rotations(self.session, pixels, rotations)

    def predict(
        self, pixels: NDArray[np.uint8], *, alpha: float | None = None, given_task: int | None = None
    ) -> Verdicts:
        """Decide a batch."""
        outputs = self.run(pixels)
        for name, values in outputs.items():
            if not np.isfinite(values).all():
                problem, got = "the network failed on this image", f"{name} not finite"
                raise ImageError("model_failed", problem, got=got, allowed="finite numbers")
        return decide(outputs, self.bundle.rule, alpha=alpha, given_task=given_task)

    @cached_property
    def _maps(self) -> tuple[ort.InferenceSession, dict[int, str]]:
        """A session with feature maps, opened at the first explanation, and its outputs by the part of the encoded
        vector that each is averaged to."""
        session = open_session(self.bundle.maps_graph(), session_options(1))
        names = [node.name for node in session.get_outputs() if node.name.startswith(MAP)]
        return session, {int(name.removeprefix(MAP)): name for name in names}

    def explain(self, pixels: NDArray[np.uint8], *, class_id: int, unknown: bool) -> Explanation:
        """Where in one image [1, height, width, channels] the evidence lies: for a class, or for "unknown" because even
        this class is too far away."""
        trunk, pooled = self.manifest.trunk, self.pooled
        assert trunk is not None
        assert pooled is not None
        session, names = self._maps
        encoded, *maps = session.run([ENCODED, *names.values()], {INPUT_NAME: pixels})
        cells, shape = cell_vectors({part: each[0] for part, each in zip(names, maps, strict=True)}, trunk.depths)
        return explain(encoded[0], cells, shape, pooled.upright().outputs, class_id=class_id, unknown=unknown)

    def self_test(self) -> None:
        """Run the golden images; raises a BundleError that names the output that differs from the recorded one."""
        golden = self.bundle.golden
        try:
            outputs = self.run(golden.pixels)
        except Exception as error:
            # onnxruntime's exceptions have no common base class of their own.
            raise BundleError(f"{self._graph}: does not run on {self.provider}: {one_line(error)}") from error
        for name in OUTPUT_NAMES:
            self._compare(name, outputs[name], golden.outputs[self.precision][name])

    def _compare(self, name: str, got: NDArray[Any], wanted: NDArray[Any]) -> None:
        where = f"{self._graph}: {name} of the images in {GOLDEN} on {self.provider}"
        shape = (len(self.bundle.golden.pixels), _width(name, self.manifest))
        if got.shape != shape or wanted.shape != shape:
            raise BundleError(f"{where}: shape {got.shape}, recorded {wanted.shape}; needed {shape}")
        if not (np.isfinite(got).all() and np.isfinite(wanted).all()):
            raise BundleError(f"{where}: not all finite; a decision needs finite numbers")
        difference = np.abs(got.astype(np.float64) - wanted)
        allowed = self._tolerance * (1 + np.abs(wanted))
        worst = np.unravel_index(int((difference - allowed).argmax()), shape)
        if difference[worst] > allowed[worst]:
            raise BundleError(
                f"{where}: got {got[worst]:.6g} where {wanted[worst]:.6g} was recorded; "
                f"difference {difference[worst]:.2g} > {allowed[worst]:.2g}"
            )

    @property
    def _tolerance(self) -> float:
        row = PRECISIONS[self.precision]
        of_trunk = None if self.manifest.trunk is None else row.trunk_tolerance
        return row.golden_tolerance if of_trunk is None else of_trunk

    @property
    def _graph(self) -> Path:
        return self.bundle.path / self.manifest.graph_file(self.precision)


def _same_trunk(one: Manifest, other: Manifest) -> bool:
    """Whether two bundles encode images by the same files."""
    if one.trunk is None or (one.trunk, one.precisions, one.image) != (other.trunk, other.precisions, other.image):
        return False
    return all(one.files[name] == other.files[name] for name in map(one.graph_file, one.precisions))


def _open(bundle: Bundle, provider: str, precision: str, threads: int) -> BundleModel:
    available = bundle.manifest.precisions
    if wants_cuda(provider):
        on_cuda = min(available, key=lambda name: PRECISIONS[name].cuda_rank) if precision == AUTO else precision
        try:
            session = open_cuda_session(bundle.graph(on_cuda), bundle.golden.pixels[:1], threads)
            return _checked(bundle, on_cuda, session)
        except ProviderError as error:
            if provider == "cuda":
                raise
            log.warning("%s; the CPU is used", error)
    if precision != AUTO:
        return _open_on_cpu(bundle, precision, threads)
    timed = [name for name in PRECISIONS if name in available and PRECISIONS[name].timed_on_cpu]
    return _fastest([_open_on_cpu(bundle, name, threads) for name in timed or available[:1]])


def _open_on_cpu(bundle: Bundle, precision: str, threads: int) -> BundleModel:
    graph = bundle.graph(precision)
    try:
        session = open_session(graph, session_options(threads))
    except Exception as error:
        where = bundle.path / bundle.manifest.graph_file(precision)
        raise BundleError(f"{where}: onnxruntime cannot open it: {one_line(error)}") from error
    return _checked(bundle, precision, session)


def _fastest(models: Sequence[BundleModel]) -> BundleModel:
    """The first model, unless another one is measured to be clearly faster on this machine."""
    if len(models) == 1:
        return models[0]
    seconds = dict(zip((model.precision for model in models), seconds_per_image(models), strict=True))
    chosen = min(models[1:], key=lambda model: seconds[model.precision])
    if not seconds[chosen.precision] <= WORTH_ROUNDING * seconds[models[0].precision]:
        chosen = models[0]
    figures = ", ".join(f"{1000 * taken:.2f} ms in {name}" for name, taken in seconds.items())
    log.info("an image takes %s on this CPU: %s is used", figures, chosen.precision)
    return chosen


def seconds_per_image(models: Sequence[BundleModel]) -> list[float]:
    """The fastest of several runs of one golden image per model; slower runs were disturbed by other processes."""
    pixels = models[0].bundle.golden.pixels[:1]
    for model in models:
        # The first run allocates memory.
        model.run(pixels)
    return fastest_seconds([partial(model.run, pixels) for model in models], TIMED_RUNS, TIMED_SECONDS)


def fastest_seconds(works: Sequence[Callable[[], object]], runs: range, seconds: float) -> list[float]:
    """The fastest run of each; `runs` bounds their number, and about `seconds` are used for more than the fewest."""
    fastest = [math.inf] * len(works)
    until = time.perf_counter() + seconds
    for done in range(runs.stop):
        if done >= runs.start and time.perf_counter() > until:
            break
        # In turn, so that a disturbance affects them alike.
        for place, work in enumerate(works):
            started = time.perf_counter()
            work()
            fastest[place] = min(fastest[place], time.perf_counter() - started)
    return fastest


def _checked(
    bundle: Bundle, precision: str, session: ort.InferenceSession, like: BundleModel | None = None
) -> BundleModel:
    """The model, if its graph has the inputs and outputs that the manifest and the rule need."""
    manifest, trunk = bundle.manifest, bundle.manifest.trunk
    where = bundle.path / manifest.graph_file(precision)
    inputs = {node.name: node for node in session.get_inputs()}
    outputs = {node.name: node for node in session.get_outputs()}
    widths = {name: _width(name, manifest) for name in OUTPUT_NAMES} if trunk is None else {ENCODED: trunk.dim}
    needed = [*widths, FEATURES] if trunk is None else [ENCODED]
    if set(inputs) != {INPUT_NAME}:
        raise BundleError(f"{where}: inputs {sorted(inputs)}; needed [{INPUT_NAME!r}]")
    if not set(needed) <= set(outputs):
        raise BundleError(f"{where}: outputs {sorted(outputs)}; needed {needed}")
    pixels = inputs[INPUT_NAME]
    if pixels.type != "tensor(uint8)" or not _fits(pixels.shape, manifest.image.shape):
        raise BundleError(
            f"{where}: {INPUT_NAME} is {pixels.type} {pixels.shape}; "
            f"needed tensor(uint8) ['batch', {', '.join(map(str, manifest.image.shape))}]"
        )
    for name, width in widths.items():
        if not _fits(outputs[name].shape, (width,)):
            raise BundleError(f"{where}: {name} is {outputs[name].shape}; needed ['batch', {width}]")
    if trunk is None:
        return BundleModel(bundle, precision, session)
    explains = any(name.startswith(MAP) for name in bundle.map_outputs())
    return BundleModel(bundle, precision, session, load_pooled(bundle, like), explains)


def encode_rotations(session: ort.InferenceSession, pixels: NDArray[np.uint8], rotations: int) -> NDArray[np.float32]:
    """The trunk's vectors [n, dim] of uint8 [n, height, width, channels]; [n, rotations, dim] if several are read."""
    turns = [pixels, *(np.ascontiguousarray(np.rot90(pixels, turn, (1, 2))) for turn in range(1, rotations))]
    vectors = [session.run([ENCODED], {INPUT_NAME: turn})[0] for turn in turns]
    return np.asarray(vectors[0] if rotations == 1 else np.stack(vectors, axis=1))


def load_pooled(bundle: Bundle, like: BundleModel | None = None) -> PooledModel:
    """What classifies the vectors of a bundle with a trunk, if it fits the trunk and the tasks.

    Detectors that `like` has too are shared with it: they take most of the memory of many lessons.
    """
    manifest = bundle.manifest
    loaded: dict[str, Detector] = {}
    if like is not None and like.pooled is not None:
        files = (like.manifest.files[detector_name(task.task)] for task in like.manifest.tasks)
        loaded = {file.sha256: detector for file, detector in zip(files, like.pooled.detectors, strict=True)}
    names = [detector_name(task.task) for task in manifest.tasks]
    pooled, *tasks = (bundle.arrays(name) for name in (POOLED, *names))
    whole = len(manifest.labels)
    classifier = _part(bundle, POOLED, pooled, PooledClassifier.from_arrays, PooledClassifier.logits, whole)
    detectors = tuple(
        loaded.get(manifest.files[name].sha256)
        or _part(bundle, name, arrays, Detector.from_arrays, Detector.distances, len(task.labels))
        for name, arrays, task in zip(names, tasks, manifest.tasks, strict=True)
    )
    place = {label: column for column, label in enumerate(manifest.labels)}
    extensions = tuple(
        (
            np.array([place[label] for label in lesson.extends]),
            _part(
                bundle,
                name := extension_name(number),
                bundle.arrays(name),
                Extension.from_arrays,
                Extension.distances,
                len(lesson.extends),
            ),
        )
        for number, lesson in enumerate(manifest.lessons)
        if lesson.extends and extension_name(number) in manifest.files
    )
    try:
        consolidated = tuple(
            (
                np.array([place[label] for label in group.labels]),
                Consolidated.from_arrays(group.labels, bundle.arrays(adapter_name(number))),
            )
            for number, group in enumerate(manifest.consolidated)
        )
        model = PooledModel(classifier, detectors, *adapters_of(pooled, tasks), extensions, consolidated)
        _check_adapters(model, manifest)
    except (KeyError, ValueError) as error:
        raise BundleError(f"{bundle.path}: adapters of tasks: {one_line(error)}; {EXPORT_AGAIN}") from error
    return model


def _check_adapters(model: PooledModel, manifest: Manifest) -> None:
    assert manifest.trunk is not None
    vector = np.zeros((1, model.rotations, manifest.trunk.dim), np.float32)
    # Tasks that were taught later have none.
    for task, adapter in zip(manifest.tasks, model.adapters, strict=False):
        if (shape := adapter.logits(vector[:, : adapter.rotations]).shape) != (1, len(task.labels)):
            raise ValueError(f"task {task.task} has logits {shape}; needed (1, {len(task.labels)})")
    for _, group in model.consolidated:
        group.adapter.logits(vector[:, : group.adapter.rotations])


def _part(
    bundle: Bundle,
    name: str,
    arrays: Mapping[str, NDArray[Any]],
    read: Callable[[Mapping[str, NDArray[Any]]], Part],
    answer: Callable[[Part, NDArray[Any]], NDArray[np.float32]],
    classes: int,
) -> Part:
    """A part of the pooled model, read from the arrays of its file and tried on one vector."""
    assert bundle.manifest.trunk is not None
    where = bundle.path / name
    try:
        found = read(arrays)
        shape = answer(found, np.zeros((1, bundle.manifest.trunk.dim), np.float32)).shape
    except (KeyError, ValueError) as error:
        raise BundleError(f"{where}: {one_line(error)}; {EXPORT_AGAIN}") from error
    if shape != (1, classes):
        raise BundleError(f"{where}: outputs of {shape[1:]} numbers; needed ({classes},); {EXPORT_AGAIN}")
    return found


def _width(name: str, manifest: Manifest) -> int:
    """How many numbers an output has per image."""
    return len(manifest.tasks if name in ("scores", "p_task") else manifest.labels)


def _fits(shape: list[int | str | None], wanted: tuple[int, ...]) -> bool:
    """Whether a declared shape is a free batch of `wanted`; the self-test checks sizes that the graph leaves open."""
    if len(shape) != len(wanted) + 1 or isinstance(shape[0], int):
        return False
    return all(not isinstance(side, int) or side == want for side, want in zip(shape[1:], wanted, strict=True))
