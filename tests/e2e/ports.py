"""Ports for agents that meet on the loopback device."""

import socket


def free_port() -> str:
    """Returns a port of the loopback address that nobody uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
