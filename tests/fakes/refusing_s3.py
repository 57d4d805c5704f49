"""An S3 server that answers every request with one error: what real servers do when full."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self


class RefusingS3:
    """Context manager around the server. With `size` it only says how long objects are, as a server
    whose disks are away."""

    def __init__(self, *, status: int, code: str, size: int | None = None) -> None:
        body = f"<Error><Code>{code}</Code><Message>refused</Message></Error>".encode()

        class Handler(BaseHTTPRequestHandler):
            def _refuse(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def _head(self) -> None:
                if size is None:
                    self._refuse()
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(size))
                self.end_headers()

            do_GET = do_PUT = do_POST = do_DELETE = _refuse
            do_HEAD = _head

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

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
        self._server.server_close()
        self._thread.join()
