"""A receiver of OTLP over HTTP, such as a collector is, that keeps what it was sent."""

import gzip
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Receiver:
    """Context manager around the server on loopback."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []
        """Of each request, names in lower case."""
        self.metrics: dict[str, Metric] = {}
        """Newest of each name."""
        self.spans: list[Span] = []
        self.resources: list[dict[str, str]] = []
        """What each sender said of itself."""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                answer = receiver.take(self.path, body)
                receiver.headers.append({k.lower(): v for k, v in self.headers.items()})
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self, path: str, body: bytes) -> bytes:
        """Keep what was sent to a path of the protocol, and return the answer."""
        if path == "/v1/metrics":
            for sent in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                self.resources.append(_plain(sent.resource.attributes))
                for scope in sent.scope_metrics:
                    self.metrics |= {metric.name: metric for metric in scope.metrics}
            return bytes(ExportMetricsServiceResponse().SerializeToString())
        assert path == "/v1/traces", path
        for told in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(_plain(told.resource.attributes))
            for spans in told.scope_spans:
                self.spans += spans.spans
        return bytes(ExportTraceServiceResponse().SerializeToString())


def _plain(attributes: Iterable[KeyValue]) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in attributes}
