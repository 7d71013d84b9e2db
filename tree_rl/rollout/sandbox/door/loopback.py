"""Makes 127.0.0.1 work in a new network namespace. Runs in a sandbox, before its command; standard library only."""

import fcntl
import socket
import struct

SET_FLAGS, UP = 0x8914, 0x1

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    fcntl.ioctl(sock, SET_FLAGS, struct.pack("16sh14x", b"lo", UP))
