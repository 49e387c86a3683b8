"""What a run writes to disk: checkpoints, history and experiment trackers."""
