"""A bundle with a session that runs it, on the GPU where that truly works."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle import INPUT_NAME, Bundle, Graph, Manifest, load_bundle
from serving.decision import FEATURES, OUTPUT_NAMES, Verdicts, decide
from serving.errors import OutputError
from serving.layout import GOLDEN, BundleError, graph_name
from serving.machine import nvidia_visible, wants_cuda
from serving.settings import PRECISION_CHOICES, PRECISION_VARIABLE, PROVIDER_CHOICES, PROVIDER_VARIABLE

if TYPE_CHECKING:
    import onnxruntime as ort

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

GOLDEN_TOLERANCE = {"fp32": 1e-3, "int8": 1e-3, "fp16": 2e-2}
"""|got - wanted| may be this times 1 + |wanted|: room for another order of sums on a GPU, not for TF32.

In half precision every sum is rounded to 5e-4 of itself, and a GPU rounds others than the CPU that gave the answers.
"""

log = logging.getLogger("bentoml.openworld")
"""Below BentoML's logger, which is the one that a server shows."""


FASTEST = {CUDA: ("fp16", "fp32", "int8"), CPU: ("int8", "fp32", "fp16")}
"""Which of a bundle's precisions to take on which provider: the first of these that it has."""


SPIN_MICROSECONDS = 1000
"""Longer than it takes to come to the next layer, and little beside a run that is worth several threads."""


class ProviderError(Exception):
    """The provider that was asked for cannot be had; the message says why."""


@dataclass(frozen=True)
class Model:
    """A bundle that is ready to answer."""

    bundle: Bundle
    precision: str
    session: ort.InferenceSession

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        provider: str | None = None,
        precision: str | None = None,
        threads: int = 0,
        alpha: float | None = None,
    ) -> Model:
        """Read a bundle and open it on `provider` (auto, cuda, cpu) in `precision` (auto or one that it has).

        What is not given of these two is as the environment says. `threads` run the graph on the CPU; 0 leaves their
        number to onnxruntime. `alpha` takes the place of the bundle's own.
        """
        choice = provider or os.environ.get(PROVIDER_VARIABLE, "auto")
        if choice not in PROVIDER_CHOICES:
            raise ProviderError(f"{PROVIDER_VARIABLE} is {choice!r}; allowed: {', '.join(PROVIDER_CHOICES)}")
        wanted = precision or os.environ.get(PRECISION_VARIABLE, "auto")
        if wanted not in PRECISION_CHOICES:
            raise ProviderError(f"{PRECISION_VARIABLE} is {wanted!r}; allowed: {', '.join(PRECISION_CHOICES)}")
        bundle = load_bundle(path)
        if alpha is not None:
            bundle = replace(bundle, rule=bundle.rule.model_copy(update={"alpha": alpha}))
        model = _open(bundle, choice, wanted, threads)
        _check_signature(model)
        manifest = bundle.manifest
        log.info(
            "%s %s from %s runs in %s on %s",
            manifest.name,
            manifest.version,
            bundle.path,
            model.precision,
            model.provider,
        )
        return model

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @property
    def provider(self) -> str:
        """What really runs; a session may have fallen back from what it was asked for."""
        return str(self.session.get_providers()[0])

    def run(self, pixels: NDArray[np.uint8], *, features: bool = False) -> dict[str, NDArray[np.float32]]:
        """Outputs of the graph for uint8 [batch, height, width, channels]; `features` are for those who keep images."""
        names = [*OUTPUT_NAMES, FEATURES] if features else list(OUTPUT_NAMES)
        return dict(zip(names, self.session.run(names, {INPUT_NAME: pixels}), strict=True))

    def predict(
        self, pixels: NDArray[np.uint8], *, alpha: float | None = None, given_task: int | None = None
    ) -> Verdicts:
        """Decide a batch."""
        outputs = self.run(pixels)
        for name, values in outputs.items():
            if not np.isfinite(values).all():
                raise OutputError(
                    "the network failed on this image", got=f"{name} not finite", allowed="finite numbers"
                )
        return decide(outputs, self.bundle.rule, alpha=alpha, given_task=given_task)

    def self_test(self) -> None:
        """Run the golden images; a BundleError says which output is not what it was at export."""
        golden = self.bundle.golden
        try:
            outputs = self.run(golden.pixels)
        except Exception as error:
            # onnxruntime's exceptions have no common base class of their own.
            raise BundleError(f"{self._graph}: does not run on {self.provider}: {_one_line(error)}") from error
        for name in OUTPUT_NAMES:
            self._compare(name, outputs[name], golden.outputs[self.precision][name])

    def _compare(self, name: str, got: NDArray[Any], wanted: NDArray[Any]) -> None:
        where = f"{self._graph}: {name} of the images in {GOLDEN} on {self.provider}"
        shape = (len(self.bundle.golden.pixels), _width(name, self.manifest))
        if got.shape != shape or wanted.shape != shape:
            raise BundleError(f"{where}: shape {got.shape}, recorded {wanted.shape}; needed {shape}")
        if not (np.isfinite(got).all() and np.isfinite(wanted).all()):
            raise BundleError(f"{where}: not all finite; only finite numbers can be decided on")
        difference = np.abs(got.astype(np.float64) - wanted)
        allowed = GOLDEN_TOLERANCE[self.precision] * (1 + np.abs(wanted))
        worst = np.unravel_index(int((difference - allowed).argmax()), shape)
        if difference[worst] > allowed[worst]:
            raise BundleError(
                f"{where}: got {got[worst]:.6g} where {wanted[worst]:.6g} was recorded; "
                f"difference {difference[worst]:.2g} > {allowed[worst]:.2g}"
            )

    @property
    def _graph(self) -> Path:
        return self.bundle.path / graph_name(self.precision)


