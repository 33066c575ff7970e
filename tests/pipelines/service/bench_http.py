"""What HTTP costs: the service over an engine that answers at once, beside a bare FastAPI app.

    .venv/bin/python -m tests.pipelines.service.bench_http --rounds 5

The bare app reads the JSON of the request and sends the bytes that the service has sent, event by event. Each
server is a process of its own with the same uvicorn; this one is their client, over connections that stay
open. They take turns, and so does who goes first. The CPU time of a server is told beside that of the clock,
which other work on the machine makes longer. Figures are medians over the rounds; the last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp

from dflash_engine.config import EngineConfig
from pipelines.service.app import create_app
from pipelines.service.config import ServiceConfig
from pipelines.service.local import open_local, served_model, serving

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SERVERS = ("bare", "service")


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of one kind, all of which get the same answer."""

    name: str
    num_tokens: int
    stream: bool
    at_once: int
    num_requests: int
    path: str = "/v1/chat/completions"

    def request(self) -> bytes:
        ask: dict[str, Any] = {
            "model": "fake",
            "messages": [{"role": "user", "content": "Where is my order?"}],
            "max_tokens": self.num_tokens,
            "stream": self.stream,
            "temperature": 0,
        }
        if self.path == "/v1/chat/completions":
            ask["ignore_eos"] = True
        body = json.dumps(ask).encode()
        head = f"POST {self.path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@dataclass(frozen=True, slots=True)
class Took:
    """Of one request, on average."""

    wall_s: float
    cpu_s: float


def cases(scale: float) -> list[Case]:
    def count(most: int) -> int:
        return max(32, int(most * scale))

    return [
        Case("8 tokens, 1 at once", 8, False, 1, count(600)),
        Case("8 tokens, 32 at once", 8, False, 32, count(2000)),
        Case("1000 tokens streamed, 1 at once", 1000, True, 1, count(32)),
        Case("1000 tokens streamed, 32 at once", 1000, True, 32, count(64)),
    ]


def service() -> ASGIApp:
    engine, config = EngineConfig(model="fake", max_num_seqs=64), ServiceConfig()
    return create_app(open_local(engine), served_model(engine, config), config)


def bare(recorded: dict[tuple[bool, int], list[bytes]]) -> ASGIApp:
    """Sends what was recorded for (stream, max_tokens)."""
    app = FastAPI()

    @app.post("/v1/chat/completions", response_model=None)
    async def answer(request: Request) -> Response:
        ask = await request.json()
        events = recorded[ask["stream"], ask["max_tokens"]]
        if not ask["stream"]:
            return Response(events[0], media_type="application/json")

        async def stream() -> AsyncIterator[bytes]:
            for event in events:
                yield event

        return StreamingResponse(stream(), media_type="text/event-stream")

    return app


def serve(kind: str, recorded: dict[tuple[bool, int], list[bytes]], pipe: Connection) -> None:
    with serving(service() if kind == "service" else bare(recorded)) as url:
        pipe.send(url)
        pipe.recv()


@contextmanager
def server(kind: str, recorded: dict[tuple[bool, int], list[bytes]]) -> Iterator[tuple[str, int]]:
    """URL and process id of a server."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(kind, recorded, theirs))
    process.start()
    try:
        yield ours.recv(), process.pid
    finally:
        ours.send("end")
        process.join()


async def answer_of(reader: asyncio.StreamReader) -> bytes:
    """The body of the next answer, as it was sent."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return await reader.readexactly(int(line.partition(b":")[2]))
    return await reader.readuntil(b"\r\n0\r\n\r\n")


async def asked(url: str, case: Case) -> list[bytes]:
    """All answers of a case."""
    request, left = case.request(), iter(range(case.num_requests))

    async def client() -> list[bytes]:
        address = urlsplit(url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=16 << 20)
        bodies = []
        for _ in left:
            writer.write(request)
            bodies.append(await answer_of(reader))
        writer.close()
        return bodies

    return list(chain.from_iterable(await asyncio.gather(*(client() for _ in range(case.at_once)))))


