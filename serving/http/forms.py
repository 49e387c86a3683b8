"""The files of a multipart form, parsed in memory: the disk may be read-only."""

from __future__ import annotations

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from serving.errors import MalformedRequestError, TooManyImagesError

MOST_TEXTS = 8
"""Text fields are refused with an explanation; parsing stops at a form that has more of them."""


def read_files(body: bytes, content_type: str, most: int) -> list[bytes]:
    """The contents of a form's files, in order; a form that holds anything else is refused."""
    boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
    if not boundary:
        raise MalformedRequestError(
            "form cannot be read", got="no boundary", allowed="multipart/form-data; boundary=..."
        )
    # The parser handles each in Python, so a body that consists of boundaries would take many seconds.
    if (boundaries := body.count(b"\n--" + boundary)) > most + MOST_TEXTS + 2:
        got, allowed = f"{boundaries} boundaries", f"up to {most} files"
        raise MalformedRequestError("form has too many parts", got=got, allowed=allowed)
    form = _Form(most)
    try:
        # An invalid boundary is refused before anything is parsed.
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": form.begin,
                "on_header_field": form.header_name,
                "on_header_value": form.header_value,
                "on_header_end": form.header_end,
                "on_part_data": form.data,
                "on_part_end": form.end,
                "on_end": form.finish,
            },
        )
        parser.write(body)
    except FormParserError as error:
        raise MalformedRequestError("form cannot be read", got=str(error), allowed="multipart/form-data") from None
    if not form.finished:
        raise MalformedRequestError("form is incomplete", got=f"{len(body)} bytes", allowed="a closing boundary")
    if form.texts:
        raise MalformedRequestError(
            "form must hold files and nothing else",
            got=f"{len(form.files)} files and {form.texts} text fields",
            allowed="files only; parameters go into the query string",
        )
    return form.files


class _Form:
    """The parser's callbacks; a part is a file if it has a file name."""

    def __init__(self, most: int) -> None:
        self.files: list[bytes] = []
        self.texts = 0
        self.finished = False
        self._most = most
        self.begin()

    def begin(self) -> None:
        self._is_file = False
        self._name = self._value = b""
        self._chunks: list[bytes] = []

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        if self._name.lower() == b"content-disposition":
            self._is_file = b"filename" in parse_options_header(self._value)[1]
        self._name = self._value = b""

    def data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._chunks.append(data[start:end])

    def end(self) -> None:
        if self._is_file:
            self.files.append(b"".join(self._chunks))
        else:
            self.texts += 1
        if len(self.files) > self._most:
            raise TooManyImagesError("too many images", got=f"more than {self._most}", allowed=f"1 to {self._most}")
        if self.texts > MOST_TEXTS:
            raise MalformedRequestError("form holds too much text", got=f"{self.texts} fields", allowed="files only")

    def finish(self) -> None:
        self.finished = True
