"""The worker: it holds the namespace and runs guest code."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import ast
import builtins
import functools
import linecache
import os
import signal
import socket
import sys
import types
from collections import deque
from typing import Any, Callable, NoReturn

from farhand import value
from farhand.sandbox.runner.answer import Answered
from farhand.sandbox.runner.bounds import KIB, NAME_CHARS, NAMES_KEPT, REHEARSALS, SOURCES_KEPT
from farhand.sandbox.runner.channel import OPEN_GATE, SHUT, Channel
from farhand.sandbox.runner.display import bundle_of
from farhand.sandbox.runner.failure import error_of, traceback_of
from farhand.sandbox.runner.field import error_fields
from farhand.sandbox.runner.frame import dump_frame
from farhand.sandbox.runner.imports import Imports
from farhand.sandbox.runner.output import Output, flush_output
from farhand.sandbox.runner.text import clean
from farhand.sandbox.runner.tools import OWN_ERRORS, Tools

_AWAIT = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_SIGINT = int(signal.SIGINT)
# Bound here because guest code may take them out of their modules.
_ANYTHING = BaseException
_settrace, _setprofile = sys.settrace, sys.setprofile
_PLAIN = frozenset((int, float, str, bytes, bool))
_COROUTINE = 0x80  # inspect.CO_COROUTINE; importing inspect takes longer than all of this program
_FUTURES = 0x1FE0000
_quieted: list[bool] = []


class Worker:
    """Holds the namespace and runs the actions, one at a time, in the main thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._output = Output()
        self._channel = Channel(sock)
        self._tools = Tools(self._channel)
        self._imports = Imports()
        self._answered = Answered(self._channel)
        self._main = types.ModuleType("__main__")
        self._main.__dict__.update(__builtins__=builtins, __file__=None)
        del self._main.__dict__["__file__"]
        self._loop: Any = None
        self._titles: deque[str] = deque()
        self._told: list[str] | None = None
        self._rehearsed = False
        self._sent = self._at_start = self._at_end = 0
        self._injected: dict[str, Any] = {}
        self._space = vars(builtins)
        self._builtins: dict[str, Any] = {}
        self._on_sigint = self._channel.on_sigint  # one object, so that it can be recognised
        self._hooks: tuple[Any, Any] = (sys.excepthook, sys.displayhook)
        self._prepare()

    def _prepare(self) -> None:
        sys.modules["__main__"] = self._main
        sys.argv = [""]
        if self._imports.folder not in sys.path:
            sys.path.insert(0, self._imports.folder)
        random = sys.modules.get("random")
        if random is not None:
            random.seed()
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            # Without a number it goes a long way through NumPy, and copies a quarter of a megabyte of pages on it.
            numpy_random.seed(int.from_bytes(os.urandom(4), "little"))
        os.environ.setdefault("MPLBACKEND", "Agg")
        if not _quieted:  # a zygote has done it for all its workers
            import warnings

            _quieted.append(True)
            warnings.filterwarnings("ignore", message=".*is non-interactive, and thus cannot be shown")
        if not hasattr(builtins, "exit"):  # python -S
            import _sitebuiltins

            builtins.exit = _sitebuiltins.Quitter("exit", "Ctrl-D (i.e. EOF)")
            builtins.quit = _sitebuiltins.Quitter("quit", "Ctrl-D (i.e. EOF)")
            builtins.help = _sitebuiltins._Helper()
        builtins.__import__ = self._imports
        for found in OWN_ERRORS:
            setattr(builtins, found.__name__, found)
        self._inject({"final_answer": self._answered.final_answer, "display": self._answered.display})

    def _inject(self, names: dict[str, Any]) -> None:
        """Put functions where all code of the box finds them, and assignments of guest code only hide them. A tool that
        has the name of a built-in function goes into the namespace instead: libraries need the real one."""
        for name in self._injected:
            if getattr(builtins, name, None) is self._injected[name]:
                delattr(builtins, name)
        own = set(vars(builtins)) - {"display"}
        self._injected = {name: found for name, found in names.items() if name not in own}
        self._main.__dict__.update((name, found) for name, found in names.items() if name in own)
        for name, found in self._injected.items():
            setattr(builtins, name, found)
        self._builtins = dict(vars(builtins))

    def rehearse(self, tools: list[dict[str, Any]]) -> None:
        """Do once what every action does, with nobody at the other end. A forked worker copies the pages that it writes
        to: it shall have done so before anybody waits for it."""
        channel, title = self._channel, "<rehearsal>"
        ours, theirs = socket.socketpair()
        sock = channel.use(ours)
        try:
            theirs.sendall(dump_frame({"t": "hello", "limits": {}, "tools": tools, "imports": None}))
            theirs.sendall(dump_frame({"t": "run", "action": "", "code": "x = 1\nx + 1", "title": title}))
            self._hello(channel.next_frame())
            self._act(channel.next_frame())
        finally:
            channel.use(sock)
            ours.close()
            theirs.close()
        del self._main.__dict__["x"]
        linecache.cache.pop(title, None)
        self._titles.clear()
        self._told = None
        self._rehearsed = True

    def serve(self) -> None:
        """Until the supervisor is gone."""
        while True:
            frame = self._channel.next_frame()
            if frame["t"] == "hello":
                self._hello(frame)
            elif frame["t"] == "run":
                self._act(frame)

    def _hello(self, frame: dict[str, Any]) -> None:
        result_bytes = int(frame["limits"].get("result_bytes", 512 * KIB))
        self._answered.result_bytes = min(result_bytes, value.MAX_VALUE_BYTES)
        self._imports.allow(frame.get("imports"))
        own = {"final_answer": self._answered.final_answer, "display": self._answered.display}
        self._inject({**own, **self._tools.make(frame["tools"], result_bytes), "final_answer": own["final_answer"]})
        self._channel.send({"t": "ready", "python": sys.version.split()[0]})

    # -- one action --

    def _act(self, frame: dict[str, Any]) -> None:
        self._restore()
        self._drop_stale_interrupt(frame.get("interrupts", 0))
        self._answered.answers = 0
        result: Any = None
        problem: BaseException | None = None
        try:
            steps = self._guarded(lambda: self._compiled(frame["code"], frame["title"]))
        except _ANYTHING as error:
            problem = error.with_traceback(None)
            self._report(frame["action"], None, problem, isinstance(error, SyntaxError))
            return
        try:
            result = self._guarded(lambda: self._execute(steps))
        except _ANYTHING as error:
            problem = error
        if self._channel.forked:
            _end_fork(problem)
        self._report(frame["action"], result, problem)

    def _drop_stale_interrupt(self, sent: int) -> None:
        """Forget a SIGINT that was meant for the action before and came when it had ended; keep one for this action.

        `sent` counts what the supervisor had sent before it sent this action.
        """
        channel = self._channel
        missing = max(0, sent - self._sent - (self._at_end - self._at_start))
        late = min(missing, channel.interrupts - self._at_end)
        self._sent, self._at_start = sent, self._at_end + late
        if channel.interrupts == self._at_start:
            channel.pending = False

    def _guarded(self, step: Callable[[], Any], restore: bool = False) -> Any:
        """Run what may run guest code: interrupts may come up in it. What it set up to trace calls ends with it."""
        channel = self._channel
        try:
            channel.gate = OPEN_GATE
            if channel.pending:
                channel.pending = False
                raise KeyboardInterrupt
            return step()
        finally:
            channel.gate = SHUT
            try:
                _settrace(None)
                _setprofile(None)
            except _ANYTHING:  # raised by what was traced by; it is gone now
                _settrace(None)
                _setprofile(None)
            if restore:
                self._restore()

    def _compiled(self, code: str, title: str) -> list[tuple[types.CodeType, bool]]:
        """The code and its trailing expression, each with whether it is one."""
        self._remember_source(title, code)
        try:
            tree = ast.parse(code, title)
        except RecursionError:
            raise SyntaxError("the code is nested too deeply to be compiled") from None
        last = tree.body[-1] if tree.body else None
        steps = []
        flags = _AWAIT
        if isinstance(last, ast.Expr):
            del tree.body[-1]
        if tree.body:
            body = compile(tree, title, "exec", flags, dont_inherit=True)
            flags |= body.co_flags & _FUTURES
            steps.append((body, False))
        if isinstance(last, ast.Expr):
            expression = ast.Expression(last.value)
            steps.append((compile(expression, title, "eval", flags, dont_inherit=True), True))
        return steps

    def _remember_source(self, title: str, code: str) -> None:
        lines = code.splitlines(True)
        if lines and not lines[-1].endswith("\n"):
            lines[-1] += "\n"
        if type(linecache.cache) is not dict:
            linecache.cache = {}
        linecache.cache[title] = (len(code), None, lines, title)
        self._titles.append(title)
        if len(self._titles) > SOURCES_KEPT:
            linecache.cache.pop(self._titles.popleft(), None)

    def _execute(self, steps: list[tuple[types.CodeType, bool]]) -> Any:
        """Plain code runs outside any loop; code with a top-level await runs inside one, all of it."""
        if any(code.co_flags & _COROUTINE for code, _ in steps):
            return self._awaited(self._execute_inside(steps))
        result = None
        for code, is_value in steps:
            found = eval(code, self._main.__dict__)
            if is_value:
                result = found
        return result

    async def _execute_inside(self, steps: list[tuple[types.CodeType, bool]]) -> Any:
        result = None
        for code, is_value in steps:
            found = eval(code, self._main.__dict__)
            if code.co_flags & _COROUTINE:
                found = await found
            if is_value:
                result = found
        return result

    def _awaited(self, coroutine: Any) -> Any:
        """Run a top-level await in the loop that is kept for it."""
        import asyncio

        loop = self._loop
        if loop is None or loop.is_closed():
            loop = self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        except BaseException:
            if not task.done():  # interrupted: nobody will wait for it again
                task.cancel()
                try:
                    loop.run_until_complete(task)
                except BaseException:
                    pass
            raise
        finally:
            asyncio.set_event_loop(None)

    def _restore(self) -> None:
        """Undo what guest code did to the interpreter that the next action, or our own code, could not bear."""
        if self._space != self._builtins:  # first: without them nothing below can run
            self._space.clear()
            self._space.update(self._builtins)
        if sys.getrecursionlimit() < 1000:
            sys.setrecursionlimit(1000)
        self._main.__dict__["__builtins__"] = builtins
        self._main.__dict__["__name__"] = "__main__"
        sys.modules["__main__"] = self._main
        sys.excepthook, sys.displayhook = self._hooks
        if self._rehearsed:
            self._hear()
        self._output.restore()

    def _hear(self) -> None:
        """Take interrupts."""
        # The functions of `signal` make enums of what they return, which takes longer than all the rest of `_restore`.
        if _signal.getsignal(_SIGINT) is not self._on_sigint:
            _signal.signal(_SIGINT, self._on_sigint)
        _signal.pthread_sigmask(signal.SIG_UNBLOCK, (_SIGINT,))

    # -- its end --

    def _report(self, action: str, result: Any, problem: BaseException | None, syntax: bool = False) -> None:
        shown: dict[str, str] | None = None
        error: dict[str, Any] | None = None
        self._restore()
        if problem is None and result is not None:
            try:
                shown = bundle_of(result) if type(result) in _PLAIN else self._guarded(lambda: bundle_of(result), True)
            except BaseException as failure:
                problem = failure
        if problem is not None:
            try:
                error = self._guarded(functools.partial(error_of, problem, self._tools.names), True)
                if syntax:
                    error["kind"] = "syntax"
            except BaseException as failure:
                kind = "interrupted" if isinstance(failure, KeyboardInterrupt) else "exception"
                error = error_fields(kind, "(its text cannot be shown)", type=type(problem).__name__[:200])
        if "matplotlib.pyplot" in sys.modules:
            try:
                self._guarded(lambda: self._show_figures(result if problem is None else None), True)
            except BaseException:
                pass
        if self._channel.forked:
            _end_fork(problem)
        result = problem = None
        flush_output()
        frame: dict[str, Any] = {"t": "done", "action": action, "ok": error is None, "value": shown, "error": error}
        names = self._names()
        if names != self._told:
            frame["names"] = self._told = names
        self._channel.pending = False
        self._at_end = self._channel.interrupts
        self._channel.send(frame)

    def _show_figures(self, shown: Any) -> None:
        """Open figures of pyplot, which are then closed. One that is the action's value has been shown."""
        pyplot = sys.modules.get("matplotlib.pyplot")
        numbers = pyplot.get_fignums() if pyplot is not None else ()
        for number in numbers:
            assert pyplot is not None
            figure = pyplot.figure(number)
            try:
                if figure is not shown and figure.get_axes():
                    self._channel.send({"t": "display", "bundle": bundle_of(figure)}, True)
            finally:
                pyplot.close(figure)

    def _names(self) -> list[str]:
        names = []
        space: dict[Any, Any] = self._main.__dict__
        for name in space:
            if isinstance(name, str) and not name.startswith("_"):
                names.append(clean(name[:NAME_CHARS]))
                if len(names) >= NAMES_KEPT:
                    break
        return names


