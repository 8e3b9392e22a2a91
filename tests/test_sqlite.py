"""What only several processes, a real disk and a broken file can show about the SQLite record."""

# Files are looked at and processes waited for right here: nothing else has to go on meanwhile.

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import textwrap
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farhand.errors import Conflict, Fenced, Held, StoreError
from farhand.event import EFFECT_INTENDED, MESSAGE_RECEIVED, SESSION_CREATED, Event, NewEvent
from farhand.limits import WAL_PAGES
from farhand.store.lock import LockFile
from farhand.store.schema import APPLICATION_ID, migrations, queries
from farhand.store.sqlite import SqliteStore

pytestmark = pytest.mark.anyio

CREATED = NewEvent(SESSION_CREATED, {"agent": "app:agent"})
HELLO = NewEvent(MESSAGE_RECEIVED, {"text": "hello"})

_PROLOGUE = """
import asyncio, os, sys, time
from farhand.errors import Conflict, Fenced, Held, StoreError
from farhand.event import NewEvent
from farhand.store.sqlite import SqliteStore
path, session_id, name = sys.argv[1:4]
def say(text):
    os.write(1, f"{text}\\n".encode())
def message(**data):
    return NewEvent("message.received", data)
"""


@contextmanager
def process(program: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs `program`; it is gone at the end, however it went."""
    command = [sys.executable, "-c", _PROLOGUE + textwrap.dedent(program), *map(str, arguments)]
    running = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield running
    finally:
        running.kill()
        running.wait()
        for stream in (running.stdin, running.stdout, running.stderr):
            if stream is not None:
                stream.close()


def line(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline().strip()


def go(running: subprocess.Popen[str]) -> None:
    assert running.stdin is not None
    running.stdin.write("go\n")
    running.stdin.flush()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "record.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    async with SqliteStore(path) as made:
        yield made


# The file.


async def test_the_promised_pragmas_stand(store: SqliteStore) -> None:
    found = await store.pragmas()
    assert (found["journal_mode"], found["synchronous"], found["foreign_keys"]) == ("wal", 2, 1)


async def test_the_file_is_made_late_private_and_ours(store: SqliteStore, path: Path) -> None:
    assert not path.parent.exists()
    assert await store.sessions() == []
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with sqlite3.connect(path) as raw:
        assert raw.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
        assert raw.execute("SELECT version, name FROM migrations").fetchall() == [(1, "record")]
    raw.close()


async def test_data_is_stored_as_ascii(store: SqliteStore, path: Path) -> None:
    session_id = await store.create(CREATED)
    await store.append(session_id, None, None, [NewEvent(MESSAGE_RECEIVED, {"text": "é\x00\ud800😀"})])
    with sqlite3.connect(path) as raw:
        (text,) = raw.execute("SELECT data FROM events WHERE seq = 2").fetchone()
    raw.close()
    assert text == r'{"text":"\u00e9\u0000\ud800\ud83d\ude00"}'


async def test_a_record_opened_again_is_the_same(path: Path) -> None:
    async with SqliteStore(path) as first:
        session_id = await first.create(CREATED)
        generation = await first.claim(session_id, "own_a", 60.0)
        await first.append(session_id, 2, generation, [NewEvent(EFFECT_INTENDED, {"effect": "eff_1"})])
        before = await first.read(session_id), await first.sessions(), await first.open_effects(session_id)
    async with SqliteStore(path) as again:
        assert (await again.read(session_id), await again.sessions(), await again.open_effects(session_id)) == before
        await again.append(session_id, 3, generation, [NewEvent("effect.settled", {"effect": "eff_1"})])
        assert await again.open_effects(session_id) == []


async def test_a_newer_record_is_refused_and_left_alone(path: Path) -> None:
    async with SqliteStore(path) as first:
        await first.create(CREATED)
    with sqlite3.connect(path) as raw:
        raw.execute("INSERT INTO migrations VALUES (2, 'later', 'x', 0)")
    raw.close()
    before = path.read_bytes()
    async with SqliteStore(path) as store:
        for call in (store.sessions(), store.create(CREATED), store.rebuild()):
            with pytest.raises(StoreError, match="newer") as caught:
                await call
            assert "Upgrade" in caught.value.hint
    assert path.read_bytes() == before


async def test_an_edited_migration_is_noticed(path: Path) -> None:
    async with SqliteStore(path) as first:
        await first.create(CREATED)
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE migrations SET sha256 = 'x'")
    raw.close()
    async with SqliteStore(path) as store:
        with pytest.raises(StoreError, match="migration 0001"):
            await store.sessions()


async def test_another_programs_database_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE bookmarks (url TEXT)")
    raw.close()
    before = path.read_bytes()
    async with SqliteStore(path) as store:
        with pytest.raises(StoreError, match="another program"):
            await store.create(CREATED)
    assert path.read_bytes() == before


async def test_a_file_that_is_no_database(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"This is not a database. " * 100)
    async with SqliteStore(path) as store:
        with pytest.raises(StoreError, match="no SQLite database") as caught:
            await store.create(CREATED)
        assert caught.value.hint
    assert path.read_bytes() == b"This is not a database. " * 100


async def test_a_damaged_file_is_named_so(path: Path) -> None:
    async with SqliteStore(path) as first:
        session_id = await first.create(CREATED)
        for _ in range(20):
            await first.append(session_id, None, None, [NewEvent(MESSAGE_RECEIVED, {"text": "x" * 9000})] * 5)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 4)
        file.write(os.urandom(size // 2))
    async with SqliteStore(path) as store:
        with pytest.raises(StoreError, match=r"damaged|no SQLite database") as caught:
            await store.read(session_id)
        assert caught.value.hint


async def test_a_path_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with SqliteStore(tmp_path / "file" / "record.db") as store:
        with pytest.raises(StoreError):
            await store.create(CREATED)
    async with SqliteStore(tmp_path) as store:
        with pytest.raises(StoreError):
            await store.create(CREATED)


async def test_a_file_moved_away_acknowledges_nothing_more(store: SqliteStore, path: Path) -> None:
    session_id = await store.create(CREATED)
    path.rename(path.with_name("elsewhere.db"))
    with pytest.raises(StoreError, match="moved or removed"):
        await store.append(session_id, None, None, [HELLO])


def test_migrations_and_queries_are_whole() -> None:
    for migration in migrations("sqlite"):
        with sqlite3.connect(":memory:") as raw:
            for statement in migration.statements():
                raw.execute(statement)
            left = migration.text
            for statement in migration.statements():
                left = left.replace(statement, "")
            assert not left.strip()
            for name, text in queries().items():
                assert sqlite3.complete_statement(text + ";"), name
                raw.execute("EXPLAIN " + text, defaultdict(int))
        raw.close()


READ_ONLY = """
for folder in sys.argv[4].split(","):
    os.chmod(folder, 0o555)
os.chmod(path, 0o444)
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
async def main():
    store = SqliteStore(path)
    created = NewEvent("session.created", {})
    for attempt in (store.append(session_id, None, None, [message(text="x")]), store.create(created)):
        try:
            await attempt
            say("written")
        except StoreError as error:
            say(f"{'read-only' in str(error) or 'opened' in str(error) or 'denied' in str(error)} {bool(error.hint)}")
asyncio.run(main())
"""


async def test_a_read_only_file_says_so(path: Path) -> None:
    async with SqliteStore(path) as store:
        session_id = await store.create(CREATED)
    home = Path(shutil.copytree(path.parent, f"/tmp/fh-read-only-{os.getpid()}"))
    try:
        with process(READ_ONLY, home / path.name, session_id, "-", home) as running:
            output, errors = running.communicate(timeout=30)
        assert output.splitlines() == ["True True", "True True"], errors
    finally:
        home.chmod(0o700)
        shutil.rmtree(home)


FULL = """
async def main():
    store = SqliteStore(path)
    session = await store.create(NewEvent("session.created", {}))
    stood = 1
    try:
        while True:
            stood = (await store.append(session, None, None, [message(text="x" * 9000)] * 8))[-1].seq
    except StoreError as error:
        say(f"full {'full' in error.message} {bool(error.hint)}")
    say(f"intact {[event.seq for event in await store.read(session)] == list(range(1, stood + 1))}")
    os.unlink(name)
    (event,) = await store.append(session, None, None, [message(text="again")])
    say(f"again {event.seq == stood + 1}")
    await store.close()
asyncio.run(main())
"""


async def test_a_full_disk_loses_nothing_and_goes_on_when_there_is_space(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=3m tmpfs {tmp_path} && head -c 1000000 /dev/zero > {tmp_path}/ballast"
    probe = subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no file system of a chosen size can be mounted here: {probe.stderr.strip()}")
    program = _PROLOGUE + textwrap.dedent(FULL)
    inner = f'{mount} && exec "$0" -c "$1" {tmp_path}/record.db - {tmp_path}/ballast'
    command = ["unshare", "-rm", "sh", "-c", inner, sys.executable, program]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ended.stdout.splitlines() == ["full True True", "intact True", "again True"], ended.stderr


# Group commit.


async def test_appends_that_wait_together_are_committed_together(store: SqliteStore) -> None:
    ids = [await store.create(CREATED) for _ in range(20)]
    before = store.commits
    await asyncio.gather(*(store.append(ids[n % 20], None, None, [HELLO]) for n in range(200)))
    assert 1 <= store.commits - before < 50
    assert [one.last_seq for one in await store.sessions()] == [11] * 20


async def test_a_refusal_in_a_group_undoes_itself_only(store: SqliteStore) -> None:
    session_id = await store.create(CREATED)
    generation = await store.claim(session_id, "own_a", 60.0)
    before = store.commits
    attempts = []
    for number in range(40):
        attempts.append(store.append(session_id, None, None, [NewEvent(MESSAGE_RECEIVED, {"number": number})]))
        attempts.append(store.append(session_id, 2, generation, [NewEvent(EFFECT_INTENDED, {"effect": "eff_1"})]))
    outcomes = await asyncio.gather(*attempts, return_exceptions=True)
    assert store.commits - before < 40
    assert {type(outcome) for outcome in outcomes[1::2]} == {Conflict}
    stored = await store.read(session_id, 2)
    assert [event.data for event in stored] == [{"number": number} for number in range(40)]


async def test_a_job_that_fails_in_the_middle_leaves_nothing_and_harms_nobody(store: SqliteStore, path: Path) -> None:
    session_id = await store.create(CREATED)
    with sqlite3.connect(path) as raw:  # the events of such a message are written, then its session's row is refused
        refuse = "WHEN NEW.title = 'refused' BEGIN SELECT RAISE(ABORT, 'refused'); END"
        raw.execute(f"CREATE TRIGGER refuse BEFORE UPDATE ON sessions {refuse}")
    raw.close()
    other = await store.create(CREATED)
    refused = store.append(session_id, None, None, [NewEvent(MESSAGE_RECEIVED, {"text": "refused"})] * 2)
    good = [store.append(other, None, None, [HELLO]) for _ in range(20)]
    outcomes = await asyncio.gather(*good[:10], refused, *good[10:], return_exceptions=True)
    assert [n for n, outcome in enumerate(outcomes) if isinstance(outcome, Exception)] == [10]
    assert isinstance(outcomes[10], StoreError)
    assert len(await store.read(session_id)) == 1
    assert len(await store.read(other)) == 21
    assert (await store.append(session_id, None, None, [HELLO]))[0].seq == 2


async def test_refusals_alone_commit_nothing(store: SqliteStore) -> None:
    session_id = await store.create(CREATED)
    before = store.commits
    with pytest.raises(Fenced):
        await store.append(session_id, 1, 1, [HELLO])
    assert store.commits == before


async def test_derived_rows_that_lag_behind_overwrite_nothing(store: SqliteStore, path: Path) -> None:
    session_id = await store.create(CREATED)
    await store.append(session_id, None, None, [HELLO])
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE sessions SET last_seq = 1")
    raw.close()
    with pytest.raises(StoreError) as caught:
        await store.append(session_id, None, None, [NewEvent(MESSAGE_RECEIVED, {"text": "second"})])
    assert "rebuild" in caught.value.hint
    await store.rebuild()
    await store.append(session_id, None, None, [NewEvent(MESSAGE_RECEIVED, {"text": "second"})])
    assert [event.data.get("text") for event in await store.read(session_id)] == [None, "hello", "second"]


async def test_rebuild_makes_rows_that_were_lost_and_removes_those_without_a_log(
    store: SqliteStore, path: Path
) -> None:
    session_id = await store.create(CREATED)
    generation = await store.claim(session_id, "own_a", 60.0)
    await store.append(session_id, 2, generation, [NewEvent(EFFECT_INTENDED, {"effect": "eff_1"})])
    before = await store.sessions(), await store.open_effects(session_id)
    with sqlite3.connect(path) as raw:
        raw.execute("DELETE FROM effects")
        raw.execute("DELETE FROM sessions")
        raw.execute("INSERT INTO sessions VALUES ('ses_ghost', 0, 0, 9, 'running', '', '', 0, 0, 3)")
    raw.close()
    await store.rebuild()
    assert (await store.sessions(), await store.open_effects(session_id)) == before


async def test_the_write_ahead_log_stays_small(store: SqliteStore, path: Path) -> None:
    session_id = await store.create(CREATED)
    batch = [NewEvent(MESSAGE_RECEIVED, {"text": "x" * 9000})] * 20
    for _ in range(150):
        await store.append(session_id, None, None, batch)
    assert path.stat().st_size > 20_000_000
    assert path.with_name(path.name + "-wal").stat().st_size < 5 * WAL_PAGES * 4096


# Several event loops, stores and processes.


async def test_one_store_serves_several_event_loops(store: SqliteStore) -> None:
    session_id = await store.create(CREATED)

    async def work() -> None:
        await asyncio.gather(*(store.append(session_id, None, None, [HELLO]) for _ in range(20)))
        await store.wait(session_id, 0, 5.0)

    threads = [threading.Thread(target=lambda: asyncio.run(work())) for _ in range(3)]
    for thread in threads:
        thread.start()
    await work()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert [event.seq for event in await store.read(session_id)] == list(range(1, 82))


async def test_two_stores_in_one_process_share_a_file(store: SqliteStore, path: Path) -> None:
    session_id = await store.create(CREATED)
    async with SqliteStore(path) as other:
        waiting = asyncio.ensure_future(store.wait(session_id, 1, 10.0))
        await asyncio.gather(
            *(one.append(session_id, None, None, [HELLO]) for one in (store, other) for _ in range(50))
        )
        assert await waiting
        assert await store.read(session_id) == await other.read(session_id)
        assert len(await store.read(session_id)) == 101


OPEN = """
async def main():
    async with SqliteStore(path) as store:
        say("ready")
        sys.stdin.readline()
        await store.create(NewEvent("session.created", {}), name)
asyncio.run(main())
"""


async def test_many_processes_make_one_file_at_the_same_time(store: SqliteStore, path: Path) -> None:
    from contextlib import ExitStack

    with ExitStack() as stack:
        running = [stack.enter_context(process(OPEN, path, "-", f"ses_{n}")) for n in range(6)]
        for one in running:
            assert line(one) == "ready"
        for one in running:
            go(one)
        for one in running:
            assert await asyncio.to_thread(one.wait, 30) == 0, one.stderr and one.stderr.read()
    assert sorted(one.session_id for one in await store.sessions()) == [f"ses_{n}" for n in range(6)]


CLAIM = """
async def main():
    async with SqliteStore(path) as store:
        await store.read(session_id)
        say("ready")
        sys.stdin.readline()
        for round in range(10):
            target = f"{session_id}-{round}"
            try:
                say(f"{round} {await store.claim(target, name, 600.0)}")
            except Held:
                pass
asyncio.run(main())
"""


async def test_two_processes_race_for_one_claim(store: SqliteStore, path: Path) -> None:
    await store.create(CREATED, "ses_race")
    for number in range(10):
        await store.create(CREATED, f"ses_race-{number}")
    with process(CLAIM, path, "ses_race", "own_a") as a, process(CLAIM, path, "ses_race", "own_b") as b:
        assert (line(a), line(b)) == ("ready", "ready")
        go(a)
        go(b)
        won = [one.communicate(timeout=30)[0].splitlines() for one in (a, b)]
    assert sorted(won[0] + won[1]) == [f"{number} 2" for number in range(10)]
    for number in range(10):
        assert len(await store.read(f"ses_race-{number}")) == 2


STOPPED = """
async def main():
    async with SqliteStore(path) as store:
        generation = await store.claim(session_id, name, 0.3)
        say(generation)
        sys.stdin.readline()
        for attempt in (
            store.append(session_id, generation, generation, [NewEvent("effect.intended", {})]),
            store.renew(session_id, generation, 15.0),
            store.release(session_id, generation, "idle"),
        ):
            try:
                await attempt
                say("done")
            except Fenced:
                say("fenced")
asyncio.run(main())
"""


async def test_a_driver_stopped_past_its_lease_is_fenced_when_it_wakes(store: SqliteStore, path: Path) -> None:
    session_id = await store.create(CREATED)
    with process(STOPPED, path, session_id, "own_a") as driver:
        assert line(driver) == "2"
        driver.send_signal(signal.SIGSTOP)
        try:
            generation = await store.claim(session_id, "own_b", 60.0)
        except Held as held:
            await asyncio.sleep(held.left_s)
            generation = await store.claim(session_id, "own_b", 60.0)
        driver.send_signal(signal.SIGCONT)
        go(driver)
        assert driver.communicate(timeout=30)[0].split() == ["fenced"] * 3
    assert generation == 3
    assert len(await store.read(session_id)) == 3


APPENDERS = """
async def main():
    async with SqliteStore(path) as store:
        say("ready")
        sys.stdin.readline()
        async def one(task):
            for number in range(10):
                await store.append(session_id, None, None, [message(writer=f"{name}.{task}", number=number)] * 2)
        await asyncio.gather(*(one(task) for task in range(17)))
asyncio.run(main())
"""


async def test_fifty_appenders_in_three_processes_leave_no_gap(store: SqliteStore, path: Path) -> None:
    session_id = await store.create(CREATED)
    with (
        process(APPENDERS, path, session_id, "a") as a,
        process(APPENDERS, path, session_id, "b") as b,
        process(APPENDERS, path, session_id, "c") as c,
    ):
        for one in (a, b, c):
            assert line(one) == "ready"
        for one in (a, b, c):
            go(one)
        for one in (a, b, c):
            assert await asyncio.to_thread(one.wait, 60) == 0, one.stderr and one.stderr.read()
    events = await store.read(session_id)
    assert [event.seq for event in events] == list(range(1, 1 + 3 * 17 * 10 * 2 + 1))
    by_writer = defaultdict(list)
    for event in events[1:]:
        by_writer[event.data["writer"]].append(event.data["number"])
    assert set(map(tuple, by_writer.values())) == {tuple(n for n in range(10) for _ in "ab")}
    assert (await store.sessions())[0].last_seq == len(events)


KILLED = """
async def main():
    store = SqliteStore(path)
    async def one(task):
        number = 0
        while True:
            events = [message(writer=f"{name}.{task}", number=number, part=part, pad="x" * 3000) for part in range(3)]
            await store.append(session_id, None, None, events)
            say(f"{name}.{task} {number}")
            number += 1
    await asyncio.gather(*(one(task) for task in range(8)))
asyncio.run(main())
"""


def check_acknowledged(events: list[Event], acknowledged: set[tuple[str, int]]) -> None:
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    parts = defaultdict(list)
    for event in events[1:]:
        parts[event.data["writer"], event.data["number"]].append(event.data["part"])
    assert acknowledged <= set(parts)
    assert set(map(tuple, parts.values())) == {(0, 1, 2)}


async def test_kill_9_loses_nothing_acknowledged_and_leaves_no_half_batch(store: SqliteStore, path: Path) -> None:
    session_id = await store.create(CREATED)
    chance = random.Random(7)
    acknowledged: set[tuple[str, int]] = set()
    for number in range(8):
        with process(KILLED, path, session_id, f"a{number}") as a, process(KILLED, path, session_id, f"b{number}") as b:
            for _ in range(chance.randrange(1, 60)):  # then it is killed, wherever it is
                writer, count = line(a).split()
                acknowledged.add((writer, int(count)))
            a.kill()
            line(b)
            await asyncio.sleep(chance.random() * 0.02)
            b.kill()
            for one in (a, b):
                for said in one.communicate(timeout=30)[0].splitlines():
                    writer, count = said.split()
                    acknowledged.add((writer, int(count)))
        check_acknowledged(await store.read(session_id), acknowledged)
    assert len(acknowledged) > 50
    with sqlite3.connect(path) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    raw.close()
    before = await store.sessions()
    await store.rebuild()
    assert await store.sessions() == before


async def test_kill_9_while_the_file_is_made(tmp_path: Path) -> None:
    chance = random.Random(11)
    for number in range(6):
        path = tmp_path / f"{number}.db"
        with process(OPEN, path, "-", "ses_a") as making:
            assert line(making) == "ready"
            go(making)
            await asyncio.sleep(chance.random() * 0.02)
            making.kill()
            making.wait()
        async with SqliteStore(path) as store:
            assert [one.session_id for one in await store.sessions()] in ([], ["ses_a"])
            await store.create(CREATED, "ses_b")


async def test_a_lock_kept_by_others_ends_in_an_error_and_then_goes_on(path: Path) -> None:
    async with SqliteStore(path, busy_s=0.1) as store:
        session_id = await store.create(CREATED)
        turn = LockFile(path.with_name(path.name + "-turn"))
        assert turn.try_lock()
        with pytest.raises(StoreError, match="locked"):
            await store.append(session_id, None, None, [HELLO])
        turn.close()
        raw = sqlite3.connect(path, isolation_level=None)
        raw.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked") as caught:
            await store.append(session_id, None, None, [HELLO])
        assert caught.value.hint
        assert len(await store.read(session_id)) == 1  # reading goes on meanwhile
        raw.close()
        (event,) = await store.append(session_id, None, None, [HELLO])
        assert event.seq == 2


FORKED = """
async def use(store):
    try:
        await store.create(NewEvent("session.created", {}))
        return "used"
    except StoreError as error:
        return "refused" if "fork" in error.message else str(error)
async def read(store):
    try:
        return f"read{len(await store.sessions())}"
    except StoreError as error:
        return "refused" if "fork" in error.message else str(error)
store = SqliteStore(path)
print(asyncio.run(use(store)), flush=True)
if os.fork() == 0:
    print(asyncio.run(use(store)), flush=True)
    print(asyncio.run(read(store)), flush=True)
    os._exit(0)
os.wait()
print(asyncio.run(use(store)), flush=True)
"""


async def test_a_store_is_refused_in_a_forked_child(path: Path) -> None:
    with process(FORKED, path, "-", "-") as running:
        output, errors = running.communicate(timeout=30)
    assert output.split() == ["used", "refused", "refused", "used"], errors


SAYS_WHEN = """
async def main():
    async with SqliteStore(path) as store:
        await store.read(session_id)
        say("ready")
        while sys.stdin.readline():
            await store.append(session_id, None, None, [message(text="x")])
            say(time.monotonic())
asyncio.run(main())
"""


async def test_wait_sees_what_another_process_appends(store: SqliteStore, path: Path) -> None:
    session_id = await store.create(CREATED)
    with process(SAYS_WHEN, path, session_id, "-") as other:
        assert line(other) == "ready"
        for last in range(1, 6):
            waiting = asyncio.ensure_future(store.wait(session_id, last, 30.0))
            await asyncio.sleep(0)
            go(other)
            assert await waiting
            assert [event.seq for event in await store.read(session_id, last)] == [last + 1]


@pytest.mark.timing
async def test_wait_sees_it_within_50_ms(store: SqliteStore, path: Path) -> None:
    session_id = await store.create(CREATED)
    late = []
    with process(SAYS_WHEN, path, session_id, "-") as other:
        assert line(other) == "ready"
        for last in range(1, 21):
            waiting = asyncio.ensure_future(store.wait(session_id, last, 30.0))
            await asyncio.sleep(0.03)
            go(other)
            assert await waiting
            seen = time.monotonic()
            late.append(seen - float(await asyncio.to_thread(line, other)))
    assert statistics.median(late) <= 0.05, late


@pytest.mark.timing
async def test_wait_sees_an_append_of_its_own_process_at_once(store: SqliteStore) -> None:
    session_id = await store.create(CREATED)
    late = []
    for last in range(1, 41):
        waiting = asyncio.ensure_future(store.wait(session_id, last, 30.0))
        await store.read(session_id)
        await store.append(session_id, None, None, [HELLO])
        begun = time.monotonic()
        assert await waiting
        late.append(time.monotonic() - begun)
    assert statistics.median(late) < 0.003, late


@pytest.mark.timing
async def test_waiting_costs_next_to_nothing(store: SqliteStore) -> None:
    session_id = await store.create(CREATED)
    assert not await store.wait(session_id, 1, 0.01)
    begun = time.process_time()
    assert not await store.wait(session_id, 1, 1.0)
    assert time.process_time() - begun < 0.05
    begun = time.process_time()
    await asyncio.sleep(1.0)  # nobody waits
    assert time.process_time() - begun < 0.01


@pytest.mark.timing
async def test_an_append_costs_little_more_than_a_bare_commit() -> None:
    """On memory, where a flush is free: the difference is ours."""
    folder = Path(f"/dev/shm/fh-{os.getpid()}")
    folder.mkdir()
    try:
        raw = sqlite3.connect(folder / "bare.db", isolation_level=None)
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            raw.execute(f"PRAGMA {pragma}")
        raw.execute("CREATE TABLE events (seq INTEGER PRIMARY KEY, data TEXT)")
        bare, ours = [], []
        async with SqliteStore(folder / "record.db") as store:
            session_id = await store.create(CREATED)
            for number in range(400):
                begun = time.perf_counter()
                raw.execute("BEGIN IMMEDIATE")
                raw.execute("INSERT INTO events VALUES (?, ?)", (number, "x" * 200))
                raw.execute("COMMIT")
                bare.append(time.perf_counter() - begun)
                begun = time.perf_counter()
                await store.append(session_id, None, None, [NewEvent(MESSAGE_RECEIVED, {"text": "x" * 200})])
                ours.append(time.perf_counter() - begun)
        raw.close()
    finally:
        shutil.rmtree(folder)
    assert statistics.median(ours) - statistics.median(bare) < 0.0003
