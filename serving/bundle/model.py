"""A bundle with a session that runs it, on the GPU if that demonstrably works."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle.decision import FEATURES, OUTPUT_NAMES, Verdicts, complete, decide
from serving.bundle.errors import BundleError, ImageError, ProviderError
from serving.bundle.layout import GOLDEN, POOLED, detector_name
from serving.bundle.manifest import EXPORT_AGAIN, INPUT_NAME, Bundle, Manifest, load_bundle
from serving.bundle.pooled import PooledClassifier
from serving.bundle.pooled_model import PooledModel
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

log = logging.getLogger("bentoml.openworld")
"""Below BentoML's logger, which a server shows."""


@dataclass(frozen=True)
class Model:
    """A bundle that is ready to answer."""

    bundle: Bundle
    precision: str
    session: ort.InferenceSession
    pooled: PooledModel | None = None
    """With a trunk: what classifies its encoded vectors."""

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        provider: str = "auto",
        precision: str = AUTO,
        threads: int = 0,
        alpha: float | None = None,
    ) -> Model:
        """Read a bundle and open it on `provider` (auto, cuda, cpu) in `precision` (auto or one that it has).

        `threads` run the graph on the CPU; 0 leaves their number to onnxruntime. `alpha` replaces the bundle's own.
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
            (encoded,) = self.session.run([ENCODED], {INPUT_NAME: pixels})
            outputs = complete(self.pooled.outputs(encoded), self.bundle.rule)
            return {**outputs, FEATURES: encoded} if features else outputs
        names = [*OUTPUT_NAMES, FEATURES] if features else list(OUTPUT_NAMES)
        return dict(zip(names, self.session.run(names, {INPUT_NAME: pixels}), strict=True))

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
        allowed = PRECISIONS[self.precision].golden_tolerance * (1 + np.abs(wanted))
        worst = np.unravel_index(int((difference - allowed).argmax()), shape)
        if difference[worst] > allowed[worst]:
            raise BundleError(
                f"{where}: got {got[worst]:.6g} where {wanted[worst]:.6g} was recorded; "
                f"difference {difference[worst]:.2g} > {allowed[worst]:.2g}"
            )

    @property
    def _graph(self) -> Path:
        return self.bundle.path / self.manifest.graph_file(self.precision)


def _open(bundle: Bundle, provider: str, precision: str, threads: int) -> Model:
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


def _open_on_cpu(bundle: Bundle, precision: str, threads: int) -> Model:
    graph = bundle.graph(precision)
    try:
        session = open_session(graph, session_options(threads))
    except Exception as error:
        where = bundle.path / bundle.manifest.graph_file(precision)
        raise BundleError(f"{where}: onnxruntime cannot open it: {one_line(error)}") from error
    return _checked(bundle, precision, session)


def _fastest(models: Sequence[Model]) -> Model:
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


def seconds_per_image(models: Sequence[Model]) -> list[float]:
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


def _checked(bundle: Bundle, precision: str, session: ort.InferenceSession) -> Model:
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
    return Model(bundle, precision, session, None if trunk is None else load_pooled(bundle))


def load_pooled(bundle: Bundle) -> PooledModel:
    """What classifies the vectors of a bundle with a trunk, if it fits the trunk and the tasks."""
    tasks = bundle.manifest.tasks
    detectors = (_classifier(bundle, detector_name(task.task), len(task.labels)) for task in tasks)
    return PooledModel(_classifier(bundle, POOLED, len(bundle.manifest.labels)), tuple(detectors))


def _classifier(bundle: Bundle, name: str, classes: int) -> PooledClassifier:
    assert bundle.manifest.trunk is not None
    where, arrays, dim = bundle.path / name, bundle.arrays(name), bundle.manifest.trunk.dim
    try:
        found = PooledClassifier.from_arrays(arrays)
        outputs = found.outputs(np.zeros((1, dim), np.float32))
    except (KeyError, ValueError) as error:
        raise BundleError(f"{where}: {one_line(error)}; {EXPORT_AGAIN}") from error
    if any(values.shape != (1, classes) for values in outputs.values()):
        shapes = {name: values.shape[1:] for name, values in outputs.items()}
        raise BundleError(f"{where}: outputs {shapes}; needed ({classes},) each; {EXPORT_AGAIN}")
    return found


def _width(name: str, manifest: Manifest) -> int:
    """How many numbers an output has per image."""
    return len(manifest.tasks if name in ("scores", "p_task") else manifest.labels)


def _fits(shape: list[int | str | None], wanted: tuple[int, ...]) -> bool:
    """Whether a declared shape is a free batch of `wanted`; the self-test checks sizes that the graph leaves open."""
    if len(shape) != len(wanted) + 1 or isinstance(shape[0], int):
        return False
    return all(not isinstance(side, int) or side == want for side, want in zip(shape[1:], wanted, strict=True))
