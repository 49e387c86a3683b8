"""The tables of a quarantine. Every process that opens one creates missing tables."""

from __future__ import annotations

from sqlalchemy import (
    Boolean,
    Column,
    ColumnElement,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    case,
    func,
)

VERSION = 1
"""The format version of the tables; a database with another one is refused."""

metadata = MetaData()

about = Table(
    "openworld_quarantine",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    # Distinguishes the image files of this quarantine from those of others in the same folder.
    Column("mark", String(8), nullable=False),
)

groups = Table(
    "openworld_groups",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("cohesion", Double, nullable=False),
    Column("near_class", Text),
    Column("shifted", Boolean, nullable=False),
    # Ids are never reused, so that a page that is still open cannot show another group under an old id.
    sqlite_autoincrement=True,
)

items = Table(
    "openworld_items",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("sha256", String(64), nullable=False, unique=True),
    Column("file", Text, nullable=False),
    Column("fingerprint", LargeBinary, nullable=False),
    Column("state", String(10), nullable=False),
    Column("kind", String(10), nullable=False),
    Column("group", ForeignKey(groups.c.id), index=True),
    Column("label", Text),
    Column("labelled_by", Text),
    Column("labelled_at", Double),
    Column("learned_in", Text),
    Column("received_at", Double, nullable=False),
    Column("seen_at", Double, nullable=False),
    Column("model_version", Text, nullable=False),
    Column("copies", Integer, nullable=False),
    Column("width", Integer, nullable=False),
    Column("height", Integer, nullable=False),
    Column("size", Integer, nullable=False),
    Column("media_type", String(40), nullable=False),
    Column("bytes", Integer, nullable=False),
    Column("answer", Text, nullable=False),
    Column("features", LargeBinary, nullable=False),
    sqlite_autoincrement=True,
)
# Counts, sums and the choice of items to remove need only this index, not the rows.
Index("openworld_items_age", items.c.state, items.c.received_at, items.c.bytes)

# Which group an image without a group resembles most.
resemblances = Table(
    "openworld_resemblances",
    metadata,
    Column("item", ForeignKey(items.c.id, ondelete="CASCADE"), primary_key=True, autoincrement=False),
    Column("group", ForeignKey(groups.c.id, ondelete="CASCADE"), nullable=False, index=True),
    Column("similarity", Double, nullable=False),
)

# Classes that a person has created and that may have no example yet.
drafts = Table(
    "openworld_drafts",
    metadata,
    Column("label", String(100), primary_key=True),
    Column("who", Text, nullable=False),
    Column("at", Double, nullable=False),
)

# Background jobs (learning, grouping), whose processes may be killed.
jobs = Table(
    "openworld_jobs",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("kind", String(10), nullable=False),
    Column("state", String(10), nullable=False),
    Column("who", Text, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("seen_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("progress", Double, nullable=False),
    Column("step", Text, nullable=False),
    Column("request", Text, nullable=False),
    Column("base", Text, nullable=False),
    Column("candidate", Text),
    Column("error", Text),
    Column("result", Text),
    sqlite_autoincrement=True,
)

changes = Table(
    "openworld_changes",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", Double, nullable=False),
    Column("who", Text, nullable=False),
    Column("what", String(20), nullable=False),
    Column("items", Integer, nullable=False),
    Column("detail", Text, nullable=False),
)


def sum_of(column: Column[int]) -> ColumnElement[int]:
    """The sum of numbers of bytes or copies, without what something else has put there: SQLite takes any value."""
    return func.sum(case((column.between(0, 2**31 - 1), column), else_=0))
