"""The documents say what is so: tests, links, files, limits, events, errors and commands that they name exist, and
their examples run."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path

import click
import pytest

import farhand
from chat_server import serving
from farhand import errors, limits
from farhand import event as ev
from farhand.agent import BOXES_KEPT, CodeAgent
from farhand.cli.delivery import FILES_MOST
from farhand.cli.main import cli
from farhand.errors import FarhandError
from farhand.limits import Limits
from farhand.model.local import missing, weights_path
from farhand.registry import DEFAULT_OPENAI_MODEL
from farhand.sandbox.environment import BARE, DEFAULT, path_of
from farhand.sandbox.local.lifecycle import IDLE_S, SWEEP_S
from farhand.sandbox.local.pool import FORKS
from farhand.sandbox.local.zygote import BoxSpec
from farhand.sandbox.port import Sandbox
from farhand.sandbox.runner import bounds
from farhand.testing import ScriptedModel, code
from farhand.testing.models import Item
from farhand.tool import tool

ROOT = Path(__file__).parent.parent
HERE = (ROOT / "README.md").exists() and (ROOT / "docs").is_dir()
pytestmark = pytest.mark.skipif(not HERE, reason="this is no checkout: the documents are not here")
in_a_box = pytest.mark.jail if HERE else pytestmark
"""Where there are no documents a test of theirs is none of the jail, whose tests may not be skipped."""

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]) if HERE else []
DECISIONS = sorted(ROOT.glob("docs/decisions/*.md"))
PAGE_LINES = 150
DECISION_LINES = 40
PLACES = ("", "src/farhand/", "tests/", "docs/", "docs/decisions/")
"""Where a file that a document names may be."""
MADE = {"environment.json", "program.py", "prices.py"}
"""Files that programs make, and that examples name."""
SHUNNED = re.compile(r"\b(robust|seamless\w*|blazing\w*|cutting.edge|just works|powerful|state.of.the.art)\b", re.I)


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=page_id)


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(page), re.M | re.S)


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text_of(page), flags=re.M | re.S)


def table(page: Path, heading: str) -> list[list[str]]:
    """The cells of the rows of the first table after a heading."""
    _, _, after = f"\n{text_of(page)}".partition(f"\n{heading}\n")
    assert after, f"{page_id(page)} has no heading {heading!r}"
    rows: list[list[str]] = []
    for line in after.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        elif rows:
            break
    return rows[2:]


# ---- form ----


@every_page
def test_a_page_is_short_and_plain(page: Path) -> None:
    lines = text_of(page).splitlines()
    longest = {"docs": PAGE_LINES, "decisions": DECISION_LINES}.get(page.parent.name, 400)
    assert len(lines) <= longest or page.name == "benchmarks.md", "it is written by a script"
    assert lines[0].startswith("# ")
    assert not SHUNNED.findall(text_of(page))
    assert not re.search(r"/work/|/tmp/plan", text_of(page))


def test_decisions_are_numbered_and_have_their_three_parts() -> None:
    assert [path.name[:4] for path in DECISIONS] == [f"{number:04}" for number in range(1, len(DECISIONS) + 1)]
    for path in DECISIONS:
        assert re.findall(r"^## (.*)$", text_of(path), re.M) == ["Context", "Decision", "Consequences"], path.name
        assert text_of(path).startswith(f"# {path.name[:4]}: ")


def test_the_architecture_has_one_picture() -> None:
    page = ROOT / "ARCHITECTURE.md"
    assert text_of(page).count("│") > 10
    pictures = [block for block in blocks(page, "text") if "│" in block]
    assert len(pictures) == 1


# ---- what is named exists ----


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        assert to.exists(), f"{target} in {page_id(page)}"
        if anchor:
            assert anchor in anchors(to), f"{target} in {page_id(page)}"


@every_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    named = re.findall(r"`([\w./-]+\.(?:py|md|sql|toml|jsonl))`|`((?:scripts|\.ci|bench)/[\w./-]+)`", prose(page))
    for name in {first or second for first, second in named} - MADE:
        found = [place for place in PLACES if (ROOT / place / name).exists()]
        assert found or any((ROOT / "src").rglob(name)), f"{name} in {page_id(page)}"


@cache
def functions_of(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("name", ["SPECIFICATION.md", "SECURITY.md"])
def test_every_test_that_is_named_exists(name: str) -> None:
    text = text_of(ROOT / name)
    named = {(file.removeprefix("tests/"), test) for file, test in re.findall(r"`([\w/]+\.py)::(\w+)`", text)}
    if name == "SECURITY.md":
        named |= {("jail/test_hardening.py", test) for test in re.findall(r"`(test_\w+)`", text)}
    missing = sorted(f"{file}::{test}" for file, test in named if test not in functions_of(file))
    assert not missing
    assert len(named) > 20


def test_every_promise_has_a_number_of_its_own_and_a_test() -> None:
    _, *promises = re.split(r"^- (?=\*\*)", text_of(ROOT / "SPECIFICATION.md"), flags=re.M)
    numbers = [match[1] for promise in promises if (match := re.match(r"\*\*([A-Z]\d+)\*\* ", promise))]
    assert len(numbers) == len(promises)
    assert len(set(numbers)) == len(numbers)
    assert [promise for promise in promises if "::" not in promise] == []


def test_every_row_of_the_hardening_table_names_a_test() -> None:
    rows = table(ROOT / "SECURITY.md", "## The hardening table")
    assert len(rows) > 20
    assert [row for row in rows if "test_" not in row[2]] == []
    named = set(re.findall(r"test_\w+", text_of(ROOT / "SECURITY.md")))
    assert hardening_tests() <= named


def hardening_tests() -> set[str]:
    """What holds the wall, without what shows that ordinary things work."""
    return {name for name in functions_of("jail/test_hardening.py") if name.startswith("test_")} - {
        "test_loopback_works_inside"
    }


def test_to_change_something_there_is_a_file_to_open() -> None:
    rows = table(ROOT / "ARCHITECTURE.md", "## To change X, open Y")
    assert len(rows) >= 40
    for what, where in rows:
        named = re.findall(r"`([\w./]+)`", where)
        paths = [name for name in named if "/" in name or name.endswith(".py")]
        assert paths, what
        for path in paths:
            assert (ROOT / path).exists() or (ROOT / "src/farhand" / path).exists(), f"{what}: {path}"


# ---- tables that repeat the code ----


def test_every_limit_is_in_the_table_with_its_default() -> None:
    rows = {row[0].strip("`"): row[1] for row in table(ROOT / "docs/sandboxes.md", "## Limits")}
    assert list(rows) == [field.name for field in fields(Limits)]
    for field in fields(Limits):
        assert amount(rows[field.name]) == field.default, field.name


def amount(text: str) -> float:
    number, _, unit = text.replace(",", "").partition(" ")
    return float(number) * {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]


def documented_events() -> dict[str, set[str]]:
    """Type → fields."""
    found: dict[str, set[str]] = {}
    for line in text_of(ROOT / "docs/events.md").splitlines():
        match = re.match(r"\| ((?:`[a-z]+\.[a-z]+`(?:, )?)+) \| (.*) \|$", line)
        for name in re.findall(r"`([a-z.]+)`", match[1]) if match else ():
            assert match is not None
            found[name] = set(re.findall(r"`(\w+)`", match[2]))
    _, _, reserved = text_of(ROOT / "docs/events.md").partition("\n## Reserved\n")
    found |= {name: set() for name in re.findall(r"`([a-z]+\.[a-z]+)`", reserved.partition("\n## ")[0])}
    return found


def test_every_event_type_is_documented() -> None:
    assert set(documented_events()) == set(ev.TYPES)


def test_reserved_types_are_written_by_nothing() -> None:
    names = {value: name for name, value in vars(ev).items() if isinstance(value, str) and value in ev.TYPES}
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    for kind, known in documented_events().items():
        if not known:
            assert not re.search(rf"\b(ev|kind)\.{names[kind]}\b", source), f"{kind} is in use: document its fields"


NUMBERS = (
    ("docs/agents.md", f"SIGKILL after {limits.INTERRUPT_GRACE_S * 1000:g} ms"),
    ("docs/agents.md", f"without renewal, {limits.LEASE_S:g} s"),
    ("docs/agents.md", f"between turns, {BOXES_KEPT};"),
    ("docs/agents.md", f"After {limits.REMINDERS}\nreplies in a row"),
    ("docs/events.md", f"at most {limits.EVENT_BYTES >> 10} KiB; a field larger than {limits.INLINE_BYTES >> 10} KiB"),
    ("docs/events.md", f"{limits.WROTE_INTERVAL_S * 1000:g} ms or {limits.WROTE_BYTES >> 10} KiB"),
    ("docs/events.md", f"{limits.WROTE_KEPT_BYTES >> 10} KiB are kept"),
    ("docs/failures.md", f"or {limits.CALLS_WAITING:,} calls that wait"),
    ("docs/failures.md", f"its lease ({limits.LEASE_S:g} s)"),
    ("docs/tools.md", f"| `timeout_s` | {limits.TOOL_TIMEOUT_S:g} s |"),
    ("docs/models.md", f"longer than {limits.MODEL_REPLY_BYTES >> 20} MiB"),
    ("docs/models.md", f"else `{DEFAULT_OPENAI_MODEL}`"),
    ("docs/sandboxes.md", f"destroyed after {SWEEP_S / 60:g} minutes"),
    ("docs/sandboxes.md", f"with nothing to do ends after {IDLE_S / 60:g}."),
    ("docs/cli.md", f"no more than {FILES_MOST} files"),
    ("docs/protocol.md", f"({limits.SPOOL_BYTES >> 20} MiB; when full"),
    ("docs/protocol.md", f"at most {limits.FRAME_BYTES >> 20} MiB a line"),
    ("docs/protocol.md", f"at most {limits.OUT_CHUNK_BYTES >> 10} KiB of text"),
    ("docs/protocol.md", f"the last {bounds.RAN_KEPT:,} action ids"),
    ("docs/protocol.md", f"nesting deeper than {bounds.DEPTH}"),
    ("SECURITY.md", f"replaced after {FORKS:,} boxes"),
    ("SECURITY.md", f"looks every {bounds.TICK_SAMPLED_S * 1000:g} ms"),
    ("SECURITY.md", f"({BoxSpec().file_descriptors} a process)"),
)


@pytest.mark.parametrize(("page", "said"), NUMBERS)
def test_a_number_is_the_codes(page: str, said: str) -> None:
    assert " ".join(said.split()) in " ".join(text_of(ROOT / page).split())


def test_every_error_is_documented_with_its_code() -> None:
    rows = {row[0].strip("`"): (row[1].strip("`"), row[2]) for row in table(ROOT / "docs/failures.md", "## The errors")}
    classes = [found for found in vars(errors).values() if isinstance(found, type) and issubclass(found, FarhandError)]
    assert rows == {found.__name__: (found.code, "yes" if found.retryable else "no") for found in classes}


def test_every_command_and_option_is_documented() -> None:
    rows = table(ROOT / "docs/cli.md", "# The command line")
    assert {re.findall(r"farhand (\w+)", row[0])[0] for row in rows} == set(cli.commands)
    _, _, options = text_of(ROOT / "docs/cli.md").partition("| option |")
    for name, command in cli.commands.items():
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                pattern = rf"^\| `{parameter.opts[0]}[ `][^|]*\| [^|]*\b{name}\b"
                assert re.search(pattern, options, re.M), f"{parameter.opts[0]} of {name}"


def test_every_public_name_is_in_a_document() -> None:
    text = "".join(text_of(page) for page in PAGES)
    assert [name for name in farhand.__all__ if not re.search(rf"\b{name}\b", text)] == []


# ---- what is shown runs ----


@tool
def drop() -> None:
    """Raises what is no receipt."""
    raise ConnectionResetError("gone")


def test_recorded_events_have_the_documented_fields(tmp_path: Path) -> None:
    lively = "print(1)\ndisplay(2)\nopen('a.txt', 'w').write('x')\ntry: drop()\nexcept ConnectionError: pass"
    replies: list[Item] = [
        code(lively),
        code("import os; os._exit(3)"),
        code("final_answer({'a': 1})"),
        "no code",
        "none",
        "nothing",
    ]
    agent = CodeAgent([drop], ScriptedModel(replies), "subprocess", environment=BARE, home=tmp_path)
    with agent:
        session = agent.run("Do it").session_id
        with pytest.raises(farhand.TurnFailed):
            agent.run("Again", session=session)
    agent = CodeAgent([], ScriptedModel([]), "subprocess", environment=BARE, home=tmp_path)
    events = asyncio.run(all_events(agent, session))
    documented = documented_events()
    assert {event.type for event in events} >= {ev.EFFECT_SETTLED, ev.SANDBOX_LOST, ev.TURN_FAILED, ev.ACTION_WROTE}
    for event in events:
        assert set(event.data) - {"$refs"} <= documented[event.type], event.type


async def all_events(agent: CodeAgent, session: str) -> list[ev.Event]:
    try:
        return await agent.store.read(session)
    finally:
        await agent.aclose()


PYTHON = [(page, block) for page in PAGES for block in blocks(page, "python")]


@pytest.fixture
def scripted(home: Path) -> Iterator[dict[str, str]]:
    """An environment in which a model of this machine is chosen."""
    reply = "```python\nfinal_answer(price('tea') + 2 * price('cake'))\n```\n"
    with serving(reply) as server:
        yield {**os.environ, "FARHAND_HOME": str(home), "FARHAND_MODEL": server.model, "OPENAI_API_KEY": "sk-of-nobody"}


@in_a_box
@pytest.mark.parametrize(("page", "example"), PYTHON, ids=[f"{page_id(p)}-{n}" for n, (p, _) in enumerate(PYTHON)])
def test_every_python_example_runs(
    local: Sandbox, scripted: dict[str, str], tmp_path: Path, page: Path, example: str
) -> None:
    if example.startswith("#%%"):
        program = tmp_path / "prices.py"
        program.write_text(example)
        done = run([sys.executable, "-m", "farhand.cli.main", "exec", str(program)], scripted)
        (expected,) = blocks(page, "text")
        assert done.stdout == expected
        return
    program = tmp_path / "example.py"
    program.write_text(example)
    done = run([sys.executable, str(program)], scripted)
    assert done.returncode == 0, done.stderr
    if page.name == "README.md":
        assert done.stdout.startswith("12.0\nses_")


def run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True, timeout=100)


COMMANDS = [line for block in blocks(ROOT / "README.md", "sh") for line in block.splitlines()] if HERE else []
QUESTION = 'scripts/run "How many r are there in strawberry?"'


@pytest.fixture
def checkout(tmp_path: Path, home: Path) -> Path:
    """The scripts beside this suite's virtual environment, as if setup had made it there and fetched what it needs."""
    weights = missing(home)
    if weights:
        pytest.skip(f"the local model is not set up, {' and '.join(weights)} missing: run scripts/setup")
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    venv = tmp_path / ".venv"
    venv.mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        (venv / name).symlink_to(Path(sys.prefix) / name)
    stamp = 'printf \'%s\\n\' "$PWD" "$(readlink -f .venv/bin/python)" "$(sha256sum <pyproject.toml)"'
    (venv / "stamp").write_text(subprocess.check_output(["bash", "-c", stamp], cwd=tmp_path, text=True))
    place = f"{home} {os.environ.get('XDG_DATA_HOME', '')} {os.environ['HOME']}"
    (venv / "fetched").write_text(f"{place}\n{path_of(DEFAULT, home)}\n{weights_path(home)}\n")
    return tmp_path