def _end_fork(problem: BaseException | None) -> NoReturn:
    """A child that the guest forked has come to the end of the action's code: it ends like a program."""
    status = 0
    if isinstance(problem, SystemExit):
        status = problem.code if isinstance(problem.code, int) else 0 if problem.code is None else 1
    elif problem is not None:
        status = 1
        try:
            sys.stderr.write(traceback_of(problem))
        except BaseException:
            pass
    flush_output()
    os._exit(status & 0xFF)


PRELOAD = ("asyncio", "inspect", "linecache", "traceback", "warnings", "random", "importlib.machinery", "_sitebuiltins")
"""What a worker comes to need; a zygote imports it before it forks."""


def practise() -> None:
    """In a zygote: run actions in workers that are then forgotten. What comes into being at its first use, or what the
    interpreter writes during the first dozen, is then shared by all workers instead of copied by each."""
    handler = signal.getsignal(signal.SIGINT)
    ours, theirs = socket.socketpair()
    for _ in range(REHEARSALS):
        _rehearse_once(ours)
    signal.signal(signal.SIGINT, handler)
    ours.close()
    theirs.close()


def _rehearse_once(sock: socket.socket) -> None:
    space, before = vars(builtins), dict(vars(builtins))
    kept = sys.modules["__main__"], sys.argv, sys.path[:], sys.stdin
    streams = sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__
    try:
        worker = Worker(sock)
        x = {"name": "x", "kind": "positional_or_keyword", "annotation": "int", "default": None}
        worker.rehearse([{"name": "rehearsal", "doc": "", "is_async": False, "params": [x], "returns": "int"}])
        for spare in worker._output.spare:
            os.close(spare)
    finally:
        for name in [name for name in space if name not in before]:
            del space[name]
        space.update(before)
        sys.modules["__main__"], sys.argv, sys.path[:], sys.stdin = kept
        sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__ = streams  # type: ignore[misc]


def worker_main(fd: int) -> NoReturn:
    """Be the worker whose channel is the stream socket `fd`. Descriptors 0 to 2 are in place. Ends the process."""
    # The first action may have been sent already, and an interrupt of it: that is heard once the rehearsal is over.
    _signal.pthread_sigmask(signal.SIG_BLOCK, (_SIGINT,))
    try:
        worker = Worker(socket.socket(fileno=fd))
        os.register_at_fork(after_in_child=worker._channel.after_fork)
        worker.rehearse([])
        worker._hear()
        while True:
            try:
                worker.serve()
            except KeyboardInterrupt:
                continue
    except _ANYTHING as problem:
        os.write(2, f"the worker failed: {traceback_of(problem)}".encode())
    finally:
        os._exit(1)
