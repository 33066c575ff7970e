"""`multipart/form-data` (RFC 7578) as it arrives: fields and files in pieces, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from pipelines.service.errors import ApiError, invalid


@dataclass(frozen=True, slots=True)
class PartBegin:
    """A part starts; `filename` is None for a plain field."""

    name: str
    filename: str | None


@dataclass(frozen=True, slots=True)
class PartData:
    data: bytes


@dataclass(frozen=True, slots=True)
class PartEnd:
    pass


Event = PartBegin | PartData | PartEnd


def boundary_of(content_type: str) -> bytes:
    """The boundary that a Content-Type names. Raises `ApiError` 400."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise invalid("send the file as multipart/form-data with a boundary", code="invalid_multipart")
    return boundary


class Form:
    """Bytes of a body to events. Raises `ApiError` 400 for what is no form."""

    def __init__(self, boundary: bytes) -> None:
        self._events: list[Event] = []
        self._header = (bytearray(), bytearray())
        self._disposition: bytes | None = None
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._end_headers,
                "on_part_data": lambda data, start, end: self._events.append(PartData(data[start:end])),
                "on_part_end": lambda: self._events.append(PartEnd()),
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> Iterator[Event]:
        """Events of what has come so far."""
        if self._ended:
            return  # what comes behind the last boundary is nobody's
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise _malformed(str(error)) from error
        events, self._events = self._events, []
        yield from events

    def close(self) -> None:
        """Raises `ApiError` 400 where the body stopped before its end."""
        if not self._ended:
            raise _malformed("the body ends before its last boundary")

    def _begin(self) -> None:
        self._disposition = None

    def _end_header(self) -> None:
        name, value = map(bytes, self._header)
        if name.lower() == b"content-disposition":
            self._disposition = value
        for side in self._header:
            side.clear()

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data":
            raise _malformed("a part without Content-Disposition: form-data")
        if not options.get(b"name"):
            raise _malformed("a part without a name")
        filename = options.get(b"filename")
        self._events.append(PartBegin(_text(options[b"name"]), None if filename is None else _text(filename)))

    def _end(self) -> None:
        self._ended = True


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _malformed(what: str) -> ApiError:
    return invalid(f"the body is not valid multipart/form-data: {what}", code="invalid_multipart")
