"""Shared code of the demonstrations: commands, waiting, messages, and the frame of their own commands."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from serving import demo
from serving.bundle.terminal import escaped
from serving.host import address
from training.options import CommandParser

TIMEOUT = 120.0


class Result(Protocol):
    """The measurements of a demonstration, and whether each of its promises was kept."""

    @property
    def rows(self) -> Sequence[tuple[str, ...]]: ...

    @property
    def checks(self) -> Mapping[str, bool]: ...

    def print(self) -> None: ...


def add_options(parser: CommandParser) -> None:
    """The options of every demonstration."""
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="for all files; deleted first")
    parser.add_argument("--port", type=address.port, default=3000, help="the TCP port to listen on; default: 3000")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")


def show(chosen: argparse.Namespace, work: Callable[[], Result], target: str, further: str) -> int:
    """Run a demonstration and print its result; the exit code is 1 if it failed or a promise was broken.

    `target` is its name in the Makefile, `further` where a reader goes from there.
    """
    if demo.taken(chosen.port):
        print(f"error: port {chosen.port} is taken; choose another one: make {target} PORT=3001", file=sys.stderr)
        return 2

    import httpx

    from serving.client import ServiceError
    from training.run import RunError

    started = time.monotonic()
    try:
        result = work()
    except (RunError, ServiceError, TimeoutError, httpx.HTTPError) as error:
        print(f"error: {escaped(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    result.print()
    print(f"{time.monotonic() - started:.0f} s; {further}")
    if chosen.json:
        chosen.json.write_text(json.dumps({"rows": result.rows, "promises": result.checks}, indent=2))
    return 0 if all(result.checks.values()) else 1


def command(*words: object) -> None:
    """Run a subcommand of `openworld` in a separate process, as a person would."""
    from training.run import RunError

    texts = list(map(str, words))
    announce(f"$ openworld {shlex.join(texts)}")
    if code := subprocess.run([sys.executable, "-m", "export.cli", *texts], check=False).returncode:
        raise RunError(f"openworld {texts[0]} ended with exit code {code}")


def wait(met: Callable[[], bool], otherwise: str) -> None:
    """Wait until a condition is met; raises RunError(otherwise) after TIMEOUT seconds."""
    from training.run import RunError

    deadline = time.monotonic() + TIMEOUT
    while not met():
        if time.monotonic() > deadline:
            raise RunError(f"{otherwise} within {TIMEOUT:g} seconds")
        time.sleep(0.1)


def announce(text: str) -> None:
    from rich.console import Console

    Console().print(f"[bold]{text}[/]", highlight=False)
