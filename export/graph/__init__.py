"""From a baked task to ONNX graphs."""
