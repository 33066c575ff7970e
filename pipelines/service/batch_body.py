"""What clients send to make a batch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from pipelines.service.body import Body

MAX_METADATA = 16


class ExpiresAfter(Body):
    anchor: str
    seconds: int


class BatchBody(Body):
    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions"]
    completion_window: Literal["24h"]
    metadata: (
        Annotated[
            dict[
                Annotated[str, StringConstraints(max_length=64)],
                Annotated[str, StringConstraints(max_length=512)],
            ],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None
