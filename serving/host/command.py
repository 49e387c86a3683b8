"""The command line of `openworld serve` and `openworld predict`."""

from __future__ import annotations

import argparse
from typing import NoReturn

GLOSSARY = """\
terms:
  task        a few classes that were learned together
  unknown     an image of no learned class
  alpha       the share of known images that may be called unknown
  bundle      the directory that `openworld export` writes: the graphs and all else that an answer needs
  shelf       a folder of bundles with a link `current`, which servers watch
  quarantine  the database in which servers keep the images that they called unknown
"""


class ServingParser(argparse.ArgumentParser):
    """Usage errors are one line, and the help ends with a glossary."""

    def __init__(self, program: str, description: str, note: str = "") -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=program, description=description, epilog=note + GLOSSARY, formatter_class=formatter)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")
