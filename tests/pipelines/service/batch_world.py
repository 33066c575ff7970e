"""A service with files and batches over a root that outlives it, and a way to wait for a batch."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai

from dflash_engine.config import EngineConfig
from pipelines.service.app import create_app
from pipelines.service.batches import Batches, open_batches
from pipelines.service.batches_config import BatchesConfig
from pipelines.service.config import ServiceConfig
from pipelines.service.local import open_local, served_model, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MODEL = "fake"
DAY_S = 24 * 3600
# Nothing in these tests waits for a poll.
NEVER_S = 600.0


@dataclass
class Clock:
    now: float = field(default_factory=time.time)

    def __call__(self) -> float:
        return self.now


@dataclass
class BatchWorld:
    url: str
    batches: Batches
    http: httpx2.Client
    changed: threading.Condition = field(default_factory=threading.Condition)
    """Notified after every change of a batch."""

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=self.http)

    def until(self, api: openai.OpenAI, batch_id: str, *statuses: str, timeout_s: float = 60) -> Any:
        """The batch once it has one of the statuses."""
        with self.changed:
            found: list[Any] = []

            def there() -> bool:
                found.append(api.batches.retrieve(batch_id))
                return found[-1].status in statuses

            assert self.changed.wait_for(there, timeout=timeout_s), found[-1]
            return found[-1]

    def watch(self) -> None:
        update = self.batches.batches.update

        def told(key, change):
            batch = update(key, change)
            with self.changed:
                self.changed.notify_all()
            return batch

        setattr(self.batches.batches, "update", told)  # noqa: B010


@contextmanager
def batch_world(
    root: Path | str,
    submitter=None,
    *,
    clock=time.time,
    service=None,
    engine: EngineConfig | None = None,
    **settings,
):
    """A service with an engine of its own; `settings` are those of its batches."""
    values = {"root": str(root), "job": Path("none.yaml"), "poll_s": NEVER_S, **settings}
    config = ServiceConfig(batches=BatchesConfig(**values), **(service or {}))
    engine = engine or EngineConfig(model=MODEL)
    model = served_model(engine, config)
    batches = open_batches(config, model, submitter, clock)
    opened = open_local(engine)
    app = create_app(opened, model, config, batches=batches)
    with httpx2.Client(verify=False, timeout=60) as http, serving(app) as url:
        world = BatchWorld(url, batches, http)
        world.watch()
        yield world
    asyncio.run(opened.close())


def chat_line(custom_id: str, text: str, **body) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": CHAT,
        "body": {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 9, **body},
    }


def upload(api: openai.OpenAI, lines: list[Any] | bytes, name: str = "in.jsonl") -> str:
    """The id of a file of these lines."""
    data = (
        lines if isinstance(lines, bytes) else b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    )
    return api.files.create(file=(name, data), purpose="batch").id


def submit(api: openai.OpenAI, lines: list[Any] | bytes, endpoint: Any = CHAT, **fields) -> Any:
    """A batch of these lines."""
    return api.batches.create(
        input_file_id=upload(api, lines), endpoint=endpoint, completion_window="24h", **fields
    )


def lines_of(api: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a file; none where there is no file."""
    if file_id is None:
        return []
    return [json.loads(line) for line in api.files.content(file_id).text.splitlines()]


LINES = [chat_line(f"c{number}", f"question number {number}") for number in range(7)]


def by_custom_id(lines):
    return {line["custom_id"]: line for line in lines}


def check_answers(api: openai.OpenAI, batch: Any, lines: list[dict[str, Any]]) -> None:
    """Every line has the answer that the same request gets when it is sent alone."""
    found = by_custom_id(lines_of(api, batch.output_file_id))
    assert found.keys() == {line["custom_id"] for line in lines}
    for line in lines:
        alone = api.chat.completions.create(**line["body"])
        answer = found[line["custom_id"]]
        assert answer.keys() == {"id", "custom_id", "response", "error"}
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        body = openai.types.chat.ChatCompletion.model_validate(answer["response"]["body"])
        assert body.choices[0].message.content == alone.choices[0].message.content
        assert body.choices[0].finish_reason == alone.choices[0].finish_reason
        assert (body.model, body.object) == (alone.model, alone.object)
        assert body.usage.prompt_tokens == alone.usage.prompt_tokens
        assert body.usage.completion_tokens == alone.usage.completion_tokens
