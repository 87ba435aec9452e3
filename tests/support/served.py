"""A server of this machine's own, from which a browser has folders."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class _Handler(SimpleHTTPRequestHandler):
    def __init__(self, page: str, folders: Mapping[str, Path], *args: Any) -> None:
        self._page, self._folders = page, folders
        known = SimpleHTTPRequestHandler.extensions_map
        self.extensions_map = {**known, ".mjs": "text/javascript", ".wasm": "application/wasm"}
        super().__init__(*args)

    def do_GET(self) -> None:
        if self.path != "/":
            super().do_GET()
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self._page.encode())

    def translate_path(self, path: str) -> str:
        first, _, rest = path.partition("?")[0].lstrip("/").partition("/")
        root = self._folders.get(first, Path("/nowhere")).resolve()
        found = (root / rest).resolve()
        return str(found if found.is_relative_to(root) else root / "nowhere")

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""


@contextlib.contextmanager
def served(page: str, **folders: Path) -> Iterator[str]:
    """The address of a server that has a page at ``/``, and folders by the first part of a path."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, page, folders))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
