"""Where to listen, as command lines take it."""

from __future__ import annotations

import argparse
import ipaddress


def host(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: an IP address such as 127.0.0.1") from error


def port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: 1 to 65535")
    return int(text)
