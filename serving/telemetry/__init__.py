"""Metrics and logs."""

import logging

log = logging.getLogger("bentoml.openworld")
"""Below BentoML's logger, which a server shows."""
