"""An S3 server over HTTP for tests, and a proxy before it that does to requests what networks do."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from moto.moto_server.threaded_moto_server import ThreadedMotoServer
from mypy_boto3_s3 import S3Client

from pipelines.s3_store import S3Store
from pipelines.storage_config import StorageConfig

_HOPS = {"connection", "transfer-encoding", "content-length", "date", "server"}


class Fault(Enum):
    """What happens to a request instead of an answer."""

    REFUSED = auto()
    """An error answer; the server never hears of the request."""
    LOST_ANSWER = auto()
    """The server does it, and the connection breaks before a byte of the answer."""
    CUT_ANSWER = auto()
    """The server does it, and the connection breaks in the body of the answer."""
    CUT_REQUEST = auto()
    """The connection breaks half-way through the request's body, which the server sees."""
    FLIPPED_ANSWER = auto()
    """The first byte of the answer's body is another one."""
    SILENCE = auto()
    """Neither done nor answered, for longer than the client waits."""


@dataclass(slots=True)
class Rule:
    """Does `fault` to the next `times` requests of a method whose target holds a text."""

    fault: Fault
    method: str
    target: str = ""
    times: int = 1
    status: int = 503
    code: str = "SlowDown"
    after_bytes: int = 1000
    before: Callable[[], None] | None = None
    """Done first, for what another client does at the worst moment."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a client sent."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class FaultProxy:
    """Forwards requests to `upstream`, by `rules`, and remembers them."""

    upstream: str
    rules: list[Rule] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    endpoint: str = ""
    page_size: int | None = None
    """Most keys of a page of a listing."""
    stopping: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    one_at_a_time: threading.Lock = field(default_factory=threading.Lock)

    def sent(self, method: str, target: str = "") -> list[Request]:
        return [each for each in self.requests if each.method == method and target in each.target]

    def rule_for(self, request: Request) -> Rule | None:
        with self.lock:
            self.requests.append(request)
            for rule in self.rules:
                if rule.times and rule.method == request.method and rule.target in request.target:
                    rule.times -= 1
                    return rule
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    proxy: FaultProxy

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        request = Request(self.command, self.path, dict(self.headers.items()), body)
        rule = self.proxy.rule_for(request)
        if rule is None:
            self.answer(request)
            return
        if rule.before is not None:
            rule.before()
        match rule.fault:
            case Fault.REFUSED:
                text = f"<Error><Code>{rule.code}</Code><Message>Asked of the test</Message></Error>".encode()
                self.reply(rule.status, [("Content-Type", "application/xml")], text, len(text))
            case Fault.LOST_ANSWER:
                self.forward(request)
                self.close_connection = True
            case Fault.CUT_ANSWER:
                self.answer(request, rule.after_bytes)
                self.close_connection = True
            case Fault.CUT_REQUEST:
                self.forward(request, rule.after_bytes)
                self.close_connection = True
            case Fault.FLIPPED_ANSWER:
                status, headers, data = self.forward(request)
                self.reply(status, headers, bytes([data[0] ^ 1]) + data[1:], len(data))
            case Fault.SILENCE:
                self.proxy.stopping.wait(30)
                self.close_connection = True

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request

    def forward(self, request: Request, sent_bytes: int | None = None) -> tuple[int, list, bytes]:
        upstream = http.client.HTTPConnection(urlsplit(self.proxy.upstream).netloc, timeout=30)
        headers = {name: value for name, value in request.headers.items() if name.lower() != "expect"}
        target = request.target
        if "list-type=2" in target and self.proxy.page_size is not None:
            target += f"&max-keys={self.proxy.page_size}"
        try:
            # moto compares and writes in two steps; one request at a time makes them one, as in S3.
            with self.proxy.one_at_a_time:
                upstream.request(request.method, target, request.body[:sent_bytes], headers)
                if sent_bytes is not None:
                    return 0, [], b""
                answer = upstream.getresponse()
                return answer.status, answer.getheaders(), answer.read()
        finally:
            upstream.close()

    def answer(self, request: Request, sent_bytes: int | None = None) -> None:
        status, headers, body = self.forward(request)
        length = next((int(value) for name, value in headers if name.lower() == "content-length"), len(body))
        self.reply(status, headers, body[:sent_bytes], length)

    def reply(self, status: int, headers: list[tuple[str, str]], body: bytes, length: int) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in _HOPS:
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Clients keep connections; their threads end with them.
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are what these tests are about."""


@dataclass(frozen=True, slots=True)
class S3:
    """A bucket of the server, reached through a proxy of its own."""

    bucket: str
    proxy: FaultProxy
    direct: S3Client
    """boto3's client of the server itself, to look at what is there."""

    def settings(self, **changes) -> StorageConfig:
        values = {"endpoint_url": self.proxy.endpoint, "backoff_s": 0.001, "timeout_s": 20, **changes}
        return StorageConfig(**values)

    def store(self, folder: str = "root", **changes) -> S3Store:
        return S3Store(self.bucket, folder, self.settings(**changes))


@contextmanager
def moto_server() -> Iterator[str]:
    """The URL of moto's server, in threads of this process."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextmanager
def fault_proxy(upstream: str) -> Iterator[FaultProxy]:
    """A proxy on a port of its own."""
    proxy = FaultProxy(upstream)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": proxy}))
    proxy.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.stopping.set()
        server.shutdown()
        thread.join()
        server.server_close()
