"""From image bytes to an answer inside a worker: queue, batches, answers."""
