"""Images that programs have in memory, as the bytes of a PNG file that keeps every pixel."""

from __future__ import annotations

import io

from PIL import Image, ImageOps

_PNG_MODES = frozenset(("1", "L", "LA", "I;16", "P", "RGB", "RGBA"))


def png_of(image: Image.Image) -> bytes:
    """A PNG file that shows the image upright: Pillow does not write the EXIF orientation of a photograph into it."""
    upright = ImageOps.exif_transpose(image)
    if upright.mode == "F":
        raise ValueError("image is of mode F, whose range is not known; convert it to one of 8 or 16 bit first")
    if upright.mode.startswith("I"):
        upright = upright.convert("I").convert("I;16")
    elif upright.mode not in _PNG_MODES:
        upright = upright.convert("RGBA" if upright.has_transparency_data else "RGB")
    stored = io.BytesIO()
    upright.save(stored, "PNG", compress_level=1)
    return stored.getvalue()
