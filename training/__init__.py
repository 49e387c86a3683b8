"""Learns tasks from images, one after another, without forgetting earlier ones."""
