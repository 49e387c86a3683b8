"""What a worker has done before its first request."""

from __future__ import annotations

import subprocess
import sys

from tests.helpers_serving import ROOT

REQUESTS = """
import re
import sys
from pathlib import Path
from PIL import Image
from serving.bundle.pixels import open_image, plain
from serving.http import app
from serving.inference.engine import import_for_requests
from serving.quarantine.api.pictures import thumbnail
from serving.quarantine.duplicates import summarize
from serving.quarantine.store import Store
from serving.teaching import teacher
from tests.helpers_serving import saved

import_for_requests(teaching=True)
before = set(sys.modules)
for kind in ("WEBP", "PNG", "JPEG", "BMP"):
    content = saved(Image.new("RGB", (300, 200)), kind)
    plain(open_image(content), "RGB")
    summarize(content)
    thumbnail(content)
for name in re.findall(r"^ +from (serving[.a-z_]+) import", Path("serving/teaching/api/routes.py").read_text(), re.M):
    __import__(name)
print(sorted(set(sys.modules) - before))
"""


def test_requests_import_nothing() -> None:
    """With the first WebP file, Pillow would import 40 formats that are not read."""
    done = subprocess.run([sys.executable, "-c", REQUESTS], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
