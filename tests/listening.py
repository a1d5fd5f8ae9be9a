"""Listening sockets for servers that run on asyncio's own event loop."""

import socket


def listen() -> socket.socket:
    """On a free port. The protocol is named, or asyncio would not turn Nagle's algorithm off, and every answer that is
    sent in two pieces would take 40 ms."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(512)
    return listener