def _width(name: str, manifest: Manifest) -> int:
    """How many numbers an image gets in an output."""
    return len(manifest.tasks if name in ("scores", "p_task") else manifest.labels)


def _open(bundle: Bundle, choice: str, wanted: str, threads: int) -> Model:
    if wants_cuda(choice):
        precision = _precision(bundle, CUDA, wanted)
        try:
            return Model(bundle, precision, _cuda_session(bundle, precision, threads))
        except ProviderError as error:
            if choice == "cuda":
                raise
            log.warning("%s; the CPU is used", error)
    precision = _precision(bundle, CPU, wanted)
    return Model(bundle, precision, _cpu_session(bundle, precision, threads))


def _precision(bundle: Bundle, provider: str, wanted: str) -> str:
    """The precision that was asked for, or the fastest that the bundle has for the provider."""
    held = bundle.manifest.precisions
    if wanted == "auto":
        return next((precision for precision in FASTEST[provider] if precision in held), held[0])
    if wanted not in held:
        raise BundleError(f"{bundle.path}: {PRECISION_VARIABLE} is {wanted!r}; the bundle has {', '.join(held)}")
    return wanted


def _cuda_session(bundle: Bundle, precision: str, threads: int) -> ort.InferenceSession:
    """A session that really runs on CUDA, or a ProviderError with the reason."""
    import onnxruntime as ort

    with contextlib.redirect_stdout(sys.stderr):
        ort.preload_dlls()
    # TF32 would change the third digit, and with it what was measured before export.
    asked = [(CUDA, {"use_tf32": "0"}), CPU]
    try:
        session = open_session(bundle.graph(precision), session_options(threads), asked)
        found = session.get_providers()[0]
        if found == CUDA:
            # Opening proves little: an unsupported or a full device fails at its first run.
            session.run(None, {INPUT_NAME: bundle.golden.pixels[:1]})
            return session
        reason = f"onnxruntime fell back to {found}, and printed why"
    except BundleError:
        raise
    except Exception as error:
        reason = _one_line(error)
    device = "" if nvidia_visible() else " (no NVIDIA device is visible)"
    raise ProviderError(f"CUDA does not work here{device}: {reason}")


def _cpu_session(bundle: Bundle, precision: str, threads: int) -> ort.InferenceSession:
    graph = bundle.graph(precision)
    try:
        return open_session(graph, session_options(threads), [CPU])
    except Exception as error:
        where = bundle.path / graph_name(precision)
        raise BundleError(f"{where}: onnxruntime cannot open it: {_one_line(error)}") from error


def open_session(graph: Graph, options: ort.SessionOptions, providers: list[Any]) -> ort.InferenceSession:
    """A session of a graph whose weights lie beside it in memory."""
    import onnxruntime as ort

    if graph.parts:
        names, contents = list(graph.parts), list(graph.parts.values())
        options.add_external_initializers_from_files_in_memory(names, contents, [len(part) for part in contents])
    return ort.InferenceSession(graph.model, options, providers=providers)


def session_options(threads: int) -> ort.SessionOptions:
    """How onnxruntime runs a graph here; docs/export.md has what was measured."""
    # Imported here, because the process that only supervises the workers never needs it.
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    # From one layer to the next a thread spins; threads that spin for long take the cores from the server's others.
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_MICROSECONDS))
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return options


def _check_signature(model: Model) -> None:
    """The graph must take and give what the manifest and the rule say."""
    where = model.bundle.path / graph_name(model.precision)
    manifest, session = model.manifest, model.session
    inputs = {node.name: node for node in session.get_inputs()}
    outputs = {node.name: node for node in session.get_outputs()}
    if set(inputs) != {INPUT_NAME}:
        raise BundleError(f"{where}: inputs {sorted(inputs)}; needed [{INPUT_NAME!r}]")
    if not {*OUTPUT_NAMES, FEATURES} <= set(outputs):
        raise BundleError(f"{where}: outputs {sorted(outputs)}; needed {[*OUTPUT_NAMES, FEATURES]}")
    pixels = inputs[INPUT_NAME]
    if pixels.type != "tensor(uint8)" or not _fits(pixels.shape, manifest.image.shape):
        raise BundleError(
            f"{where}: {INPUT_NAME} is {pixels.type} {pixels.shape}; "
            f"needed tensor(uint8) ['batch', {', '.join(map(str, manifest.image.shape))}]"
        )
    _check_outputs(where, outputs, manifest)


def _check_outputs(where: Path, outputs: Mapping[str, Any], manifest: Manifest) -> None:
    for name in OUTPUT_NAMES:
        width = _width(name, manifest)
        if not _fits(outputs[name].shape, (width,)):
            raise BundleError(f"{where}: {name} is {outputs[name].shape}; needed ['batch', {width}]")


def _fits(shape: list[int | str | None], wanted: tuple[int, ...]) -> bool:
    """Whether a declared shape is a free batch of `wanted`; what the graph leaves open is settled by the self-test."""
    if len(shape) != len(wanted) + 1 or isinstance(shape[0], int):
        return False
    return all(not isinstance(side, int) or side == want for side, want in zip(shape[1:], wanted, strict=True))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
