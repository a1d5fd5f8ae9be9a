"""Listening sockets for servers that run on asyncio's own event loop."""

import socket


def listen(port: int = 0) -> socket.socket:
    """On a free port, or on one that was in use before. The protocol is named, or asyncio would not turn Nagle's
    algorithm off, and every answer that is sent in two pieces would take 40 ms."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(512)
    return listener
