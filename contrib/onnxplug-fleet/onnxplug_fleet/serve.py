"""The pages of a fleet, and the files that they link to, by HTTP."""

from __future__ import annotations

import mimetypes
import posixpath
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from onnxplug_fleet.store import Store


def make_server(out: Path, store: Store, host: str, port: int) -> ThreadingHTTPServer:
    """A server: ``/`` is the last run's page, ``/runs/NUMBER/…`` the page of a given run, ``/store/…`` the store.

    Args:
        host, port: The address to listen on; port 0 for any free port.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answers a request."""
            path = posixpath.normpath(unquote(urlsplit(self.path).path))
            if path == "/":
                runs = sorted((int(p.name) for p in (out / "runs").glob("*") if p.name.isdecimal()), reverse=True)
                if runs:
                    self.send_response(HTTPStatus.FOUND)
                    self.send_header("Location", f"/runs/{runs[0]}/index.html")
                    self.end_headers()
                    return
            content = self._content(path.lstrip("/"))
            if content is None:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            kind = "text/plain" if path.endswith(".sarif") else mimetypes.guess_type(path)[0]
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", f"{kind or 'application/octet-stream'}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _content(self, name: str) -> bytes | None:
            """The content of an entry; ``None`` for anything outside of the runs' and the store's folders."""
            first, _, rest = name.partition("/")
            if ".." in name.split("/"):
                return None
            if first == "runs":
                file = out / name
                return file.read_bytes() if file.is_file() else None
            if first == "store":
                first, rest = rest.partition("/")[0], rest
            else:
                rest = name
            return store.read(rest) if first in ("objects", "failed") else None

        def log_message(self, format: str, *args: object) -> None:
            """Prints nothing of a request."""

    return ThreadingHTTPServer((host, port), Handler)
