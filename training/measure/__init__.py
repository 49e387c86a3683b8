"""Metrics of a run, alternative decision rules, and the paper's theory."""
