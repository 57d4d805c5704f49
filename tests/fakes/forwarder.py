"""A port that passes all connections on to another one: an outage that ends when it opens."""

import contextlib
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def forwarding(port: int, to: int) -> Iterator[None]:
    """Pass on what comes to a loopback port while the block runs."""
    listener = socket.create_server(("127.0.0.1", port))
    opened: list[socket.socket] = [listener]

    def accept() -> None:
        with contextlib.suppress(OSError):  # closed below
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", to))
                opened.extend((client, server))
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=_copy, args=(source, sink), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        for one in opened:
            one.close()
        thread.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
