"""The only place that opens onnxruntime sessions."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from serving.bundle.errors import ProviderError
from serving.bundle.manifest import INPUT_NAME, Graph
from serving.bundle.providers import CPU, CUDA, nvidia_visible

if TYPE_CHECKING:
    import numpy as np
    import onnxruntime as ort
    from numpy.typing import NDArray

SPIN_MICROSECONDS = 1000
"""Longer than the pause between two layers, and short compared with a run that is worth several threads."""


def open_session(
    graph: Graph, options: ort.SessionOptions | None = None, providers: Sequence[Any] = (CPU,)
) -> ort.InferenceSession:
    """A session of a graph; its weights are passed as arrays in memory."""
    options = options or session_options()
    if graph.parts:
        names, contents = list(graph.parts), list(graph.parts.values())
        options.add_external_initializers_from_files_in_memory(names, contents, [len(part) for part in contents])
    return _onnxruntime().InferenceSession(graph.model, options, providers=list(providers))


def session_options(threads: int = 0) -> ort.SessionOptions:
    """The options of every session; docs/reports/export.md has the measurements. 0 threads: onnxruntime chooses."""
    options = _onnxruntime().SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    # Threads spin between two layers, but not for long: they would take the cores from the server's other threads.
    options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_MICROSECONDS))
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    return options


def open_cuda_session(graph: Graph, probe: NDArray[np.uint8], threads: int) -> ort.InferenceSession:
    """A session that demonstrably runs `probe` on CUDA; raises a ProviderError with the reason otherwise."""
    with contextlib.redirect_stdout(sys.stderr):
        _onnxruntime().preload_dlls()
    try:
        # TF32 would change the third digit, and with it the outputs that were measured before export.
        session = open_session(graph, session_options(threads), [(CUDA, {"use_tf32": "0"}), CPU])
        found = session.get_providers()[0]
        if found == CUDA:
            # Opening proves little: an unsupported or full device fails at its first run.
            session.run(None, {INPUT_NAME: probe})
            return session
        reason = f"onnxruntime fell back to {found}, and printed why"
    except Exception as error:
        reason = one_line(error)
    device = "" if nvidia_visible() else " (no NVIDIA device is visible)"
    raise ProviderError(f"CUDA does not work here{device}: {reason}")


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _onnxruntime() -> Any:
    """Imported at first use, because the process that only supervises workers never needs it."""
    # onnxruntime reads this when it is first imported.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    return onnxruntime
