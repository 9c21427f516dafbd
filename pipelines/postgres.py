"""PostgreSQL as the partner of a two-phase commit, on psycopg 3.

The table ``fencepost_transactions`` has a row for each transactional id: a generation, which fences
former owners, and the identity of the transaction that was decided last. The row is updated in the
same transaction as the rows of the handler, so that one COMMIT decides. With ``prepare``, PREPARE
TRANSACTION decides, and COMMIT PREPARED follows after Kafka's commit.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection, errors

from fencepost.pipelines.failures import (
    HandlerError,
    InDoubtError,
    PartnerFencedError,
    PartnerUnavailableError,
    PipelineError,
    RetryBatch,
)
from fencepost.pipelines.partners import Decision, LockedError, TransactionIdentity, TransactionKey

TABLE = "fencepost_transactions"
PREFIX = "fencepost"
"""The first part of the names of prepared transactions."""

MAX_GID_BYTES = 199
"""PostgreSQL's limit of a prepared transaction's name (GIDSIZE without its final zero)."""

LOCK_MS = 500
"""How long a claim waits for a former owner that is about to decide, before it looks again."""

IDLE_MS = 60_000
"""How long a transaction may stay open in a session whose client has vanished."""

_CREATE = f"""
create table if not exists {TABLE} (
    cluster_id text not null,
    transactional_id text not null,
    generation bigint not null,
    producer_id bigint,
    producer_epoch integer,
    decided_at timestamptz,
    primary key (cluster_id, transactional_id)
)"""
_ADD = f"insert into {TABLE} values (%s, %s, 0) on conflict do nothing"  # noqa: S608
_LOCK = (
    f"select producer_id, producer_epoch, decided_at from {TABLE}"  # noqa: S608
    " where cluster_id = %s and transactional_id = %s for update"
)
_FENCE = (
    f"update {TABLE} set generation = generation + 1"  # noqa: S608
    " where cluster_id = %s and transactional_id = %s returning generation"
)
_DECIDE = (
    f"update {TABLE} set producer_id = %s, producer_epoch = %s,"  # noqa: S608
    " decided_at = clock_timestamp()"
    " where cluster_id = %s and transactional_id = %s and generation = %s"
)
# With synchronous_commit off, a crash of the database could lose a decision that Kafka has
# followed. Stronger settings than "on" stay.
_DURABLE = (
    "select set_config('synchronous_commit', 'on', true)"
    " where current_setting('synchronous_commit') = 'off'"
)
_LOOK = "select to_regclass(%s), current_setting('max_prepared_transactions')"
_PREPARED = (
    "select gid from pg_prepared_xacts where database = current_database() and starts_with(gid, %s)"
)


class Postgres:
    """One connection to a PostgreSQL database, for one worker.

    ``conninfo`` is libpq's connection string. The handler gets a ``psycopg.AsyncConnection`` with
    an open transaction, which it can neither commit nor roll back; savepoints are allowed. The role
    needs the rights SELECT, INSERT and UPDATE on the table ``fencepost_transactions``, and CREATE
    in the schema while the table is missing. With ``prepare``, PREPARE TRANSACTION decides;
    it needs ``max_prepared_transactions`` above 0. The server ends a session whose client has not
    answered for ``idle_ms`` inside a transaction, so that a claim does not wait forever.
    """

    def __init__(self, conninfo: str, *, prepare: bool = False, idle_ms: int = IDLE_MS) -> None:
        self._conninfo = conninfo
        self._prepare = prepare
        self._idle_ms = idle_ms
        self._connection: AsyncConnection[Any] | None = None
        self._generations: dict[TransactionKey, int] = {}
        self._key = TransactionKey("", "")
        self._identity = TransactionIdentity(-1, -1)
        self._is_decided = False
        """Whether this connection has decided the transaction of that key and identity."""

    async def open(self) -> None:
        """Connect, and create the table if necessary."""
        await self.close()
        async with self._translated():
            connection = self._connection = await AsyncConnection.connect(self._conninfo)
            await connection.execute(f"set idle_in_transaction_session_timeout = {self._idle_ms}")
            table, max_prepared = await _row(connection, _LOOK, TABLE)
            if self._prepare and max_prepared == "0":
                raise PipelineError(
                    "PostgreSQL has max_prepared_transactions = 0: set it at least to the number"
                    " of workers, or omit prepare=True"
                )
            if table is None:
                # Two sessions that create a table at once fail in spite of "if not exists".
                await connection.execute("select pg_advisory_xact_lock(hashtext(%s))", (TABLE,))
                await connection.execute(_CREATE)
            await connection.commit()

    async def close(self) -> None:
        """Close the connection; the server rolls back an undecided transaction."""
        connection, self._connection, self._is_decided = self._connection, None, False
        if connection is not None:
            await connection.close()

    @property
    def _open(self) -> AsyncConnection[Any]:
        if self._connection is None:
            raise PartnerUnavailableError("there is no connection to PostgreSQL")
        return self._connection

    @contextlib.asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        """Raise psycopg's errors as a pipeline's errors, whose class says whether a retry helps."""
        try:
            yield
        except psycopg.Error as error:
            is_closed = self._connection is None or self._connection.closed
            raise _translation(error, is_closed=is_closed) from error

    async def prepared(self, key: TransactionKey) -> Sequence[TransactionIdentity]:
        """Return the prepared transactions of a transactional id."""
        async with self._translated(), self._open.transaction():
            cursor = await self._open.execute(_PREPARED, (f"{PREFIX}:",))
            names = [row[0] for row in await cursor.fetchall()]
        return [identity for name in names if (identity := _parsed(name, key)) is not None]

    @contextlib.asynccontextmanager
    async def take_over(self, key: TransactionKey) -> AsyncIterator[Decision | None]:
        """Fence former owners: their decision waits for this block, and fails after it."""
        connection, where = self._open, tuple(key)
        self._generations.pop(key, None)
        async with self._translated(), connection.transaction():
            await connection.execute(f"set local lock_timeout = {LOCK_MS}")
            await connection.execute(_DURABLE)
            try:
                await connection.execute(_ADD, where)
                producer_id, epoch, at = await _row(connection, _LOCK, *where)
            except errors.LockNotAvailable as error:
                raise LockedError(f"PostgreSQL: {key.transactional_id}: {error}") from error
            is_decided = producer_id is not None
            yield Decision(TransactionIdentity(producer_id, epoch), at) if is_decided else None
            (generation,) = await _row(connection, _FENCE, *where)
        self._generations[key] = generation

    @contextlib.asynccontextmanager
    async def transaction(
        self, key: TransactionKey, identity: TransactionIdentity
    ) -> AsyncIterator[AsyncConnection[Any]]:
        """Run the transaction in which the handler writes."""
        connection = self._open
        self._key, self._identity, self._is_decided = key, identity, False
        async with self._translated():
            # psycopg refuses commit() and rollback() in a transaction that tpc_begin has begun,
            # and tpc_commit() without tpc_prepare() is a plain COMMIT.
            await connection.tpc_begin(_gid(key, identity))
        try:
            yield connection
        except HandlerError as error:
            cause, is_closed = error.__cause__, connection.closed
            if isinstance(cause, psycopg.Error) and (
                is_closed or isinstance(cause, psycopg.OperationalError)
            ):
                raise _translation(cause, is_closed=is_closed) from cause
            raise
        finally:
            if not self._is_decided and not connection.closed:
                with contextlib.suppress(psycopg.Error):
                    await connection.tpc_rollback()

    async def decide(self) -> None:
        """Store the identity, and COMMIT or PREPARE TRANSACTION."""
        connection, key = self._open, self._key
        where = (*key, self._generations.get(key))
        async with self._translated():
            await connection.execute(_DURABLE)
            done = await connection.execute(_DECIDE, (*self._identity, *where))
        if done.rowcount != 1:
            raise PartnerFencedError(
                f"another worker has taken over {key.transactional_id} in the database"
            )
        try:
            await (connection.tpc_prepare() if self._prepare else connection.tpc_commit())
        except BaseException as error:
            is_refused = not connection.closed
            # The next owner's connection finds the outcome; this one must not ROLLBACK PREPARED.
            await connection.close()
            if not isinstance(error, psycopg.Error):
                raise
            if is_refused:
                raise _translation(error) from error
            raise InDoubtError(f"PostgreSQL: no answer to a decision: {error}") from error
        self._is_decided = True

    async def finish(self, key: TransactionKey, identity: TransactionIdentity) -> None:
        """Send COMMIT PREPARED, unless another owner of the id has done so."""
        connection = self._open
        if self._is_decided and (key, identity) == (self._key, self._identity):
            if self._prepare:
                async with self._translated():
                    await connection.tpc_commit()
        elif identity in await self.prepared(key):
            async with self._translated():
                with contextlib.suppress(errors.UndefinedObject):
                    await connection.tpc_commit(_gid(key, identity))

    async def roll_back(self, key: TransactionKey, identity: TransactionIdentity) -> None:
        """Send ROLLBACK PREPARED, unless another owner of the id has done so."""
        async with self._translated():
            with contextlib.suppress(errors.UndefinedObject):
                await self._open.tpc_rollback(_gid(key, identity))


async def _row(connection: AsyncConnection[Any], query: LiteralString, *where: str) -> Any:
    """Return the row of a query whose result is exactly one row."""
    return await (await connection.execute(query, where)).fetchone()


def _translation(error: psycopg.Error, *, is_closed: bool = False) -> Exception:
    """Return the pipeline's error for an error of psycopg."""
    if isinstance(error, errors.SerializationFailure | errors.DeadlockDetected):
        return RetryBatch(f"PostgreSQL: {error}")
    if is_closed or isinstance(error, psycopg.OperationalError):
        return PartnerUnavailableError(f"PostgreSQL: {error}")
    return PipelineError(f"PostgreSQL: {type(error).__name__}: {error}")


def _gid(key: TransactionKey, identity: TransactionIdentity) -> str:
    """Return the name of a prepared transaction.

    Raises PipelineError for a transactional id that is too long.
    """
    name = ":".join((PREFIX, *map(str, identity), *key))
    if len(name.encode()) > MAX_GID_BYTES:
        raise PipelineError(
            f"the transactional id {key.transactional_id!r} is too long: the name of a prepared"
            f" transaction, {name!r}, may have {MAX_GID_BYTES} bytes"
        )
    return name


def _parsed(name: str, key: TransactionKey) -> TransactionIdentity | None:
    """Return the identity in a prepared transaction's name; None if the key is not ``key``."""
    parts = name.split(":", 4)
    if parts[3:] != list(key):
        return None
    return TransactionIdentity(int(parts[1]), int(parts[2]))
