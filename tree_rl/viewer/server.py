"""Serves one page to this machine."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def serve_page(page: bytes, port: int) -> ThreadingHTTPServer:
    """A server of `page` on 127.0.0.1 that has not begun to serve. Raises `OSError` if the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another site must not read it through a name that leads here.
            host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
            if host not in ("127.0.0.1", "localhost"):
                self.send_error(403)
                return
            if self.path.split("?")[0] != "/":
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; "
                             "script-src 'unsafe-inline'; img-src data:")  # fmt: skip
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
