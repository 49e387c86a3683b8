"""Why something cannot be taught."""

from __future__ import annotations


class TeachError(Exception):
    """Examples or a change that cannot be learned; the message has what was given and what is allowed."""
