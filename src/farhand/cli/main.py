"""The command `farhand`: its options. What a command does is imported when it is called, so that --help stays fast."""

from __future__ import annotations

import math
import sys
from typing import Any

import click

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _Commands(click.Group):
    """Errors of a command become a message on standard error and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        from farhand.cli.terminal import open_streams

        open_streams()
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            raise _with_dashes(error) from None
        except (click.ClickException, click.exceptions.Exit):
            raise
        except (Exception, KeyboardInterrupt) as error:
            from farhand.cli.exits import report

            sys.exit(report(error))


def _with_dashes(error: click.NoSuchOption) -> click.NoSuchOption:
    """`farhand run "-5 + 3"`: a task may begin like an option."""
    command = error.ctx.command.name if error.ctx is not None else ""
    if command not in ("run", "exec"):
        return error
    what, shown = ("task", '"-5 + 3"') if command == "run" else ("file", "-name.py")
    said = (
        f"{error.message.rstrip('.')}. A {what} that begins with a dash comes after --:  farhand {command} -- {shown}"
    )
    return click.NoSuchOption(error.option_name, said, error.possibilities, error.ctx)


class _Number(click.FloatRange):
    """Seconds above 0."""

    name = "number of seconds above 0"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a valid {self.name}.", param, ctx)
        return number


class _Count(click.IntRange):
    name = "whole number"


SECONDS = _Number(min=0, min_open=True)
SANDBOX = click.option("--sandbox", metavar="NAME", default="local", show_default=True, help="Where the code runs.")
IMPORTS = click.option(
    "--import", "imports", multiple=True, metavar="NAME", help="A package the code may import. Repeatable."
)
FILES = click.option(
    "--file", "files", multiple=True, metavar="PATH", help="A file that is in /workspace at the start. Repeatable."
)
OUT = click.option("--out", metavar="DIR", help="Copy new files and figures there; nothing is overwritten.")
TOOLS = click.option("--tools", metavar="FILE.py", help="A file with TOOLS, or functions marked @tool.")


@click.group(cls=_Commands, context_settings=_CONTEXT, no_args_is_help=True)
@click.version_option(package_name="farhand", message="farhand %(version)s")
def cli() -> None:
    """Agents whose code runs in a sandbox, and whose record does not.

    \b
    Try:  farhand run "How many r are there in strawberry?"
          echo 'print(6 * 7)' | farhand exec -

    Exit codes: 0 answered, 1 failed, 2 usage, 3 a limit was reached, 130 interrupted.
    """


@cli.command(short_help="Give an agent a task.")
@click.argument("task")
@click.option("--model", metavar="PROVIDER:NAME", help="The model: openai:NAME, openai:NAME@URL, or local.")
@click.option("--session", metavar="SESSION", help="Go on with a session: an id, a unique beginning, or last.")
@FILES
@OUT
@TOOLS
@IMPORTS
@SANDBOX
@click.option("--max-steps", type=_Count(min=1), metavar="N", help="Model calls before the turn ends.")
@click.option("--timeout", type=SECONDS, metavar="S", help="Seconds for the whole task.")
@click.option("--json", "as_json", is_flag=True, help="Print the events, one a line.")
def run(task: str, **given: Any) -> int:
    """Give an agent the TASK; `-` reads it from standard input.

    On a terminal you see the agent work. Elsewhere standard output carries the answer alone.
    """
    from farhand.cli.run import Order, run

    return run(Order(task, timeout_s=given.pop("timeout"), **given))


@cli.command("exec", short_help="Run a Python file in a box, without a model.")
@click.argument("file")
@FILES
@OUT
@TOOLS
@IMPORTS
@SANDBOX
@click.option("--timeout", type=SECONDS, metavar="S", help="Seconds for each cell.")
@click.option("--memory", type=_Count(min=1), metavar="MB", help="Memory of the box.")
def exec_(file: str, **given: Any) -> int:
    """Run FILE in a box; `-` reads it from standard input.

    Cells split by a line `#%%` share one namespace. A trailing expression that is not None prints as `=> repr`.
    An error or a limit ends its cell; later cells run.
    """
    from farhand.cli.exec import Program, execute

    return execute(Program(file, timeout_s=given.pop("timeout"), memory_mb=given.pop("memory"), **given))


@cli.command(short_help="List the sessions.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
@click.option("--limit", type=_Count(min=1), default=20, show_default=True, help="How many, newest first.")
def sessions(as_json: bool, limit: int) -> int:
    """List the sessions, newest first."""
    from farhand.cli.sessions import sessions

    return sessions(as_json, limit)


@cli.command(short_help="Show a session again, from its log.")
@click.argument("session")
@click.option("--json", "as_json", is_flag=True, help="Print the events, one a line.")
@click.option("--full", is_flag=True, help="Cut nothing: long outputs and values are shown by head and tail otherwise.")
def show(session: str, as_json: bool, full: bool) -> int:
    """Show SESSION again, from its log: an id, a unique beginning of one, or `last`."""
    from farhand.cli.show import show

    return show(session, as_json, full)


@cli.command(short_help="Say what stands on this machine.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def doctor(as_json: bool) -> int:
    """Say which walls stand here, what each does not protect against, and what is set up."""
    from farhand.cli.doctor import doctor

    return doctor(as_json)


@cli.command(short_help="Fetch what is needed: the boxes' packages, the small model.")
@click.argument("what", required=False, type=click.Choice(["local", "environment"]))
def setup(what: str | None) -> int:
    """Fetch the small local model (local), the packages of the boxes (environment), or both."""
    from farhand.cli.setup import setup

    return setup(what)


@cli.command(short_help="The host of the local jail: run, status, stop.")
@click.argument("action", type=click.Choice(["run", "status", "stop"]), default="run")
@click.option("--json", "as_json", is_flag=True, help="With status: as one JSON object.")
@click.option("--force", is_flag=True, help="With stop: end its boxes too.")
def host(action: str, as_json: bool, force: bool) -> int:
    """Run the host of the local jail in the foreground, until it is told to end; say what it does; or end it.

    It is not needed: the first box starts one. A service manager keeps this one running, with limits of its choice.
    """
    from farhand.cli import host

    if action == "run":
        host.run()
    return host.status(as_json) if action == "status" else host.stop(force)


@cli.result_callback()
def _leave(code: int) -> None:
    sys.exit(code)


def main() -> None:
    """The entry point."""
    try:
        code = cli.main(prog_name="farhand", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
