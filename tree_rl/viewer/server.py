"""Serves one page to browsers on this machine."""

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tree_rl.inspection.files import InputError
from tree_rl.inspection.files.open_file import reason

ADDRESS = "127.0.0.1"


class PageServer(ThreadingHTTPServer):
    """Answers `/` with the page and all else with 404, on a port of 127.0.0.1; port 0 takes a free one.

    Raises:
        InputError: the port is not available.
    """

    daemon_threads = True

    def __init__(self, page: bytes, port: int) -> None:
        self.page = page
        try:
            super().__init__((ADDRESS, port), PageHandler)
        except OSError as error:
            raise InputError(
                f"--port {port}: expected a free port: {reason(error)}; name another, or 0 for any"
            ) from error

    @property
    def address(self) -> str:
        """URL of the page."""
        return f"http://{ADDRESS}:{self.server_port}/"


class PageHandler(BaseHTTPRequestHandler):
    """One request."""

    server: PageServer

    def do_GET(self) -> None:
        """Send the page. Other host names are refused, or a web site could read it by DNS rebinding."""
        known = {f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")}
        if self.headers.get("Host") not in known:
            self.send_error(403)
        elif self.path != "/":
            self.send_error(404)
        else:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(self.server.page)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.end_headers()
            self.wfile.write(self.server.page)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, so that the terminal shows only the address."""
