"""From a bundle to answers, with numpy, onnxruntime, BentoML and Pillow; never with torch."""
