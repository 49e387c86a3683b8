"""Why a batch cannot run."""

from __future__ import annotations


class BatchError(Exception):
    """The message has what was given and what is allowed."""
