"""Forwards connections from a port inside a sandbox to the gateway's Unix socket, and runs a command.

Usage: python3 -I -B model_port.py SOCKET PORT COMMAND. Runs in a sandbox; standard library only.
"""

import socket
import subprocess
import sys
import threading


def carry(source: socket.socket, target: socket.socket) -> None:
    """Forward bytes in one direction until the source ends."""
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()
        target.close()


def serve(listener: socket.socket, path: str) -> None:
    """Connect every client of `listener` to the socket at `path`."""
    while True:
        inside, _ = listener.accept()
        outside = socket.socket(socket.AF_UNIX)
        outside.connect(path)
        for pair in ((inside, outside), (outside, inside)):
            threading.Thread(target=carry, args=pair, daemon=True).start()


def main() -> None:
    """Listen, run the command, and exit with its status."""
    path, port, command = sys.argv[1:]
    listener = socket.create_server(("127.0.0.1", int(port)))
    threading.Thread(target=serve, args=(listener, path), daemon=True).start()
    sys.exit(subprocess.run(["/bin/sh", "-c", command], check=False).returncode)


if __name__ == "__main__":
    main()
