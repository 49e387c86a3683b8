"""How tasks are kept apart: HAT's gates on units, supermasks on weights, one normalisation per task."""

from models.registry import Registry

MECHANISMS = Registry("method", {"hat": "models.masks.hat:Hat", "sup": "models.masks.supermask:Sup"})
"""`NetworkConfig.method` -> a subclass of models.mechanism.Mechanism."""
