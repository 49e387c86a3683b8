"""Every kind of unusable image has its HTTP status; code and texts are those of the bundle's own error."""

from __future__ import annotations

from typing import get_args

import pytest

from serving.bundle.errors import ImageError, ImageErrorCode
from serving.errors import refused_image

STATUS = {
    "empty_image": 422,
    "too_many_bytes": 413,
    "too_many_pixels": 413,
    "unsupported_image": 415,
    "broken_image": 422,
    "model_failed": 500,
}


@pytest.mark.parametrize("code", get_args(ImageErrorCode))
def test_an_image_error_becomes_an_http_error(code: ImageErrorCode) -> None:
    error = ImageError(code, "no image", got="0 bytes", allowed="1 to 10 bytes")
    refused = refused_image(error)
    assert (refused.status, refused.code) == (STATUS[code], code)
    assert str(refused) == str(error) == "no image: got 0 bytes; allowed: 1 to 10 bytes"
    assert (refused.got, refused.allowed) == ("0 bytes", "1 to 10 bytes")
