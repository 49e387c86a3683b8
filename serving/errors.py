"""Why a request gets no answer.

    400  the request cannot be taken apart
    401  no valid API key, or no valid admin token
    403  the admin parts are off, or another site's page asked for a change
    404  no such page, no such item in the quarantine, or no such file (command line)
    405  the page takes another method
    409  the workers cannot swap their bundle; no quarantine to label; a label that was learned already
    413  too many bytes, pixels or images
    415  not a kind of thing that is read here
    422  well-formed, but its content cannot be used
    431  too many bytes of headers
    500  the model or the server failed, not the caller
    503  too much to do; the same request may be sent again after Retry-After seconds
    504  not answered before the deadline

Each error has such a status, a short code for programs, and says what was got and what is allowed.
"""

from __future__ import annotations

from typing import ClassVar, Self

LONGEST_ECHO = 200


def shortened(text: str) -> str:
    """What a caller made up, for an answer or a log."""
    return text if len(text) <= LONGEST_ECHO else f"{text[:LONGEST_ECHO]}..."


class RequestError(Exception):
    """A request that gets no answer; the server goes on."""

    status: ClassVar[int]
    code: ClassVar[str]

    def __init__(self, problem: str, *, got: str, allowed: str) -> None:
        shown = shortened(got)
        super().__init__(f"{problem}: got {shown}; allowed: {allowed}")
        self.got = shown
        self.allowed = allowed

    @property
    def headers(self) -> dict[str, str]:
        """What the response says beside its body."""
        return {}

    def alone(self) -> Self:
        """Without the way that it came: frames hold all of a request and may lead back to its error.

        A worker hardly ever looks for such cycles, and each would keep an image with all its pixels.
        """
        self.__traceback__ = self.__cause__ = self.__context__ = None
        return self


class MalformedRequestError(RequestError):
    status, code = 400, "malformed_request"


class UnauthorizedError(RequestError):
    status, code = 401, "unauthorized"

    @property
    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class AdminTokenError(UnauthorizedError):
    @property
    def headers(self) -> dict[str, str]:
        # What makes a browser ask for it.
        return {"www-authenticate": 'Basic realm="openworld"'}


class AdminOffError(RequestError):
    status, code = 403, "admin_off"


class CrossSiteError(RequestError):
    status, code = 403, "cross_site"


class PageError(RequestError):
    status, code = 404, "not_found"


class NoSuchItemError(RequestError):
    """Neither an item nor a group of the quarantine has that number (any more)."""

    status, code = 404, "no_such_item"


class UnreadableFileError(RequestError):
    status, code = 404, "unreadable_file"


class MethodError(RequestError):
    status, code = 405, "method_not_allowed"

    @property
    def headers(self) -> dict[str, str]:
        return {"allow": self.allowed}


class SwapError(RequestError):
    """Nothing is wrong with the bundle itself."""

    status, code = 409, "swap_failed"


class QuarantineOffError(RequestError):
    status, code = 409, "quarantine_off"


class AlreadyLearnedError(RequestError):
    """The label is in a model, and no longer to be changed."""

    status, code = 409, "already_learned"


class TooManyBytesError(RequestError):
    status, code = 413, "too_many_bytes"


class TooManyPixelsError(RequestError):
    status, code = 413, "too_many_pixels"


class TooManyImagesError(RequestError):
    status, code = 413, "too_many_images"


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


class BadLabelError(RequestError):
    status, code = 422, "bad_label"


class BundleRefusedError(RequestError):
    """What was served goes on being served."""

    status, code = 422, "bundle_refused"


class ClientGoneError(RequestError):
    """Nobody is left to read the answer; the status is for the log alone."""

    status, code = 499, "client_gone"


class HeadTooLargeError(RequestError):
    """There is no request yet, nor whoever would count it."""

    status, code = 431, "head_too_large"


class OutputError(RequestError):
    status, code = 500, "model_failed"


class ServerError(RequestError):
    """A mistake of ours; the log has the details."""

    status, code = 500, "server_failed"


class BusyError(RequestError):
    status, code = 503, "busy"

    def __init__(self, problem: str, *, got: str, allowed: str, retry_after: int) -> None:
        super().__init__(problem, got=got, allowed=allowed)
        self.retry_after = retry_after

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": str(self.retry_after)}


class QuarantineAwayError(RequestError):
    """Its database or the place of its images; predictions go on."""

    status, code = 503, "quarantine_unavailable"

    @property
    def headers(self) -> dict[str, str]:
        return {"retry-after": "5"}


class DeadlineError(RequestError):
    status, code = 504, "deadline_exceeded"
