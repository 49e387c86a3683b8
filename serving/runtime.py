"""A bundle with a session that runs it, on the GPU where that truly works."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from serving.bundle import GOLDEN, GRAPH, INPUT_NAME, Bundle, BundleError, Manifest, load_bundle
from serving.decision import OUTPUT_NAMES, Verdicts, decide
from serving.errors import OutputError
from serving.machine import nvidia_visible, wants_cuda
from serving.settings import PROVIDER_CHOICES, PROVIDER_VARIABLE

if TYPE_CHECKING:
    import onnxruntime as ort

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

GOLDEN_RTOL = 1e-3
GOLDEN_ATOL = 1e-3
"""|got - wanted| may be GOLDEN_ATOL + GOLDEN_RTOL * |wanted|: room for another order of sums on a GPU, not for TF32."""

log = logging.getLogger("bentoml.openworld")
"""Below BentoML's logger, which is the one that a server shows."""


class ProviderError(Exception):
    """The provider that was asked for cannot be had; the message says why."""


@dataclass(frozen=True)
class Model:
    """A bundle that is ready to answer."""

    bundle: Bundle
    session: ort.InferenceSession

    @classmethod
    def load(cls, path: str | Path, *, provider: str | None = None, threads: int = 0) -> Model:
        """Read a bundle and open it on `provider` (auto, cuda, cpu), or on what the environment asks for.

        `threads` run the graph on the CPU; 0 leaves their number to onnxruntime.
        """
        choice = provider or os.environ.get(PROVIDER_VARIABLE, "auto")
        if choice not in PROVIDER_CHOICES:
            raise ProviderError(f"{PROVIDER_VARIABLE} is {choice!r}; allowed: {', '.join(PROVIDER_CHOICES)}")
        bundle = load_bundle(path)
        model = cls(bundle, _open(bundle, choice, threads))
        _check_signature(model)
        manifest = bundle.manifest
        log.info("%s %s from %s runs on %s", manifest.name, manifest.version, bundle.path, model.provider)
        return model

    @property
    def manifest(self) -> Manifest:
        return self.bundle.manifest

    @property
    def provider(self) -> str:
        """What really runs; a session may have fallen back from what it was asked for."""
        return str(self.session.get_providers()[0])

    def run(self, pixels: NDArray[np.uint8]) -> dict[str, NDArray[np.float32]]:
        """Outputs of the graph for uint8 [batch, height, width, channels]."""
        outputs = self.session.run(list(OUTPUT_NAMES), {INPUT_NAME: pixels})
        return dict(zip(OUTPUT_NAMES, outputs, strict=True))

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
            self._compare(name, outputs[name], golden.outputs[name])

    def _compare(self, name: str, got: NDArray[Any], wanted: NDArray[Any]) -> None:
        where = f"{self._graph}: {name} of the images in {GOLDEN} on {self.provider}"
        shape = (len(self.bundle.golden.pixels), len(self.manifest.labels))
        if got.shape != shape or wanted.shape != shape:
            raise BundleError(f"{where}: shape {got.shape}, recorded {wanted.shape}; needed {shape}")
        if not (np.isfinite(got).all() and np.isfinite(wanted).all()):
            raise BundleError(f"{where}: not all finite; only finite numbers can be decided on")
        difference = np.abs(got.astype(np.float64) - wanted)
        allowed = GOLDEN_ATOL + GOLDEN_RTOL * np.abs(wanted)
        worst = np.unravel_index(int((difference - allowed).argmax()), shape)
        if difference[worst] > allowed[worst]:
            raise BundleError(
                f"{where}: got {got[worst]:.6g} where {wanted[worst]:.6g} was recorded; "
                f"difference {difference[worst]:.2g} > {allowed[worst]:.2g}"
            )

    @property
    def _graph(self) -> Path:
        return self.bundle.path / GRAPH


def _open(bundle: Bundle, choice: str, threads: int) -> ort.InferenceSession:
    if not wants_cuda(choice):
        return _cpu_session(bundle, threads)
    try:
        return _cuda_session(bundle, threads)
    except ProviderError as error:
        if choice == "cuda":
            raise
        log.warning("%s; the CPU is used", error)
        return _cpu_session(bundle, threads)


def _cuda_session(bundle: Bundle, threads: int) -> ort.InferenceSession:
    """A session that really runs on CUDA, or a ProviderError with the reason."""
    import onnxruntime as ort

    with contextlib.redirect_stdout(sys.stderr):
        ort.preload_dlls()
    # TF32 would change the third digit, and with it what was measured before export.
    asked = [(CUDA, {"use_tf32": "0"}), CPU]
    try:
        session = ort.InferenceSession(bundle.graph, _options(threads), providers=asked)
        found = session.get_providers()[0]
        if found == CUDA:
            # Opening proves little: an unsupported or a full device fails at its first run.
            session.run(None, {INPUT_NAME: bundle.golden.pixels[:1]})
            return session
        reason = f"onnxruntime fell back to {found}, and printed why"
    except Exception as error:
        reason = _one_line(error)
    device = "" if nvidia_visible() else " (no NVIDIA device is visible)"
    raise ProviderError(f"CUDA does not work here{device}: {reason}")


def _cpu_session(bundle: Bundle, threads: int) -> ort.InferenceSession:
    import onnxruntime as ort

    try:
        return ort.InferenceSession(bundle.graph, _options(threads), providers=[CPU])
    except Exception as error:
        raise BundleError(f"{bundle.path / GRAPH}: onnxruntime cannot open it: {_one_line(error)}") from error


def _options(threads: int) -> ort.SessionOptions:
    # Imported here, because the process that only supervises the workers never needs it.
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    # Threads that spin while they wait take the cores from the server's other threads.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return options


def _check_signature(model: Model) -> None:
    """The graph must take and give what the manifest and the rule say."""
    where = model.bundle.path / GRAPH
    manifest, session = model.manifest, model.session
    inputs = {node.name: node for node in session.get_inputs()}
    outputs = {node.name: node for node in session.get_outputs()}
    if set(inputs) != {INPUT_NAME}:
        raise BundleError(f"{where}: inputs {sorted(inputs)}; needed [{INPUT_NAME!r}]")
    if not set(OUTPUT_NAMES) <= set(outputs):
        raise BundleError(f"{where}: outputs {sorted(outputs)}; needed {list(OUTPUT_NAMES)}")
    pixels = inputs[INPUT_NAME]
    if pixels.type != "tensor(uint8)" or not _fits(pixels.shape, manifest.image.shape):
        raise BundleError(
            f"{where}: {INPUT_NAME} is {pixels.type} {pixels.shape}; "
            f"needed tensor(uint8) ['batch', {', '.join(map(str, manifest.image.shape))}]"
        )
    _check_outputs(where, outputs, len(manifest.labels))


def _check_outputs(where: Path, outputs: Mapping[str, Any], classes: int) -> None:
    for name in OUTPUT_NAMES:
        if not _fits(outputs[name].shape, (classes,)):
            raise BundleError(f"{where}: {name} is {outputs[name].shape}; needed ['batch', {classes}]")


def _fits(shape: list[int | str | None], wanted: tuple[int, ...]) -> bool:
    """Whether a declared shape is a free batch of `wanted`; what the graph leaves open is settled by the self-test."""
    if len(shape) != len(wanted) + 1 or isinstance(shape[0], int):
        return False
    return all(not isinstance(side, int) or side == want for side, want in zip(shape[1:], wanted, strict=True))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
