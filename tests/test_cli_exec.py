"""`farhand exec` with the subprocess sandbox."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farhand.sandbox.subprocess import SubprocessSandbox
from pseudo_terminal import PseudoTerminal

FARHAND = [sys.executable, "-m", "farhand.cli.main"]


@pytest.fixture(autouse=True)
def _no_box_is_left(home: Path) -> Iterator[None]:
    async def left() -> int:
        return len(await SubprocessSandbox(home).list({}))

    yield
    assert asyncio.run(left()) == 0


def execute(source: str | None, *arguments: str, file: str = "-") -> subprocess.CompletedProcess[str]:
    command = [*FARHAND, "exec", "--sandbox", "subprocess", *arguments, file]
    return subprocess.run(command, input=source or "", capture_output=True, text=True, timeout=90)


@pytest.mark.parametrize(
    ("source", "out"),
    [
        ("1 + 1", "=> 2\n"),
        ("None", ""),
        ("x = 3\n#%%\nprint(x)\nx", "3\n=> 3\n"),
        ("print('a', end='')\n#%% [a title]\n'b'", "a\n=> 'b'\n"),
        ("print('a', end='')\n#%%\nfinal_answer(1); None", "a\nFINAL 1\n"),
        ("print('a', end='')", "a"),
        ("final_answer('x')\nprint('on')\n#%%\nfinal_answer(2); None", "on\nFINAL 'x'\nFINAL 2\n"),
        ("import asyncio\nawait asyncio.sleep(0, 'top')", "=> 'top'\n"),
        ("print(__name__)", "__main__\n"),
        ("import sys\nprint(1)\nsys.exit()\nprint(2)\n#%%\nprint(3)", "1\n3\n"),
        ("print('é漢🙂\\t\\x1b[31mred\\x1b[0m\\r')", "é漢🙂\t\x1b[31mred\x1b[0m\r\n"),
        ("\ufeff1", "=> 1\n"),
    ],
)
def test_what_standard_output_carries(source: str, out: str) -> None:
    done = execute(source)
    assert (done.stdout, done.stderr, done.returncode) == (out.replace("\r\n", "\n"), "", 0)


def test_standard_error_of_the_box_goes_to_standard_error() -> None:
    done = execute("import sys\nprint('o')\nprint('e', file=sys.stderr)")
    assert (done.stdout, done.stderr, done.returncode) == ("o\n", "e\n", 0)


def test_a_line_of_ours_begins_anew_where_both_streams_lead_to_one_place() -> None:
    source = "print('no end', end='')\n#%%\nprint('again', end='')\nraise SystemExit('why')\n#%%\n3"
    command = [*FARHAND, "exec", "--sandbox", "subprocess", "-"]
    done = subprocess.run(
        command, input=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )
    assert done.stdout == "no endagain\nwhy\n=> 3\n"


FIGURES = """
from PIL import Image
open('table.csv', 'w').write('a,b')
open('.hidden', 'w').close()
display(Image.new('RGB', (2, 2)))
Image.new('RGB', (3, 3))
"""


def test_results_that_are_not_kept_are_counted() -> None:
    done = execute(FIGURES)
    assert (done.returncode, done.stdout.startswith("=> <PIL")) == (0, True)
    assert done.stderr.splitlines()[-1] == "farhand: 2 figures and 1 file were not kept (--out DIR keeps them)"
    done = execute("open('a', 'w').close()")
    assert done.stderr == "farhand: 1 file was not kept (--out DIR keeps it)\n"


def test_out_keeps_files_and_figures_and_overwrites_nothing(tmp_path: Path) -> None:
    out = tmp_path / "made" / "out"
    first, second = execute(FIGURES, "--out", str(out)), execute(FIGURES, "--out", str(out))
    assert first.stderr.splitlines() == [
        f"[image/png] {out}/figure-1.png",
        f"[image/png] {out}/figure-2.png",
        "farhand: not kept: .hidden: its name is hidden",
        f"farhand: kept {out}/table.csv",
    ]
    assert "farhand: not kept: table.csv: a file of this name is here already" in second.stderr
    assert sorted(path.name for path in out.iterdir()) == [*(f"figure-{n}.png" for n in (1, 2, 3, 4)), "table.csv"]
    assert (out / "figure-1.png").read_bytes().startswith(b"\x89PNG")


def test_files_are_there_at_the_start_and_are_no_results(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("given")
    (tmp_path / "more.txt").write_text("")
    files = ["--file", str(tmp_path / "in.txt"), "--file", str(tmp_path / "more.txt")]
    done = execute("print(open('in.txt').read())\n#%%\nimport os; os._exit(1)\n#%%\nopen('in.txt').read()", *files)
    assert done.stdout == "given\n=> 'given'\n"
    assert "not kept" not in done.stderr
    done = execute("open('in.txt', 'a').write('!')", *files, "--out", str(tmp_path / "out"))
    assert (tmp_path / "out" / "in.txt").read_text() == "given!"
    assert not (tmp_path / "out" / "more.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--file", "/none/such"), "/none/such: there is no such file"),
        (("--file", "/usr"), "/usr: it is a folder"),
        (("--file", "/etc/hostname", "--file", "/etc/../etc/hostname"), "the same name"),
        (("--out", "/dev/null"), "--out /dev/null: it is no folder"),
        (("--memory", "31"), "--memory 31: a box needs at least 32 MB"),
        (("--import", "*"), "Name each: --import scipy."),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(arguments: tuple[str, ...], says: str) -> None:
    done = execute("print('ran')", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_more_memory_than_there_is_is_warned_of() -> None:
    done = execute("1", "--memory", "100000000")
    assert (done.stdout, done.returncode) == ("=> 1\n", 0)
    assert "--memory 100000000 is more than this machine has, " in done.stderr


def test_imports_are_those_of_run() -> None:
    done = execute("import dateutil.parser, tomllib; 1", "--import", "dateutil")
    assert (done.stdout, done.returncode) == ("=> 1\n", 0)


def test_what_tools_print_is_no_output_of_the_program(tmp_path: Path) -> None:
    tools = tmp_path / "tools.py"
    tools.write_text(
        "import os\nprint('loaded')\ndef f():\n    print('called')\n    os.system('echo started')\nTOOLS = {'f': f}\n"
    )
    done = execute("print(f())", "--tools", str(tools))
    assert (done.stdout, done.returncode) == ("None\n", 0)
    assert done.stderr == "loaded\ncalled\nstarted\n"


def test_an_error_ends_the_cell_and_not_the_program() -> None:
    done = execute("x = 1\n1 / 0\nprint('no')\n#%%\nprint(x)")
    assert (done.stdout, done.returncode) == ("1\n", 1)
    assert "ZeroDivisionError: division by zero" in done.stderr
    assert "line 2" in done.stderr


@pytest.mark.parametrize(("code", "returncode"), [("", 0), ("0", 0), ("None", 0), ("3", 1), ("'why'", 1)])
def test_system_exit_ends_the_cell_with_its_code(code: str, returncode: int) -> None:
    done = execute(f"raise SystemExit({code})\n#%%\nprint('on')")
    assert (done.stdout, done.returncode) == ("on\n", returncode)
    assert done.stderr == ("why\n" if "why" in code else "")


def test_input_is_at_its_end() -> None:
    done = execute("try:\n    input()\nexcept EOFError:\n    print('eof')")
    assert (done.stdout, done.returncode) == ("eof\n", 0)


def test_a_limit_is_named_and_later_cells_run() -> None:
    done = execute("x = 1\nwhile True: pass\n#%%\n1 + 1\n#%%\nundefined", "--timeout", "0.5")
    assert (done.stdout, done.returncode) == ("=> 2\n", 3)
    assert "wall_s" in done.stderr
    assert "NameError" in done.stderr


def test_a_box_that_dies_is_said_to_have_died() -> None:
    done = execute("kept = 1\n#%%\nimport os\nos._exit(7)\n#%%\nprint('a new one')")
    assert (done.stdout, done.returncode) == ("a new one\n", 1)
    assert "kept" in done.stderr


def test_tools_of_a_file(tmp_path: Path) -> None:
    tools = tmp_path / "tools.py"
    tools.write_text("def double(x): return 2 * x\nTOOLS = dict(double=double, final_answer=print)\n")
    done = execute("double(21)\n#%%\nfinal_answer(double(2))", "--tools", str(tools))
    assert (done.stdout, done.stderr, done.returncode) == ("=> 42\n=> 4\nFINAL 4\n", "", 0)


def test_a_program_in_a_file(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import numpy\nprint(numpy.arange(3).sum())")
    done = execute(None, file=str(program))
    assert (done.stdout, done.stderr, done.returncode) == ("3\n", "", 0)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("none.py", None, "No such file"),
        ("folder", "", "directory"),
        ("latin.py", b"x = '\xe9'", "not UTF-8"),
        ("empty.py", b"\n  \n#%%\n", "nothing to run"),
    ],
)
def test_a_file_that_cannot_be_run(name: str, content: bytes | str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    done = execute(None, file=str(path))
    assert (done.stdout, done.returncode) == ("", 2)
    assert says in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [("--timeout", "0"), ("--memory", "-1"), ("--sandbox", "nowhere"), ("--nonsense",)]
)
def test_wrong_options(arguments: tuple[str, ...]) -> None:
    done = execute("1", *arguments)
    assert (done.stdout, done.returncode) == ("", 2)


def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = [*FARHAND, "exec", "--sandbox", "subprocess", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdin.write("for n in range(1000): print('x' * 1000, flush=True)")
        program.stdin.close()
        assert program.stdout.readline()
        program.stdout.close()
        assert program.stderr.read() == ""
        assert program.wait(60) == 1


def test_on_a_terminal_the_guest_commands_nothing(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "print('\\x1b]52;c;ZQ==\\x07 \\x1b[31mred\\x1b[0m \\u202e')\n'\\x1b[2J'\n#%%\nfinal_answer('ok')\n1/0"
    )
    command = [*FARHAND, "exec", "--sandbox", "subprocess", str(program)]
    with PseudoTerminal(command, cwd=tmp_path) as terminal:
        assert terminal.finish() == 1
    assert "\x1b" not in terminal.output
    assert "\x07" not in terminal.output
    assert terminal.output.startswith("␛]52;c;ZQ==␇ red ‹U+202E›\n=> '\\x1b[2J'\n")
    assert terminal.output.endswith("FINAL 'ok'\n")


def test_ctrl_c_stops_the_program(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('begun', flush=True)\nwhile True: pass")
    command = [*FARHAND, "exec", "--sandbox", "subprocess", str(program)]
    with PseudoTerminal(command, cwd=tmp_path) as terminal:
        terminal.wait_for("begun")
        terminal.press_ctrl_c()
        assert terminal.finish() == 130
    assert "Traceback" not in terminal.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_kill_and_a_closed_terminal_leave_no_box(number: int) -> None:
    command = [*FARHAND, "exec", "--sandbox", "subprocess", "-"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write("print('begun', flush=True)\nwhile True: pass")
        program.stdin.close()
        assert program.stdout.readline() == "begun\n"
        program.send_signal(number)
        assert program.wait(60) == 130


def test_output_that_the_locale_cannot_write_is_escaped() -> None:
    command = [*FARHAND, "exec", "--sandbox", "subprocess", "-"]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, input="print('é')", capture_output=True, text=True, env=environ, timeout=60)
    assert (done.stdout, done.returncode) == ("\\xe9\n", 0)
