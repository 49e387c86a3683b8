"""From images to a run: one task after another, none forgotten."""
