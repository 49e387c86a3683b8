"""The errors that a request can be answered with.

Every error is an HTTP exception with a status, a short code for programs, and a message with what was received
and what is allowed. The docstring of a class describes it in the API document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from starlette.exceptions import HTTPException

from serving.bundle.errors import ImageError

MAX_ECHO = 200


def shortened(text: str) -> str:
    """Text from a caller, cut to a length that suits a response or a log line."""
    return text if len(text) <= MAX_ECHO else f"{text[:MAX_ECHO]}..."


class RequestError(HTTPException):
    """The request is not answered; the server goes on."""

    status: ClassVar[int]
    code: ClassVar[str]
    default_headers: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, *, status: int, code: str) -> None:
        cls.status, cls.code = status, code

    def __init__(self, problem: str, *, got: str, allowed: str, headers: Mapping[str, str] | None = None) -> None:
        self.got = shortened(got)
        self.allowed = allowed
        self.message = f"{problem}: got {self.got}; allowed: {allowed}"
        super().__init__(self.status, self.message, dict(headers or self.default_headers))

    def __str__(self) -> str:
        return self.message

    def without_traceback(self) -> Self:
        """The error without references to the frames that raised it.

        Frames hold the whole request and may lead back to their error. Such cycles are collected rarely, and each of
        them would keep an image with all its pixels in memory.
        """
        self.__traceback__ = self.__cause__ = self.__context__ = None
        return self


class MalformedRequestError(RequestError, status=400, code="malformed_request"):
    """the request cannot be parsed"""


class UnauthorizedError(RequestError, status=401, code="unauthorized"):
    """no valid API key; only servers with a key ask for one"""

    default_headers: ClassVar = {"www-authenticate": "Bearer"}


class AdminTokenError(UnauthorizedError, status=401, code="unauthorized"):
    """no valid admin token"""

    # Makes a browser ask for the token.
    default_headers: ClassVar = {"www-authenticate": 'Basic realm="openworld"'}


class AdminOffError(RequestError, status=403, code="admin_off"):
    """the server has no admin token"""


class CrossSiteError(RequestError, status=403, code="cross_site"):
    """a page of another site asked for a change"""


class PageError(RequestError, status=404, code="not_found"):
    """no such page"""


class NoSuchItemError(RequestError, status=404, code="no_such_item"):
    """no such image or group in the quarantine"""


class UnreadableFileError(RequestError, status=404, code="unreadable_file"):
    """the file cannot be read (command line)"""


class MethodError(RequestError, status=405, code="method_not_allowed"):
    """the page takes another method"""


class SwapError(RequestError, status=409, code="swap_failed"):
    """the workers cannot swap their bundle, although the bundle itself may be good"""


class QuarantineOffError(RequestError, status=409, code="quarantine_off"):
    """the server has no quarantine"""


class AlreadyLearnedError(RequestError, status=409, code="already_learned"):
    """a model has learned the label, so it cannot be changed"""


class TeachOffError(RequestError, status=409, code="teach_off"):
    """this server cannot be taught"""


class TeachBusyError(RequestError, status=409, code="teach_busy"):
    """another job is running"""


class TeachChangedError(RequestError, status=409, code="teach_changed"):
    """another version is served by now"""


class NothingToLearnError(RequestError, status=409, code="nothing_to_learn"):
    """the model knows everything that is labelled"""


class GateError(RequestError, status=409, code="gate_objects"):
    """earlier classes would lose too much"""


class JobStateError(RequestError, status=409, code="bad_state"):
    """the job is not in a state that allows this"""


class ClassExistsError(RequestError, status=409, code="class_exists"):
    """the class exists"""


class TooManyBytesError(RequestError, status=413, code="too_many_bytes"):
    """too many bytes"""


class TooManyPixelsError(RequestError, status=413, code="too_many_pixels"):
    """too many pixels"""


class TooManyImagesError(RequestError, status=413, code="too_many_images"):
    """too many images"""


class MediaTypeError(RequestError, status=415, code="unsupported_media_type"):
    """a content type that is not accepted here"""


class ImageFormatError(RequestError, status=415, code="unsupported_image"):
    """not an image of a supported format"""


class EmptyImageError(RequestError, status=422, code="empty_image"):
    """the image is empty"""


class BrokenImageError(RequestError, status=422, code="broken_image"):
    """the image is damaged"""


class ParameterError(RequestError, status=422, code="bad_parameter"):
    """a parameter is unknown or out of range"""


class BadLabelError(RequestError, status=422, code="bad_label"):
    """the label cannot be used"""


class BundleRefusedError(RequestError, status=422, code="bundle_refused"):
    """the bundle is refused; every worker keeps serving the previous one"""


class ClientGoneError(RequestError, status=499, code="client_gone"):
    """the client closed the connection; the status is only for the log"""


class OutputError(RequestError, status=500, code="model_failed"):
    """the network produced NaN or infinity for this image"""


class ServerError(RequestError, status=500, code="server_failed"):
    """the server failed; its log has the details"""


class BusyError(RequestError, status=503, code="busy"):
    """too much to do; send the same request again after Retry-After seconds"""

    def __init__(self, problem: str, *, got: str, allowed: str, retry_after: int = 1) -> None:
        super().__init__(problem, got=got, allowed=allowed, headers={"retry-after": str(retry_after)})


class QuarantineAwayError(RequestError, status=503, code="quarantine_unavailable"):
    """the quarantine is unavailable; send the same request again after Retry-After seconds"""

    default_headers: ClassVar = {"retry-after": "5"}


class DeadlineError(RequestError, status=504, code="deadline_exceeded"):
    """no answer before the deadline"""


BY_CODE: dict[str, type[RequestError]] = {error.code: error for error in RequestError.__subclasses__()}


def refused_image(error: ImageError) -> RequestError:
    """The response to an image that cannot be answered: the same code and text, with an HTTP status."""
    return BY_CODE[error.code](error.problem, got=error.got, allowed=error.allowed)