def shell(checkout: Path, command: str, environ: dict[str, str]) -> str:
    """What a command of the README prints, run at the top of a checkout."""
    done = run(["bash", "-c", f"cd '{checkout}' && {command}"], environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_command_of_the_readme_is_known_here() -> None:
    assert QUESTION in COMMANDS
    assert "scripts/test" in COMMANDS, "it runs this test"
    assert sum(command.startswith(("scripts/run", "OPENAI_API_KEY=… scripts/run")) for command in COMMANDS) == 4
    assert COMMANDS[-1] == "echo 'print(6 * 7)' | scripts/farhand exec -"
    assert len(COMMANDS) == 6


@in_a_box
@pytest.mark.real_model
def test_the_first_command_answers_with_the_real_model(local: Sandbox, checkout: Path) -> None:
    environ = {name: text for name, text in os.environ.items() if name not in ("OPENAI_API_KEY", "FARHAND_MODEL")}
    assert shell(checkout, QUESTION, environ) == "3\n"


@in_a_box
@pytest.mark.parametrize(
    "command", [command for command in COMMANDS if "scripts/run" in command and command != QUESTION]
)
def test_commands_for_a_larger_model_run(local: Sandbox, checkout: Path, command: str) -> None:
    with serving("```python\nfinal_answer('yes')\n```\n") as server:
        url = server.model.partition("@")[2]
        told = (
            command.replace("http://127.0.0.1:8080/v1", url).replace('"…"', '"a question"').replace("…", "sk-of-nobody")
        )
        environ = {"OPENAI_API_KEY": "sk-of-nobody", **os.environ, "OPENAI_BASE_URL": url}
        assert shell(checkout, told, environ) == "yes\n"


@in_a_box
def test_the_command_without_a_model_runs(local: Sandbox, checkout: Path) -> None:
    assert shell(checkout, COMMANDS[-1], {**os.environ}) == "42\n"


def test_it_can_be_installed_with_pip(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip would fetch it")
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    wanted = ["install", ".", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(tmp_path / "site")]
    done = subprocess.run([sys.executable, "-m", "pip", *wanted], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = run([str(tmp_path / "site/bin/farhand"), "--version"], environ)
    assert done.stdout.startswith("farhand "), done.stderr
