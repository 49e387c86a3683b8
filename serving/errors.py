"""Why a request gets no answer.

    400  the request cannot be taken apart
    404  no such file (command line only)
    413  too many bytes or too many pixels
    415  not a kind of thing that is read here
    422  well-formed, but its content cannot be used
    500  the model failed, not the caller

Each error has such a status, a short code for programs, and says what was got and what is allowed.
"""

from __future__ import annotations

from typing import ClassVar

LONGEST_ECHO = 200


class RequestError(Exception):
    """A request that gets no answer; the server goes on."""

    status: ClassVar[int]
    code: ClassVar[str]

    def __init__(self, problem: str, *, got: str, allowed: str) -> None:
        shown = got if len(got) <= LONGEST_ECHO else f"{got[:LONGEST_ECHO]}..."
        super().__init__(f"{problem}: got {shown}; allowed: {allowed}")
        self.got = shown
        self.allowed = allowed


class MalformedRequestError(RequestError):
    status, code = 400, "malformed_request"


class UnreadableFileError(RequestError):
    status, code = 404, "unreadable_file"


class TooManyBytesError(RequestError):
    status, code = 413, "too_many_bytes"


class TooManyPixelsError(RequestError):
    status, code = 413, "too_many_pixels"


class MediaTypeError(RequestError):
    status, code = 415, "unsupported_media_type"


class ImageFormatError(RequestError):
    status, code = 415, "unsupported_image"


class EmptyImageError(RequestError):
    status, code = 422, "empty_image"


class BrokenImageError(RequestError):
    status, code = 422, "broken_image"


class ParameterError(RequestError):
    status, code = 422, "bad_parameter"


class OutputError(RequestError):
    status, code = 500, "model_failed"
