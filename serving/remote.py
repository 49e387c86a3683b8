"""The commands `openworld push` and `openworld pull`: bundles at a URL, such as a repository of Hugging Face."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from serving.bundle import transfer
from serving.bundle.command_line import ServingParser, one_of
from serving.bundle.directory import WriteError
from serving.bundle.errors import BundleError
from serving.bundle.terminal import escaped, one_line

URLS = """\
URL is a folder, or what fsspec opens: hf://USER/REPOSITORY (extra huggingface), s3://, gs://, az:// and others.
Each bundle is in a folder named by its version; the file `current` names the one to pull.

"""
TERMINAL_SECONDS, LOG_SECONDS = 0.2, 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m serving.remote push BUNDLE URL`, or `pull URL FOLDER`."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser = ServingParser("python -m serving.remote", "Send a bundle to a URL, or fetch it from there.", URLS)
    parser.add_argument("direction", type=one_of("push", "pull"), help="push or pull")
    chosen = parser.parse(words[:1])
    return (push if chosen.direction == "push" else pull)(words[1:])


def push(arguments: Sequence[str] | None = None) -> int:
    """`openworld push BUNDLE URL`; exit code 2 after an error."""
    parser = ServingParser("openworld push", "Send a bundle to a URL and make it the current one there.", URLS)
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the bundle directory to send")
    parser.add_argument("url", metavar="URL", help="where bundles are kept; created if it does not exist")
    chosen = parser.parse(arguments)
    return _run(lambda progress: transfer.push(chosen.bundle, chosen.url, progress))


def pull(arguments: Sequence[str] | None = None) -> int:
    """`openworld pull URL FOLDER`; exit code 2 after an error."""
    parser = ServingParser("openworld pull", "Fetch a bundle from a URL and check every file of it.", URLS)
    parser.add_argument("url", metavar="URL", help="where bundles are kept")
    parser.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="a new or an empty folder, or one with an older bundle",
    )
    parser.add_argument("--version", metavar="DIGEST", help="this version instead of the current one")
    chosen = parser.parse(arguments)
    return _run(lambda progress: transfer.pull(chosen.url, chosen.folder, chosen.version, progress))


def _run(work: Callable[[_Progress], transfer.Moved]) -> int:
    progress = _Progress()
    try:
        moved = work(progress)
    except (BundleError, transfer.TransferError, WriteError) as error:
        progress.end()
        print(f"error: {escaped(error)}", file=sys.stderr)
        return 2
    finally:
        progress.end()
    manifest = moved.manifest
    total = sum(info.size for info in manifest.files.values())
    print(
        f"{one_line(moved.place)}: {manifest.name} version {manifest.version}, {len(manifest.files)} files "
        f"with the right checksums, {moved.sent / 1e6:.2f} of {total / 1e6:.2f} MB transferred"
    )
    return 0


class _Progress:
    """One line on a terminal, or a line every few seconds in a log."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._every = TERMINAL_SECONDS if self._terminal else LOG_SECONDS
        self._next = time.monotonic() + self._every

    def __call__(self, what: str, done: int, total: int) -> None:
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + self._every
        share = 100 * done / total if total else 100.0
        line = f"{escaped(what)}: {done / 1e6:,.1f} of {total / 1e6:,.1f} MB ({share:.0f} %)"
        print(f"\r\x1b[K{line}" if self._terminal else line, end="" if self._terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def end(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
