"""A copy of the checkout, for tests of what is run at its top."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.helpers_serving import ROOT


def copy_checkout(place: Path) -> Path:
    """Copy every file that is or could be in git, without the tests."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in tracked.splitlines():
        if not name.startswith("tests/") and (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place / name)
    return place
