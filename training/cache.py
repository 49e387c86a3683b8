"""The cache of encoded images: `openworld cache` shows it, and `openworld cache --clear` empties it."""

import json
import sys
import time
from pathlib import Path

from serving.bundle.terminal import one_line
from training.options import CommandParser, add_json_option, report_errors, run_command


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(
        "openworld cache",
        "Images that a trunk has encoded are kept on disk, so that each is encoded once. The folder is set by "
        "OPENWORLD_CACHE, and its size in gigabytes is limited by OPENWORLD_CACHE_GB.",
    )
    parser.add_argument(
        "--clear", action="store_true", help="remove all encoded images; they are encoded again when needed"
    )
    add_json_option(parser)
    chosen = parser.parse(arguments)

    def work() -> None:
        from models.trunks.cache_settings import GB, cache_folder
        from models.trunks.stored_graphs import GRAPHS
        from training.data.cache import DIGESTS, cache_limit, clear, parts

        kinds = {DIGESTS: "digests of files", GRAPHS: "exported graphs"}

        folder = cache_folder()
        if chosen.clear:
            removed = clear(folder)
            text = json.dumps({"folder": str(folder), "removed": removed})
            print(text if chosen.json else f"{one_line(folder)}: {shown(removed)} removed")
            return
        found = [
            {**part.about(), "bytes": part.bytes, "used": part.used, "folder": str(part.folder)}
            for part in parts(folder)
        ]
        if chosen.json:
            print(json.dumps({"folder": str(folder), "limit": cache_limit(), "parts": found}, indent=2))
            return
        print(f"{one_line(folder)}: {shown(sum(part['bytes'] for part in found))} of {cache_limit() / GB:g} GB")
        for part in found:
            name = kinds.get(Path(part["folder"]).name, "vectors of an unknown trunk")
            name = f"{part['trunk']} at {part['size']}, view {part['view']}" if "trunk" in part else name
            used = time.strftime("%Y-%m-%d %H:%M", time.localtime(part["used"]))
            print(f"  {shown(part['bytes']):>10}  last used {used}  {one_line(name)}")

    return report_errors(work)


def shown(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"


if __name__ == "__main__":
    sys.exit(run_command(main))
