"""`farhand run` as a person and as a program call it, with a model on this machine and the subprocess sandbox."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chat_server import serving
from farhand.cli.run import view_for
from farhand.sandbox.subprocess import SubprocessSandbox
from pseudo_terminal import PseudoTerminal

FARHAND = [sys.executable, "-m", "farhand.cli.main"]
ANSWER = "I count.\n```python\nprint('counting')\nfinal_answer('strawberry'.count('r'))\n```\n"
KEY = {"OPENAI_API_KEY": "sk-of-nobody"}


def environ(home: Path, **more: str) -> dict[str, str]:
    """A record of its own; the environments built before."""
    (home / "environments").symlink_to(Path(os.environ["FARHAND_HOME"]) / "environments")
    return {**os.environ, **KEY, "FARHAND_HOME": str(home), **more}


def run_piped(home: Path, model: str, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*FARHAND, "run", "--sandbox", "subprocess", "--model", model, *arguments]
    return subprocess.run(command, env=environ(home), capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload,no-any-return]


def on_terminal(home: Path, cwd: Path, model: str, *arguments: str, columns: int = 80, **more: Any) -> PseudoTerminal:
    command = [*FARHAND, "run", "--sandbox", "subprocess", "--model", model, *arguments]
    return PseudoTerminal(command, columns=columns, environ=environ(home, **more), cwd=cwd)


@pytest.fixture
def own_home(tmp_path: Path) -> Iterator[Path]:
    """A record of its own. No box of it may be left."""
    folder = tmp_path / "home"
    folder.mkdir()
    yield folder
    assert asyncio.run(destroy_boxes(folder)) == 0


async def destroy_boxes(home: Path) -> int:
    """How many boxes there were."""
    sandbox = SubprocessSandbox(home)
    boxes = await sandbox.list({})
    for box in boxes:
        await box.destroy()
    return len(boxes)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def test_a_pipe_gets_the_answer_alone(own_home: Path) -> None:
    with serving(ANSWER) as server:
        done = run_piped(own_home, server.model, "How many r?")
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


def test_the_task_can_come_from_standard_input(own_home: Path) -> None:
    with serving(ANSWER) as server:
        done = run_piped(own_home, server.model, "-", input="How many\nr?")
        assert "How many\nr?" in json.dumps(server.asked[0]).replace("\\n", "\n")
    assert (done.returncode, done.stdout) == (0, "3\n")


def test_a_task_that_is_no_text_is_a_usage_error(own_home: Path) -> None:
    command = [*FARHAND, "run", "--model", "openai:x", "-"]
    done = subprocess.run(command, input=b"\xff\xfe", env=environ(own_home), capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"the task is not UTF-8 text" in done.stderr


def test_a_base_url_that_is_none_is_a_usage_error(own_home: Path) -> None:
    told = environ(own_home, OPENAI_BASE_URL="nonsense")
    done = subprocess.run([*FARHAND, "run", "x"], env=told, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "OPENAI_BASE_URL 'nonsense' is no URL" in done.stderr


def test_json_prints_every_event_on_a_line(own_home: Path) -> None:
    with serving(ANSWER) as server:
        done = run_piped(own_home, server.model, "--json", "How many r?")
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[0]["data"]["agent"] == f"farhand run --model {server.model} --sandbox subprocess"
    types = [event["type"] for event in events]
    for expected in ("message.received", "model.replied", "action.started", "action.finished", "turn.answered"):
        assert expected in types


def test_a_turn_without_an_answer_fails(own_home: Path) -> None:
    with serving("I", "do not", "know.") as server:
        done = run_piped(own_home, server.model, "What?")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("farhand: no answer: ")


def test_a_limit_has_an_exit_code_of_its_own(own_home: Path) -> None:
    with serving("```python\nx = 1\n```", ANSWER) as server:
        done = run_piped(own_home, server.model, "--max-steps", "1", "What?")
    assert (done.returncode, done.stdout) == (3, "")
    assert "steps" in done.stderr


def test_the_hint_of_a_limit_can_be_followed(own_home: Path) -> None:
    with serving("```python\nx = 1\n```", ANSWER) as server:
        done = run_piped(own_home, server.model, "--max-steps", "1", "What?")
    assert done.stderr.splitlines() == [
        "farhand: no answer: the limit `steps` was reached: 1 step",
        '  Raise it with --max-steps N, or go on with it: farhand run --session last "…".',
    ]


def test_a_task_that_takes_too_long_reaches_a_limit(own_home: Path) -> None:
    with serving("```python\nwhile True: pass\n```") as server:
        done = run_piped(own_home, server.model, "--timeout", "2", "What?")
    assert (done.returncode, done.stdout) == (3, "")
    assert "turn_s" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run", "--model", "nonsense", "x"], "--model PROVIDER:NAME"),
        (["run", "--sandbox", "nowhere", "--model", "openai:x", "x"], "nowhere"),
        (["run", "--model", "openai:x", "  "], "the task is empty"),
        (["run"], "Missing argument"),
        (["run", "--max-steps", "0", "x"], "--max-steps"),
        (["run", "--model", "openai:x", "--tools", "/none/such.py", "x"], "/none/such.py"),
        (["nonsense"], "nonsense"),
        (["run", "-5 + 3"], 'farhand run -- "-5 + 3"'),
        (["run", "--timeout", "abc", "x"], "'abc' is not a valid number of seconds"),
        (["run", "--timeout", "nan", "x"], "'nan' is not a valid number of seconds"),
        (["run", "--max-steps", "abc", "x"], "'abc' is not a valid whole number"),
        (["run", "--model", "local:foo", "x"], "takes no name"),
        (["run", "--model", "openai:", "x"], "names no model"),
        (["run", "--model", "openai:@http://127.0.0.1:1/v1", "x"], "names no model"),
        (["run", "--model", "openai:foo@nonsense", "x"], "'nonsense' is no URL"),
        (["run", "--model", "openai:foo@", "x"], "'' is no URL"),
        (["run", "--model", "openai:foo@http://h:99999/v1", "x"], "is no URL"),
        (["run", "--model", "openai:x", "--file", "/none/such", "x"], "/none/such"),
        (["run", "--model", "openai:x", "--file", "/usr", "x"], "/usr: it is a folder"),
        (["run", "--model", "openai:x", "--out", "/dev/null", "x"], "--out /dev/null: it is no folder"),
    ],
)
def test_wrong_calls_are_usage_errors(arguments: list[str], says: str, own_home: Path) -> None:
    done = subprocess.run([*FARHAND, *arguments], env=environ(own_home), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_is_no_traceback(own_home: Path) -> None:
    with serving(*["```python\nprint('x' * 9000)\n```"] * 9) as server:
        command = [*FARHAND, "run", "--sandbox", "subprocess", "--model", server.model, "--json", "go"]
        with subprocess.Popen(
            command, env=environ(own_home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as program:
            assert program.stdout is not None
            assert program.stderr is not None
            assert program.stdout.readline()
            program.stdout.close()
            assert program.stderr.read() == ""
            assert program.wait(60) == 1


def test_a_person_sees_the_course_of_it(own_home: Path, here: Path) -> None:
    files = "```python\nopen('out.txt', 'w').write('hello')\nimport sys\nprint('oh', file=sys.stderr)\n```"
    with serving(files, ANSWER) as server, on_terminal(own_home, here, server.model, "How many r?") as terminal:
        assert terminal.finish() == 0
    text = terminal.text
    positions = [text.index(part) for part in ("step 1", "open('out.txt'", "┆ oh", "step 2", "I count.", "│ counting")]
    assert positions == sorted(positions)
    assert "\nAnswer\n3\n" in text
    assert "240 tokens" in text.replace("200 tokens in, 40 out", "240 tokens")
    assert "→ ./out.txt" in text
    assert (here / "out.txt").read_text() == "hello"
    assert "\x1b[" in terminal.output, "code and answer are coloured"
    assert text.count("open('out.txt'") == 1


def test_an_existing_file_is_left_alone(own_home: Path, here: Path) -> None:
    (here / "out.txt").write_text("mine")
    files = "```python\nopen('out.txt', 'w').write('hello')\nfinal_answer('done')\n```"
    with serving(files) as server, on_terminal(own_home, here, server.model, "go") as terminal:
        assert terminal.finish() == 0
    assert "not copied: a file of this name is here already" in terminal.text
    assert (here / "out.txt").read_text() == "mine"


@pytest.mark.parametrize("columns", [80, 200])
def test_no_line_is_wider_than_the_terminal_unless_it_has_no_space(columns: int, own_home: Path, here: Path) -> None:
    code = "print('y' * 500)\nprint('v ' * 300)\nfinal_answer('w ' * 300)"
    reply = f"{'word ' * 100}\n```python\n{code}\n```"
    with serving(reply) as server, on_terminal(own_home, here, server.model, "go", columns=columns) as terminal:
        assert terminal.finish() == 0
    wide = [line for line in terminal.text.splitlines() if len(line) > columns and not line.startswith("files ")]
    assert wide == [f"  │ {'y' * 500}"]


TALKS = """
import os
print("the file is loaded")
def talk() -> int:
    print("from the tool")
    os.system("echo from a program")
    return 3
