"""From a bundle to answers: numpy, onnxruntime, BentoML and Pillow, never torch."""
