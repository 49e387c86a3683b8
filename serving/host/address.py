"""The address to listen on, as command lines take it."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket

LOOPBACK, ALL = "127.0.0.1", "0.0.0.0"


class ListenError(Exception):
    """A server cannot listen on the address that it was given."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host(text: str) -> str:
    """The type of a --host argument."""
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: an IP address such as 127.0.0.1") from error


def port(text: str) -> int:
    """The type of a --port argument."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: 1 to 65535")
    return int(text)


def check_free(host: str, port: int) -> None:
    """Raise a ListenError if a server cannot listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen()
    except OSError as error:
        raise ListenError(
            f"{host}:{port}: cannot listen there: {os.strerror(error.errno or 0)}; allowed: an address of this machine "
            "and a free port (--host, --port)"
        ) from error