TOOLS = {"talk": talk}
"""


def test_what_tools_print_is_no_part_of_the_answer(own_home: Path, here: Path) -> None:
    (here / "tools.py").write_text(TALKS)
    with serving("```python\nfinal_answer(talk())\n```") as server:
        done = run_piped(own_home, server.model, "--tools", str(here / "tools.py"), "go")
    assert (done.returncode, done.stdout) == (0, "3\n")
    for said in ("the file is loaded", "from the tool", "from a program"):
        assert f"{said}\n" in done.stderr


def test_what_tools_print_is_no_event(own_home: Path, here: Path) -> None:
    (here / "tools.py").write_text(TALKS)
    with serving("```python\nfinal_answer(talk())\n```") as server:
        done = run_piped(own_home, server.model, "--json", "--tools", str(here / "tools.py"), "go")
    assert json.loads(done.stdout.splitlines()[-1])["type"] in ("turn.answered", "session.released")
    assert all(json.loads(line)["type"] for line in done.stdout.splitlines())
    assert "from the tool\n" in done.stderr


def test_a_person_sees_what_tools_print_on_lines_of_its_own(own_home: Path, here: Path) -> None:
    (here / "tools.py").write_text(TALKS)
    with (
        serving("```python\nfinal_answer(talk())\n```") as server,
        on_terminal(own_home, here, server.model, "--tools", "tools.py", "go") as terminal,
    ):
        assert terminal.finish() == 0
    assert "  → talk() [opaque]\n" in terminal.text
    assert "\n  ┊ from the tool\n" in terminal.text


FIGURE = """```python
open('out.txt', 'w').write('hello')
from PIL import Image
display(Image.new('RGB', (2, 2)))
final_answer(Image.new('RGB', (3, 3)))
```"""


def test_a_pipe_is_told_where_the_files_are(own_home: Path) -> None:
    with serving(FIGURE) as server:
        done = run_piped(own_home, server.model, "go")
    assert done.returncode == 0
    (session,) = (own_home / "sessions").iterdir()
    answer = Path(done.stdout.strip())
    assert answer.parent == session / "displays"
    assert answer.read_bytes().startswith(b"\x89PNG")
    assert done.stderr == f"session {session.name} files {session}/files figures {session}/displays\n"
    assert (session / "displays" / "figure-1.png").exists()


def test_out_takes_files_and_figures_and_overwrites_nothing(own_home: Path, here: Path) -> None:
    (here / "out").mkdir()
    (here / "out" / "out.txt").write_text("mine")
    with serving(FIGURE) as server:
        done = run_piped(own_home, server.model, "--out", "out", "go", cwd=here)
    assert sorted(path.name for path in (here / "out").iterdir()) == ["figure-1.png", "figure-2.png", "out.txt"]
    assert done.stderr.splitlines() == [
        "farhand: not kept: out.txt: a file of this name is here already",
        "farhand: kept out/figure-1.png",
        "farhand: kept out/figure-2.png",
    ]
    assert (here / "out" / "out.txt").read_text() == "mine"


def test_a_file_is_there_when_the_first_action_starts(own_home: Path, here: Path) -> None:
    (here / "data.csv").write_text("a,b\n1,2\n")
    reply = "```python\nfinal_answer(open('/workspace/data.csv').read() if __import__('os').path.exists('/workspace') "
    reply += "else open('data.csv').read())\n```"
    with serving(reply) as server:
        done = run_piped(own_home, server.model, "--file", "data.csv", "What is in it?", cwd=here)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a,b\n1,2\n\n", "")


def test_a_session_goes_on(own_home: Path) -> None:
    first = "```python\nopen('kept.txt', 'w').write('k')\nfinal_answer('one')\n```"
    second = "```python\nfinal_answer(open('kept.txt').read())\n```"
    with serving(first, second) as server:
        assert run_piped(own_home, server.model, "One?").stdout == "one\n"
        (own_home / "environments").unlink()
        done = run_piped(own_home, server.model, "--session", "last", "--json", "Two?")
        assert "One?" in json.dumps(server.asked[1])
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events[0]["type"] == "message.received"
    (answered,) = [event for event in events if event["type"] == "turn.answered"]
    assert answered["data"]["answer"]["value"] == "k"
    assert len(list((own_home / "sessions").iterdir())) == 1


def test_a_person_is_told_that_the_model_is_waited_for(own_home: Path, here: Path) -> None:
    with serving() as server, on_terminal(own_home, here, server.model, "go") as terminal:
        terminal.wait_for("waiting for fake… 2 s")
        terminal.press_ctrl_c()
        assert terminal.finish() == 130


def test_the_note_of_the_small_model_comes_into_a_pipe_too(capsys: pytest.CaptureFixture[str], own_home: Path) -> None:
    for as_json in (False, True):
        view_for(as_json, io.StringIO(), own_home).note("solves one-line tasks only")
        assert capsys.readouterr().err == "solves one-line tasks only\n"


@pytest.mark.parametrize("place", ["/proc/nope", "file", "file/below"])
def test_a_home_that_cannot_be_used_is_a_usage_error(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    told = {**os.environ, **KEY, "FARHAND_HOME": str(tmp_path / place)}
    for arguments in (["run", "x"], ["exec", "/dev/null"], ["sessions"], ["doctor"], ["show", "last"]):
        done = subprocess.run([*FARHAND, *arguments], env=told, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"the home folder {tmp_path / place} cannot be used: " in done.stderr
        assert "Traceback" not in done.stderr


def test_the_package_is_the_command(own_home: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "farhand", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.startswith("farhand ")) == (0, True)


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_colours_can_be_declined(variable: str, value: str, own_home: Path, here: Path) -> None:
    with serving(ANSWER) as server, on_terminal(own_home, here, server.model, "go", **{variable: value}) as terminal:
        assert terminal.finish() == 0
    assert not any(f"\x1b[{code}" in terminal.output for code in (31, 32, 33, 34, 36, 91, 94, 96))
    assert "Answer\n" in terminal.text


def test_what_the_guest_prints_does_not_command_the_terminal(own_home: Path, here: Path) -> None:
    code = "print('\\x1b]52;c;ZXZpbA==\\x07', '\\x1b]0;t\\x07', '\\x1b[2J', '\\u202e[bold]')"
    reply = f"\x1b]52;c;ZQ==\x07 said\n```python\n{code}\nfinal_answer('\\x1b[2J!')\n```"
    with serving(reply) as server, on_terminal(own_home, here, server.model, "go") as terminal:
        assert terminal.finish() == 0
    assert "\x1b" not in terminal.text
    assert "\x07" not in terminal.output
    assert "\u202e" not in terminal.output
    for visible in ("␛]52;c;ZQ==␇ said", "␛]52;c;ZXZpbA==␇ ␛]0;t␇ ␛[2J ‹U+202E›[bold]", "␛[2J!"):
        assert visible in terminal.text


def test_the_answer_into_a_file_and_the_course_of_it_on_the_terminal(own_home: Path, here: Path) -> None:
    with serving(ANSWER) as server, (here / "answer").open("w") as answer:
        command = [*FARHAND, "run", "--sandbox", "subprocess", "--model", server.model, "How many r?"]
        with PseudoTerminal(command, environ=environ(own_home), cwd=here, stdout=answer.fileno()) as terminal:
            assert terminal.finish() == 0
    assert (here / "answer").read_text() == "3\n"
    assert "│ counting" in terminal.text
    assert "Answer" not in terminal.text


def test_ctrl_c_stops_the_code_and_shows_what_there_is(own_home: Path, here: Path) -> None:
    code = "```python\nopen('part', 'w').write('x')\nprint('begun', flush=True)\nwhile True: pass\n```"
    with serving(code) as server, on_terminal(own_home, here, server.model, "go") as terminal:
        terminal.wait_for("│ begun")
        terminal.press_ctrl_c()
        assert terminal.finish() == 130
    assert "Stopped" in terminal.text
    assert "session  ses_" in terminal.text
    assert "Traceback" not in terminal.text.split("Stopped")[1]


def test_ctrl_c_while_the_model_thinks(own_home: Path, here: Path) -> None:
    with serving() as server, on_terminal(own_home, here, server.model, "go") as terminal:
        assert server.holding.wait(30)
        terminal.press_ctrl_c()
        assert terminal.finish() == 130
    assert "Traceback" not in terminal.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_kill_and_a_closed_terminal_leave_no_box(number: int, own_home: Path) -> None:
    command = [*FARHAND, "run", "--sandbox", "subprocess", "--json", "--model"]
    with (
        serving("```python\nwhile True: pass\n```") as server,
        subprocess.Popen(
            [*command, server.model, "go"], env=environ(own_home), stdout=subprocess.PIPE, text=True
        ) as it,
    ):
        assert it.stdout is not None
        for line in it.stdout:
            if json.loads(line)["type"] == "action.started":
                it.send_signal(number)
        assert it.wait(60) == 130


def test_a_second_ctrl_c_leaves_at_once(own_home: Path, here: Path) -> None:
    tools = here / "tools.py"
    tools.write_text("import time\ndef hang() -> int:\n    time.sleep(600)\n    return 1\nTOOLS = {'hang': hang}\n")
    code = "```python\nprint('begun', flush=True)\nhang()\n```"
    with serving(code) as server, on_terminal(own_home, here, server.model, "--tools", str(tools), "go") as terminal:
        terminal.wait_for("│ begun")
        terminal.wait_for("→ hang()")
        terminal.press_ctrl_c()
        terminal.press_ctrl_c()
        assert terminal.finish() == 130
    assert asyncio.run(destroy_boxes(own_home)) <= 1
