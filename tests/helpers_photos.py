"""A small set of pictures that a pre-trained trunk can tell apart."""

from __future__ import annotations

from export.demo.pictures import HEIGHT, PICTURES, WIDTH, photo, write_photos

__all__ = ["HEIGHT", "PICTURES", "WIDTH", "photo", "write_photos"]
