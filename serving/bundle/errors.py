"""What can be wrong with a bundle, with a provider or with an image."""

from __future__ import annotations

from typing import Literal

ImageErrorCode = Literal[
    "empty_image", "too_many_bytes", "too_many_pixels", "unsupported_image", "broken_image", "model_failed"
]


class BundleError(Exception):
    """A bundle that must not be served; the message has its place and the reason."""


class ProviderError(Exception):
    """The requested execution provider cannot be used; the message has the reason."""


class ImageError(Exception):
    """An image that cannot be answered. `code` is for programs; the message is for people."""

    def __init__(self, code: ImageErrorCode, problem: str, *, got: str, allowed: str) -> None:
        super().__init__(f"{problem}: got {got}; allowed: {allowed}")
        self.code = code
        self.problem = problem
        self.got = got
        self.allowed = allowed
