"""The bench's own arithmetic, and what its exit code says. What it measures is measured by scripts/bench alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest

from farhand.event import SESSION_CREATED, NewEvent
from farhand.store.sqlite import SqliteStore

ROOT = Path(__file__).parent.parent
if not (ROOT / "bench").is_dir():
    pytest.skip("this is no checkout: the bench is not here", allow_module_level=True)
sys.path.insert(0, str(ROOT))

from bench import __main__ as program  # noqa: E402
from bench import call, command, machine, memory, report  # noqa: E402
from bench.bench import Bench  # noqa: E402
from bench.comparator import ComparatorMissing, PlainWorker, split  # noqa: E402
from bench.contest import Control, contest, contestant, ours  # noqa: E402
from bench.figure import Figure, Promise, Series, exit_code, quantile, shown  # noqa: E402
from bench.program import CASES, PROGRAMS, programs  # noqa: E402

PLAIN = [sys.executable, "-I", "-S", str(ROOT / "bench" / "drivers" / "plain.py")]


def series(*samples: float, promise: Promise | None = None, problem: str = "", name: str = "Farhand") -> Series:
    return Series(name, promise, samples=list(samples), problem=problem)


def figure(*all_: Series) -> Figure:
    return Figure("warm", "A warm action", "How it is done.", "ms", list(all_))


def test_quantiles_are_samples() -> None:
    samples = [float(number) for number in range(100, 0, -1)]
    assert quantile(samples, 0.95) == 95.0
    assert quantile(samples, 0.5) == 50.0
    assert quantile([7.0], 0.95) == 7.0
    assert quantile([1.0, 2.0], 1.0) == 2.0
    with pytest.raises(ValueError):
        quantile([], 0.5)


def test_the_median_of_two_lies_between_them() -> None:
    assert series(1.0, 2.0).p50 == 1.5


@pytest.mark.parametrize(
    ("promise", "samples", "verdict"),
    [
        (Promise(2.0), (1.0, 2.0, 9.0), "kept"),
        (Promise(2.0), (1.0, 2.1, 2.1), "missed"),
        (Promise(0.97, at_most=False), (0.5, 0.97, 1.0), "kept"),
        (Promise(0.97, at_most=False), (0.96, 0.96, 2.0), "missed"),
        (None, (1.0,), ""),
        (Promise(2.0), (), "missing"),
        (None, (), "missing"),
    ],
)
def test_the_p50_decides(promise: Promise | None, samples: tuple[float, ...], verdict: str) -> None:
    assert series(*samples, promise=promise).verdict == verdict


def test_one_that_failed_in_the_middle_is_missing_whatever_its_samples_say() -> None:
    assert series(1.0, promise=Promise(2.0), problem="it died").verdict == "missing"


def test_the_exit_code() -> None:
    kept, missed = series(1.0, promise=Promise(2.0)), series(3.0, promise=Promise(2.0))
    other = series(5.0, name="plain subprocess")
    gone = series(name="bwrap python3", problem="bwrap is not installed")
    assert exit_code([figure(kept, other)]) == 0
    assert exit_code([figure(kept, other), figure(missed, other)]) == 1
    assert exit_code([figure(kept, gone)]) == 1
    assert exit_code([]) == 1


def test_ratios_are_taken_to_the_first_row() -> None:
    one = figure(series(2.0), series(6.0, name="plain subprocess"), series(name="gone", problem="x"))
    assert one.ratio(one.series[1]) == 3.0
    assert one.ratio(one.series[2]) is None
    assert figure(series(), series(1.0)).ratio(series(1.0)) is None


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0, "0"), (0.01234, "0.0123"), (1.234, "1.23"), (12.34, "12.3"), (1234.5, "1,234"), (-2, "-2.00")],
)
def test_three_digits_are_shown(number: float, text: str) -> None:
    assert shown(number) == text


def recorder(name: str, seen: list[str], fails_at: int = 0) -> Callable[[], Awaitable[float]]:
    async def sample() -> float:
        seen.append(name)
        if seen.count(name) == fails_at:
            raise ComparatorMissing("it is gone")
        return float(seen.count(name))

    return sample


@pytest.fixture
def control() -> Iterator[Control]:
    control = Control()
    yield control
    control.close()


@pytest.mark.anyio
async def test_contestants_take_turns_and_the_first_sample_is_not_kept(control: Control) -> None:
    seen: list[str] = []
    third = contestant("c", recorder("c", seen), every=2)
    found = await contest(4, [ours(recorder("a", seen)), contestant("b", recorder("b", seen)), third], control)
    assert [one.samples for one in found] == [[2.0, 3.0, 4.0, 5.0], [2.0, 3.0, 4.0, 5.0], [2.0, 3.0]]
    assert "".join(seen) == "aabbcc" + "ba" + "cab" + "ab"
    assert len(control.samples) == 4


@pytest.mark.anyio
async def test_one_that_fails_drops_out_and_the_others_go_on(control: Control) -> None:
    seen: list[str] = []
    found = await contest(3, [ours(recorder("a", seen)), contestant("b", recorder("b", seen, fails_at=3))], control)
    assert len(found[0].samples) == 3
    assert found[1].problem == "ComparatorMissing: it is gone"
    assert exit_code([figure(*found)]) == 1


def test_the_document_says_what_was_promised_and_what_failed() -> None:
    one = figure(
        series(0.1, 0.4, promise=Promise(0.3)),
        series(0.1, promise=Promise(0.3), name="Farhand, bare environment"),
        series(0.6, name="plain subprocess"),
        series(name="bwrap python3", problem="no | bwrap"),
    )
    text = report.markdown([one], {"kernel": "Linux 6"})
    assert "| A warm action | ≤ 0.3 ms | 0.250 ms | 2 | kept |" in text
    assert "| A warm action (bare environment) | ≤ 0.3 ms | 0.100 ms | 1 | kept |" in text
    assert "- warm: bwrap python3 is missing: no | bwrap" in text
    assert "| plain subprocess | 1 | 0.600 | 0.600 | 0.600 | 2.40 × |" in text
    assert "missing: no \\| bwrap" in text
    assert "| kernel | Linux 6 |" in text
    assert "**missed**" in report.markdown([figure(series(1.0, promise=Promise(0.3)))], {})


def measuring(*all_: Series) -> Callable[[Bench], Awaitable[Figure]]:
    async def measure(bench: Bench) -> Figure:
        return figure(*all_)

    return measure


async def failing(bench: Bench) -> Figure:
    raise ComparatorMissing("there is no host")


def run(
    arguments: Sequence[str], measures: dict[str, program.Measure], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    document = folder / "benchmarks.md"
    return program.main(arguments, measures, document), document


def test_a_run_in_which_all_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = measuring(series(0.2, promise=Promise(0.3)))
    code, document = run([], {"warm": kept}, tmp_path, monkeypatch)
    assert code == 0
    assert "| A warm action | ≤ 0.3 ms | 0.200 ms | 1 | kept |" in document.read_text()
    assert "load average" in document.read_text()
    assert "KEPT" in capsys.readouterr().out
    assert list((tmp_path / "cache" / "farhand").iterdir()) == [], "nothing is left of the run"


@pytest.mark.parametrize(
    "measure",
    [
        measuring(series(0.4, promise=Promise(0.3))),
        measuring(series(0.2, promise=Promise(0.3)), series(name="Jupyter kernel", problem="no network")),
        failing,
    ],
    ids=["missed", "missing", "stopped"],
)
def test_a_run_that_fails_says_why(
    measure: program.Measure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = measuring(series(0.2, promise=Promise(0.3)))
    code, document = run([], {"one": kept, "two": measure}, tmp_path, monkeypatch)
    assert code == 1
    assert "FAILED: " in capsys.readouterr().out
    assert "What fails this run:" in document.read_text()


@pytest.mark.parametrize("arguments", [["--quick"], ["--only", "warm"]])
def test_a_part_of_a_run_writes_nothing(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measures = {"warm": measuring(series(0.2, promise=Promise(0.3))), "other": measuring(series(0.2))}
    code, document = run(arguments, measures, tmp_path, monkeypatch)
    assert code == 0
    assert not document.exists()
    assert capsys.readouterr().out.count("A warm action") == (1 if "--only" in arguments else 2)


def test_an_unknown_figure_is_a_usage_error() -> None:
    done = subprocess.run([sys.executable, "-m", "bench", "--only", "x"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "first-pandas" in done.stderr


def test_every_promised_figure_is_measured() -> None:
    expected = ["first", "first-pandas", "pooled", "warm", "cpu", "call", "memory", "pipe", "import", "help"]
    assert list(program.MEASURES) == expected


def test_code_is_split_into_statements_and_the_trailing_expression() -> None:
    assert split("a = 1\na + 1") == ("a = 1", "a + 1")
    assert split("1 + 1") == ("", "1 + 1")
    assert split("a = 1") == ("a = 1", "")
    assert split("") == ("", "")


def test_a_plain_worker_keeps_its_variables_and_is_drained() -> None:
    worker = PlainWorker(PLAIN)
    try:
        assert worker.run("a = 20\na + 1") == "21"
        assert worker.run("a * 'ä'") == repr(20 * "ä")
        assert worker.run("'x' * 100000") == repr("x" * 100_000)
        assert worker.run_split("import os; os.write(1, b'y' * 300000)", "a", flood=300_000) == "20"
    finally:
        worker.close()


def test_a_worker_that_ends_is_missing() -> None:
    worker = PlainWorker([sys.executable, "-c", ""])
    try:
        with pytest.raises((ComparatorMissing, BrokenPipeError)):
            worker.run("1 + 1")
    finally:
        worker.close()


def test_the_programs_give_what_is_expected_of_them() -> None:
    found = programs(CASES)
    assert len(found) == PROGRAMS
    worker = PlainWorker(PLAIN)
    try:
        for case in found:
            assert worker.run_split(*case.parts) == case.expected, case.name
            assert worker.run_split(*case.repeated(2).parts) == case.expected, case.name
        assert memory.cpu_ms([worker.pid]) > 0
    finally:
        worker.close()


def test_memory_is_counted_by_process() -> None:
    worker = PlainWorker(PLAIN)
    try:
        worker.run("1 + 1")
        assert memory.tree(worker.pid) == [worker.pid]
        assert worker.pid in memory.tree(os.getpid())
        assert memory.by_namespace([worker.pid, os.getpid()]) == [[worker.pid, os.getpid()]]
        before = memory.pss([worker.pid])
        worker.run("kept = b'x' * 20_000_000")
        assert 19_000_000 < memory.pss([worker.pid]) - before < 25_000_000
    finally:
        worker.close()


def test_cpu_time_of_a_command() -> None:
    loop = "t = 0\nwhile __import__('time').process_time() < 0.2: t += 1"
    assert command.over_bare(sys.executable, loop) > 100
    with pytest.raises(ComparatorMissing):
        command.cpu_ms([sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.anyio
async def test_the_pragmas_are_those_of_the_connection_that_writes(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "farhand.db") as store:
        await store.create(NewEvent(SESSION_CREATED, {}))
        assert "journal_mode=wal, synchronous=FULL" in await call.pragmas(store)


def test_what_is_said_of_the_machine(tmp_path: Path) -> None:
    assert machine.noise([]) == "not measured"
    assert machine.noise([0.01, 0.02, 0.5]) == "min 0.0100, p50 0.0200, p95 0.500 ms (n 3)"
    pressure = machine.Pressure()
    assert pressure.told().endswith(("of the run", "does not say"))
    assert len(machine.load().split()) == 3
