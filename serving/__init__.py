"""From a bundle to answers: numpy, onnxruntime, BentoML and Pillow, never torch."""

import os

# onnxruntime looks at this when it is first imported: what a server sees is nobody else's business.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
