"""Transactions on SQLite or PostgreSQL with the same guarantees.

Only one writer is active at a time among all threads, processes and replicas: SQLite allows one anyway, and on
PostgreSQL an advisory lock is taken. So the rows that a writer has read are unchanged when it writes. Committed rows
survive kill -9 and, because both databases wait for the disk, a power failure.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, insert, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, NoSuchModuleError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from serving.quarantine import schema
from serving.quarantine.records import StoreError, UnavailableError

SQLITE, POSTGRESQL = "sqlite", "postgresql"
PATIENCE = 5.0
"""Seconds to wait for a connection, or for another writer."""
_WRITER_LOCK = 0x6F70656E
"""The key of our advisory lock in the database."""


class Database:
    """Connects at first use, and again after the database was unavailable."""

    def __init__(self, url: str) -> None:
        self._url = _checked(url)
        self.file = _file(self._url)
        """The file of SQLite; None for a server."""
        self._inode: int | None = None
        self._mark = ""
        self._ready = False
        self._preparing = threading.Lock()
        self._engine = _engine(self._url)

    @property
    def name(self) -> str:
        """The URL without the password, for messages."""
        return self._url.render_as_string(hide_password=True)

    def mark(self) -> str:
        """The part that the names of this quarantine's image files have in common."""
        with self._usable():
            return self._mark

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        with self._usable(), self._engine.begin() as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """One transaction as the only writer."""
        with self._usable(), self._write_transaction() as connection:
            yield connection

    def close(self) -> None:
        self._engine.dispose()

    @contextlib.contextmanager
    def _write_transaction(self) -> Iterator[Connection]:
        with self._engine.connect().execution_options(openworld_writes=True) as connection, connection.begin():
            if self._url.get_backend_name() == POSTGRESQL:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _WRITER_LOCK})
            yield connection

    def _prepare(self) -> None:
        """Create the tables or check their version; once, unless the database was replaced."""
        with self._preparing:
            if self.file is not None and self._ready and _inode(self.file) != self._inode:
                # The file was removed or replaced; rows written to the old one would be lost.
                self._engine.dispose()
                self._ready = False
            if self._ready:
                return
            if self.file is not None:
                self.file.parent.mkdir(parents=True, exist_ok=True)
            with self._write_transaction() as connection:
                schema.metadata.create_all(connection)
                self._mark = self._checked_mark(connection)
            self._inode = None if self.file is None else _inode(self.file)
            self._ready = True

    def _checked_mark(self, connection: Connection) -> str:
        """The mark of the quarantine, which is created with its tables."""
        about = connection.execute(select(schema.about.c.version, schema.about.c.mark)).first()
        if about is None:
            mark = secrets.token_hex(4)
            connection.execute(insert(schema.about).values(version=schema.VERSION, mark=mark))
            return mark
        if about.version != schema.VERSION:
            raise StoreError(
                f"{self.name}: the tables have format version {about.version}; allowed: {schema.VERSION}, "
                "or a database without a quarantine"
            )
        return str(about.mark)

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        """Prepares the database; raises an UnavailableError if that fails, or if the block does."""
        try:
            self._prepare()
            yield
        except (IntegrityError, DataError):
            # The statement is wrong, not the database: it would fail again.
            raise
        except DBAPIError as error:
            if isinstance(error, ProgrammingError) or "no such table" in str(error.orig):
                # The tables are missing because the database was replaced: they are created at the next use.
                self._ready = False
            raise self._unavailable(error.orig or error) from error
        except (PoolTimeoutError, sqlite3.Error, OSError) as error:
            raise self._unavailable(error) from error

    def _unavailable(self, error: BaseException) -> UnavailableError:
        reason = " ".join(str(error).split()) or type(error).__name__
        return UnavailableError(f"{self.name} cannot be used: {reason}", part="database")


def _checked(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        # The text may contain a password.
        raise StoreError("the quarantine's URL cannot be read; allowed: sqlite:///FILE, postgresql://...") from None
    if parsed.drivername in ("postgres", "postgresql"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    backend = parsed.get_backend_name()
    if backend not in (SQLITE, POSTGRESQL):
        raise StoreError(f"the quarantine's database is {backend}; allowed: {SQLITE}, {POSTGRESQL}")
    if backend == SQLITE and parsed.database in (None, "", ":memory:"):
        raise StoreError("the quarantine's database is in memory; allowed: a file, as in sqlite:////var/lib/q.db")
    return parsed


def _file(url: URL) -> Path | None:
    return Path(url.database).absolute() if url.get_backend_name() == SQLITE and url.database else None


def _inode(file: Path) -> int | None:
    try:
        return os.stat(file).st_ino
    except OSError:
        return None


def _engine(url: URL) -> Engine:
    arguments: dict[str, Any]
    if url.get_backend_name() == SQLITE:
        arguments = {"timeout": PATIENCE}
    else:
        # Detects a server behind a dead network too.
        arguments = {
            "connect_timeout": int(PATIENCE),
            "tcp_user_timeout": int(2000 * PATIENCE),
            "options": f"-c lock_timeout={int(1000 * PATIENCE)} -c timezone=UTC",
        }
    try:
        engine = create_engine(url, connect_args=arguments, pool_timeout=PATIENCE, pool_pre_ping=True)
    except (ImportError, NoSuchModuleError) as error:
        raise StoreError(f"no driver for {url.drivername} ({error}); pip install -e '.[postgres]'") from error
    if url.get_backend_name() == SQLITE:
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection: sqlite3.Connection, record: object) -> None:
    # Transactions are begun explicitly: Python would begin them late, and without the write lock.
    connection.isolation_level = None
    # One text that is not UTF-8 would make whole queries fail. PostgreSQL takes none.
    connection.text_factory = _text
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("PRAGMA foreign_keys=ON")


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("openworld_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
