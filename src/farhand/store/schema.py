"""Named statements and migrations: plain SQL files under `sql/`, read once.

A migration is `sql/DIALECT/NNNN_name.sql`. What was applied is a table, `migrations`, with the checksum of each file. A
file is never edited after its release; the next change is the next number.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from farhand.errors import StoreError

APPLICATION_ID = 0x46617268
"""Marks a SQLite file as ours ("Farh")."""

_SQL = Path(__file__).with_name("sql")
_HISTORY = """
CREATE TABLE IF NOT EXISTS migrations (
    version INTEGER NOT NULL PRIMARY KEY,
    name TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    applied_at REAL NOT NULL
)
"""


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def statements(self) -> list[str]:
        """The file cut where SQLite says a statement is complete."""
        found, begun = [], ""
        for line in self.text.splitlines(keepends=True):
            begun += line
            if sqlite3.complete_statement(begun):
                found.append(begun.strip())
                begun = ""
        return found


@cache
def queries() -> dict[str, str]:
    """The statements of `sql/queries.sql` by name."""
    parts = re.split(r"^-- name: (\w+)$", (_SQL / "queries.sql").read_text("utf-8"), flags=re.MULTILINE)
    return {name: text.strip().removesuffix(";") for name, text in zip(parts[1::2], parts[2::2], strict=True)}


@cache
def migrations(dialect: str) -> tuple[Migration, ...]:
    """The migrations of one dialect, in order."""
    return tuple(
        Migration(int(path.name[:4]), path.stem[5:], path.read_text("utf-8"))
        for path in sorted((_SQL / dialect).glob("[0-9][0-9][0-9][0-9]_*.sql"))
    )


def pending(connection: sqlite3.Connection, known: tuple[Migration, ...]) -> list[Migration]:
    """The migrations this file still needs. Only reads; StoreError for a file that is newer, changed or not ours."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if "migrations" not in tables or application != APPLICATION_ID:
        if tables or application:
            raise StoreError(
                "the file is a SQLite database of another program",
                hint="Nothing was changed in it. Name another file, or another folder as FARHAND_HOME.",
            )
        return list(known)
    applied = {version: (name, sha256) for version, name, sha256 in _applied(connection)}
    newest = max((migration.version for migration in known), default=0)
    if max(applied, default=0) > newest:
        raise StoreError(
            f"the record was written by a newer Farhand: its schema is {max(applied)}, this one knows {newest}",
            hint="Nothing was changed in it. Upgrade farhand, or name another folder as FARHAND_HOME.",
        )
    for migration in known:
        if migration.version in applied and applied[migration.version] != (migration.name, migration.sha256):
            raise StoreError(
                f"migration {migration.version:04} of the record is not the one of this Farhand",
                hint="Nothing was changed in it. It was made by another build: use that one, or another FARHAND_HOME.",
            )
    return [migration for migration in known if migration.version not in applied]


def _applied(connection: sqlite3.Connection) -> list[tuple[int, str, str]]:
    return connection.execute("SELECT version, name, sha256 FROM migrations ORDER BY version").fetchall()


def migrate(connection: sqlite3.Connection, known: tuple[Migration, ...], now: float) -> None:
    """Apply what is missing, all in one transaction. Of several processes one does it, the others find it done."""
    if not pending(connection, known):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        for migration in pending(connection, known):
            connection.execute(_HISTORY)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            for statement in migration.statements():
                connection.execute(statement)
            row = (migration.version, migration.name, migration.sha256, now)
            connection.execute("INSERT INTO migrations VALUES (?, ?, ?, ?)", row)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