def events_of(body: bytes, case: Case) -> list[bytes]:
    """What each write of the server held: chunks of a stream, or the whole."""
    if not case.stream:
        return [body]
    events = []
    while body:
        size, _, body = body.partition(b"\r\n")
        events.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return [event for event in events if event]


def cpu_s(pid: int) -> float:
    """Seconds of CPU of a process so far, system's included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def took(url: str, pid: int, case: Case) -> Took:
    before_s, began_s = cpu_s(pid), time.perf_counter()
    bodies = asyncio.run(asked(url, case))
    wall_s = time.perf_counter() - began_s
    assert len(bodies) == case.num_requests
    return Took(wall_s / case.num_requests, (cpu_s(pid) - before_s) / case.num_requests)


def recording(url: str, todo: list[Case]) -> dict[tuple[bool, int], list[bytes]]:
    """What the service sends for each kind of request."""
    made = {}
    for case in todo:
        one = Case(case.name, case.num_tokens, case.stream, 1, 1, case.path)
        (body,) = asyncio.run(asked(url, one))
        made[case.stream, case.num_tokens] = events_of(body, case)
    return made


def compare(todo: list[Case], rounds: int) -> dict[str, dict[str, list[Took]]]:
    """All cases at both servers, by turns; the first round only warms up."""
    times: dict[str, dict[str, list[Took]]] = {case.name: {kind: [] for kind in SERVERS} for case in todo}
    with ExitStack() as stack:
        ours = stack.enter_context(server("service", {}))
        recorded = recording(ours[0], todo)
        places = {"service": ours, "bare": stack.enter_context(server("bare", recorded))}
        for number in range(rounds + 1):
            for case in todo:
                for kind in SERVERS if number % 2 else SERVERS[::-1]:
                    made = took(*places[kind], case)
                    if number:
                        times[case.name][kind].append(made)
    return times


def row(case: Case, times: dict[str, list[Took]]) -> dict[str, Any]:
    """Medians; the extra time of the service is for a token where it streams, else for a request."""
    wall_s = {kind: statistics.median(each.wall_s for each in made) for kind, made in times.items()}
    used_s = {kind: statistics.median(each.cpu_s for each in made) for kind, made in times.items()}
    per = case.num_tokens if case.stream else 1
    made: dict[str, Any] = {"case": case.name, "per": "token" if case.stream else "request"}
    for kind in SERVERS:
        made[f"{kind}_requests_s"] = round(1 / wall_s[kind], 1)
        made[f"{kind}_us"] = round(1e6 * wall_s[kind] / per, 2)
        made[f"{kind}_cpu_us"] = round(1e6 * used_s[kind] / per, 2)
    ratios = [ours.wall_s / other.wall_s for ours, other in zip(*reversed(times.values()), strict=True)]
    return {**made, "wall_ratio": round(statistics.median(ratios), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of requests")
    args = parser.parse_args()
    todo = cases(args.scale)
    times = compare(todo, args.rounds)
    rows = [row(case, times[case.name]) for case in todo]
    print(f"{'':34}{'requests/s':>18}{'us wall':>20}{'us CPU of server':>20}")
    print(f"{'':34}{'bare':>9}{'service':>9}{'bare':>11}{'service':>9}{'bare':>11}{'service':>9}{'ratio':>8}")
    for each in rows:
        values = [each[f"{kind}_{what}"] for what in ("requests_s", "us", "cpu_us") for kind in SERVERS]
        print(
            f"{each['case']:34}{values[0]:9.1f}{values[1]:9.1f}{values[2]:11.1f}{values[3]:9.1f}"
            f"{values[4]:11.1f}{values[5]:9.1f}{each['wall_ratio']:8.2f}  per {each['per']}"
        )
    print(json.dumps({"bench": "http", "rounds": args.rounds, "rows": rows}))


if __name__ == "__main__":
    main()
