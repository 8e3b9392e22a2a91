"""The supervisor of one box: it numbers and spools frames, relays output, signals, and keeps deadlines and limits."""

from __future__ import annotations

import signal
import socket
import time
from collections import deque
from typing import Any, Callable

from farhand.sandbox.runner.bounds import (
    ANSWERS,
    CALLS_WAITING,
    CONNECTIONS,
    DOWN_STALL_S,
    EOF_WAIT_S,
    GRACE_MAX_S,
    IDLE_OUT_BYTES,
    KILL_WAIT_S,
    LINES_PER_STEP,
    MESSAGE_CHARS,
    NAME_CHARS,
    NAMES_KEPT,
    OUT_CHUNK_BYTES,
    PIPE_SMALL_BYTES,
    RAN_KEPT,
    READ_BYTES,
    REPR_CHARS,
    SPOOL_BYTES,
    VERSION,
    WORKER_FRAME_BYTES,
)
from farhand.sandbox.runner.field import (
    bundle_field,
    call_number,
    checked_error,
    error_fields,
    only,
    text_field,
    whole_field,
)
from farhand.sandbox.runner.frame import FrameError, Lines, dump_frame, parse_frame
from farhand.sandbox.runner.hands import Hands, Usage
from farhand.sandbox.runner.link import Connection
from farhand.sandbox.runner.outbox import Outbox
from farhand.sandbox.runner.pipe import Pipe
from farhand.sandbox.runner.reactor import READ, WRITE, Reactor, Timer
from farhand.sandbox.runner.run import Run, Stop
from farhand.sandbox.runner.spool import Spool
from farhand.sandbox.runner.transfer import Transfer


class Supervisor:
    """One box's supervisor. Many can share a reactor. It owns the descriptors it is given and never waits for anything.

    `frame_sock` is one end of a stream socket pair to the worker, `stdout_fd` and `stderr_fd` are the read ends of its
    pipes. `packages` are the environment's, for `ready`, and so is `python`, its version: whoever knows it spares the
    harness the wait until the worker has heard hello. Whoever reaps the worker calls `ended`; `connect` hands over a
    harness's connection.
    """

    def __init__(
        self,
        reactor: Reactor,
        hands: Hands,
        frame_sock: socket.socket,
        stdout_fd: int,
        stderr_fd: int,
        packages: dict[str, str] | None = None,
        python: str = "",
    ) -> None:
        frame_sock.setblocking(False)
        self.reactor = reactor
        self.hands = hands
        self.spool = Spool()
        self.generation = 0
        self.suspended = False
        self.used = time.monotonic()
        """When a harness last said something."""
        self._sock: socket.socket | None = frame_sock
        self._lines = Lines()
        self._pipes = [
            Pipe(reactor, fd, stream, self._relay, self._wrote)
            for fd, stream in ((stdout_fd, "stdout"), (stderr_fd, "stderr"))
        ]
        self._packages = packages or {}
        self._python = python
        self._connections: list[Connection] = []
        self._harness: Connection | None = None
        self._limits: dict[str, Any] = {}
        self._tools: list[str] = []
        self._hello = self._ready = False
        self._ran: deque[str] = deque(maxlen=RAN_KEPT)
        self._run: Run | None = None
        self._last_call = self._interrupts = 0
        self._waiting: dict[str, None] = {}
        self._down = Outbox()
        self._stall: Timer | None = None
        self._idle_out = 0
        self._idle_cut = 0
        self._names: list[str] = []
        self._transfer = Transfer(reactor, hands)
        self._busy = False
        self._broken: str | None = None
        self._end: str | None = None
        self._closed = False
        self._watch_worker()
        self._watch_pipes()

    # -- what the owner asks --

    @property
    def running(self) -> str | None:
        """The action that runs."""
        return self._run.action if self._run else None

    @property
    def connected(self) -> bool:
        return self._harness is not None

    @property
    def dead(self) -> str | None:
        """Why the worker is gone, if it is."""
        return self._end

    @property
    def congested(self) -> bool:
        return self._down.congested

    def connect(self, sock: socket.socket, data: bytes = b"") -> None:
        """Take over a connected stream socket whose first frame is to be `attach`; `data` was read from it already."""
        if self._closed or len(self._connections) >= CONNECTIONS:
            sock.close()
            return
        connection = Connection(self, sock)
        self._connections.append(connection)
        if data:
            connection.begin(data)

    def suspend(self) -> None:
        if not self.suspended:
            self._sample()
            self.suspended = True
            self.hands.suspend()

    def resume(self) -> None:
        if self.suspended:
            self.hands.resume()
            self.suspended = False
            if self._run is not None:
                self._run.sampled = time.monotonic()

    def ended(self, status: int, limit: str | None = None) -> None:
        """The worker's process is gone: exit code, or minus the signal. `limit` names the bound that ended it."""
        if self._end is not None:
            return
        if status < 0:
            text = f"the worker was ended by signal {-status} ({_signal_name(-status)})"
        else:
            text = f"the worker's process ended with exit code {status}"
        if self._broken is None:
            self._safely(self._take_last)
        self._end = self._broken or text
        self.hands.kill()
        self._waiting.clear()
        run = self._run
        if run is not None:
            self._finish_dead(run, status, limit, text)
        self._drop_worker()

    def close(self) -> None:
        """Let go of all descriptors. The box's processes are the owner's business."""
        self._closed = True
        self._cancel_run()
        for connection in list(self._connections):
            connection.close()
        self._drop_worker()
        self._transfer.close()

    # -- frames of the harness --

    def take(self, connection: Connection, frame: dict[str, Any]) -> None:
        """One frame of a harness."""
        if connection.closed:
            return
        if frame["t"] == "attach":
            self._attach(connection, frame)
            return
        if connection.generation is None:
            connection.refuse("malformed", "the first frame has to be attach", frame)
            return
        generation = whole_field(frame, "gen")
        if generation < self.generation:
            connection.refuse("fenced", f"generation {self.generation} drives this box", frame)
            return
        self.generation = generation
        self.used = time.monotonic()
        handler = _HANDLERS.get(frame["t"])
        if handler is None:
            connection.refuse("unsupported", f"no frame of the type {frame['t'][:80]!r} is known", frame)
        else:
            handler(self, connection, frame)

    def _attach(self, connection: Connection, frame: dict[str, Any]) -> None:
        generation, after = whole_field(frame, "gen"), whole_field(frame, "after")
        if generation < self.generation:
            connection.refuse("fenced", f"generation {self.generation} drives this box", frame)
            return
        if not self.spool.first - 1 <= after <= self.spool.last:
            text = f"frames after {self.spool.first - 1} up to {self.spool.last} are kept; {after} is none of them"
            connection.refuse("malformed", text, frame)
            return
        self.generation = generation
        self.used = time.monotonic()
        older, self._harness = self._harness, connection
        if older is not None and older is not connection:
            older.close()
        connection.attach(generation, after)
        connection.answer(
            {
                "t": "attached",
                "v": VERSION,
                "running": self.running,
                "last": self.spool.last,
                "waiting": list(self._waiting),
                "ran": list(self._ran),
                "ready": self._ready,
                "ended": self._end is not None,
            }
        )

    def disconnected(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
        if self._harness is connection:
            self._harness = None

    def _on_hello(self, connection: Connection, frame: dict[str, Any]) -> None:
        if self._end is not None:
            connection.refuse("ended", self._end, frame)
            return
        if self._run is not None:
            connection.refuse("busy", f"action {self._run.action} runs", frame)
            return
        limits, tools = frame.get("limits"), frame.get("tools")
        if not isinstance(limits, dict) or not all(_positive(number) for number in limits.values()):
            raise FrameError("a hello frame whose limits are no numbers above 0")
        if not isinstance(tools, list) or not all(
            isinstance(t, dict) and isinstance(t.get("name"), str) for t in tools
        ):
            raise FrameError("a hello frame whose tools are no list of stubs")
        self._limits, self._tools = limits, [tool["name"] for tool in tools]
        self.hands.apply(limits)
        self._hello = True
        self._send_down({**frame, "gen": None})
        if self._python:
            self._answer_ready(self._python)

    def _on_run(self, connection: Connection, frame: dict[str, Any]) -> None:
        action, code = text_field(frame, "action", 200), text_field(frame, "code")
        if action in self._ran:
            connection.refuse("already_run", f"action {action} was run before", frame)
        elif self._end is not None:
            connection.refuse("ended", self._end, frame)
        elif self._run is not None:
            connection.refuse("busy", f"action {self._run.action} runs", frame)
        elif not self._hello:
            connection.refuse("not_ready", "hello has to come first", frame)
        else:
            self._begin(action, code, str(frame.get("title") or f"<{action}>")[:200])

    def _begin(self, action: str, code: str, title: str) -> None:
        self._ran.append(action)
        self._run = run = Run(action)
        self._idle_out = 0
        sent = self._interrupts
        self._send_down({"t": "run", "action": action, "code": code, "title": title, "interrupts": sent})
        run.begin(self.hands.usage())  # the worker starts meanwhile
        self._watch_pipes()
        run.tick = self.reactor.call_later(run.interval(self.hands.sampling, self._limits), self._tick)

    def _on_reply(self, connection: Connection, frame: dict[str, Any]) -> None:
        call = text_field(frame, "call", 100)
        if call in self._waiting:
            del self._waiting[call]
            self._send_down(only(frame, "t", "call", "ok", "value", "error"))
        elif not 0 < call_number(call) <= self._last_call:
            connection.refuse("no_such_call", f"no call {call!r} was made", frame)

    def _on_ack(self, connection: Connection, frame: dict[str, Any]) -> None:
        self.spool.drop(min(whole_field(frame, "n"), connection.sent))
        if self.spool.room:
            self._watch_worker()
            if not self._busy:
                self._safely(self._take_lines)

    def _on_interrupt(self, connection: Connection, frame: dict[str, Any]) -> None:
        run = self._run
        grace = frame.get("grace_s")
        if run is None or frame.get("action") != run.action:
            return
        kind = "cancelled" if frame.get("reason") == "cancel" else "interrupted"
        grace_s = min(float(grace), GRACE_MAX_S) if isinstance(grace, (int, float)) else 0.0
        self._stop_run(run, Stop(kind, None, f"the action was {kind}"), grace_s)

    def _on_ping(self, connection: Connection, frame: dict[str, Any]) -> None:
        connection.answer({"t": "pong", "id": frame.get("id")})

    def _on_unsupported(self, connection: Connection, frame: dict[str, Any]) -> None:
        connection.refuse("unsupported", "this box cannot save or load variables", frame)

    def _on_put(self, connection: Connection, frame: dict[str, Any]) -> None:
        self._transfer.put(connection, frame)

    def _on_take(self, connection: Connection, frame: dict[str, Any]) -> None:
        self._transfer.take(connection, frame)

    # -- frames of the worker --

    def _watch_worker(self) -> None:
        if self._sock is None:
            return
        hold = not self.spool.room or self._down.long or self._busy or self._broken is not None
        mask = (0 if hold else READ) | (WRITE if self._down else 0)
        self.reactor.watch(self._sock.fileno(), mask, self._worker_ready)

    def _worker_ready(self, mask: int) -> None:
        if mask & WRITE:
            self._flush_down()
        if mask & READ and self._sock is not None:
            self._safely(self._receive)

    def _receive(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.reactor.watch(self._sock.fileno(), 0, self._worker_ready)
            self._busy = True  # nothing more can come
            self.reactor.call_later(EOF_WAIT_S, self._after_eof)
            return
        self._lines.feed(data)
        self._take_lines()

    def _after_eof(self) -> None:
        if self._end is None and not self._closed:
            self._violate("the worker closed its channel")

    def _take_lines(self) -> None:
        """Handle whole lines while there is room for what they may bring, a step's worth at a time."""
        if self._broken is not None:
            return
        for _ in range(LINES_PER_STEP):
            if not self.spool.room or self._down.long:
                break
            line = self._lines.take()
            if line is None:
                break
            self._from_worker(line)
        else:
            self._busy = True
            self.reactor.call_soon(self._next_lines)
        self._watch_worker()

    def _next_lines(self) -> None:
        if self._end is None and not self._closed:
            self._busy = False
            self._safely(self._take_lines)
            self._watch_worker()

    def _take_last(self) -> None:
        """What a worker that is gone had sent: at most what its socket holds, and room is made for it."""
        sock = self._sock
        while sock is not None:
            line = self._lines.take()
            if line is not None:
                self._from_worker(line)
                continue
            try:
                data = sock.recv(READ_BYTES)
            except OSError:
                return
            if not data or self.spool.size > 2 * SPOOL_BYTES:
                return
            self._lines.feed(data)

    def _from_worker(self, line: bytes) -> None:
        if len(line) > WORKER_FRAME_BYTES:
            raise FrameError(f"a frame larger than {WORKER_FRAME_BYTES:,} bytes")
        frame = parse_frame(line)
        handler = _WORKER_HANDLERS.get(frame["t"])
        if handler is None:
            raise FrameError(f"a frame of unknown type {frame['t'][:80]!r}")
        handler(self, frame)

    def _worker_ready_frame(self, frame: dict[str, Any]) -> None:
        if not self._hello:
            raise FrameError("ready before hello")
        python = text_field(frame, "python", 100)
        if not self._python:
            self._answer_ready(python)

    def _answer_ready(self, python: str) -> None:
        self._ready = True
        if self._harness is not None:
            self._harness.answer({"t": "ready", "v": VERSION, "python": python, "packages": self._packages})

    def _worker_display(self, frame: dict[str, Any]) -> None:
        run = self._run
        if run is None:
            return
        bundle = bundle_field(frame, "bundle")
        run.displays += 1
        if run.displays > self._limit("displays", 20):
            run.displays_cut += 1
            return
        self._drain()
        self._emit({"t": "display", "action": run.action, "bundle": bundle})

    def _worker_call(self, frame: dict[str, Any]) -> None:
        call, tool = text_field(frame, "call", 100), text_field(frame, "tool", 200)
        number = call_number(call)
        if number <= self._last_call:
            raise FrameError(f"a call whose id {call!r} is not new")
        args, kwargs = frame.get("args"), frame.get("kwargs")
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise FrameError("a call without args and kwargs")
        self._last_call = number
        refusal = self._refusal(tool)
        if refusal is not None:
            self._send_down({"t": "reply", "call": call, "ok": False, "error": refusal})
            return
        assert self._run is not None
        self._run.calls += 1
        self._waiting[call] = None
        self._drain()
        action = self._run.action
        self._emit({"t": "call", "action": action, "call": call, "tool": tool, "args": args, "kwargs": kwargs})

    def _refusal(self, tool: str) -> dict[str, str] | None:
        """Why a call is answered here and not sent on, if it is."""
        run = self._run
        if run is None:
            return _refused("RuntimeError", "no action is running, so no tool can be called")
        if tool not in self._tools:
            return _refused("NameError", f"there is no tool {tool!r}")
        if len(self._waiting) >= CALLS_WAITING:
            return _refused("LimitReached", f"{CALLS_WAITING:,} calls wait already; gather fewer at a time")
        allowed = self._limit("tool_calls", 1_000_000)
        if run.calls > allowed:  # one more goes through, so that the loop sees that the limit was met
            return _refused("LimitReached", f"the limit `tool_calls` was reached: {allowed} calls in one action")
        return None

    def _worker_answer(self, frame: dict[str, Any]) -> None:
        run = self._run
        if run is None:
            return
        run.answers += 1
        if run.answers > ANSWERS:
            run.answers_cut += 1
            return
        shown, problem = text_field(frame, "repr")[: 2 * REPR_CHARS], frame.get("problem")
        self._drain()
        self._emit(
            {
                "t": "answer",
                "action": run.action,
                "value": frame.get("value"),
                "repr": shown,
                "problem": problem[:MESSAGE_CHARS] if isinstance(problem, str) else None,
            }
        )

    def _worker_done(self, frame: dict[str, Any]) -> None:
        run = self._run
        if run is None or frame.get("action") != run.action:
            raise FrameError("the end of an action that does not run")
        names = frame.get("names")
        if isinstance(names, list):
            self._names = [name[:NAME_CHARS] for name in names[:NAMES_KEPT] if isinstance(name, str)]
        ok = frame.get("ok") is True
        error = None if ok else checked_error(frame.get("error"))
        shown = bundle_field(frame, "value") if frame.get("value") is not None else None
        stop = run.stop
        if stop is not None and (stop.kind == "limit" or not ok):
            told = error or {}
            error = error_fields(stop.kind, stop.message, limit=stop.limit, **only(told, "type", "traceback"))
        elif error is not None and error["kind"] == "interrupted":
            error["kind"] = "exception"
        self._finish(run, shown if error is None else None, error, alive=True)

    # -- to the worker --

    def _send_down(self, frame: dict[str, Any]) -> None:
        if self._sock is None:
            return
        line = dump_frame({name: item for name, item in frame.items() if name != "gen"})
        self._down.add(line)
        self._flush_down()

    def _flush_down(self) -> None:
        congested = self.congested
        if self._sock is not None and self._down.flush(self._sock) and self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if self.congested and self._stall is None:
            self._stall = self.reactor.call_later(DOWN_STALL_S, self._stalled)
        if congested and self._harness is not None:
            self._harness.take_rest()
        self._watch_worker()

    def _stalled(self) -> None:
        self._stall = None
        if self.congested and not self.suspended and self._end is None:
            self._violate("the worker does not read its replies")

    # -- output --

    def _watch_pipes(self) -> None:
        hold = self._run is None and self._idle_out >= IDLE_OUT_BYTES
        for pipe in self._pipes:
            pipe.watch(hold)

    def _relay(self, pipe: Pipe) -> None:
        """Read once. After a small piece the pipe rests: a million short lines do not become as many frames."""
        size = pipe.read(READ_BYTES)
        if pipe.closed:
            return
        if size < PIPE_SMALL_BYTES and self._run is not None:
            pipe.rest(self._watch_pipes)
        elif self._run is None and self._idle_out >= IDLE_OUT_BYTES:
            self._watch_pipes()

    def _wrote(self, pipe: Pipe, data: bytes) -> None:
        """Send text on, as far as the action's limit and the spool allow; the rest is counted."""
        size = len(data)
        run = self._run
        if run is None:
            self._idle_out += size
            kept = size if self.spool.room else 0
            self._idle_cut += size - kept
        else:
            room = self._limit("output_bytes", SPOOL_BYTES) - (run.out_bytes - run.out_cut)
            kept = max(0, min(size, room)) if self.spool.room else 0
            if run.out_cut and kept:
                kept = 0  # one cut, at one place
            run.out_bytes += size
            run.out_cut += size - kept
        if kept:
            self._out(pipe, pipe.decoder.decode(data[:kept]))
        if kept < size:
            pipe.decoder.reset()

    def _out(self, pipe: Pipe, text: str) -> None:
        for start in range(0, len(text), OUT_CHUNK_BYTES):
            piece = text[start : start + OUT_CHUNK_BYTES]
            self._emit({"t": "out", "action": self.running, "stream": pipe.stream, "text": piece})

    def _drain(self) -> None:
        """Relay what the pipes hold at this moment, so that it comes before the frame that follows."""
        for pipe in self._pipes:
            pipe.drain()

    # -- clocks and limits --

    def _limit(self, name: str, otherwise: int) -> int:
        return int(self._limits.get(name, otherwise))

    def _tick(self) -> None:
        run = self._run
        if run is None or self._end is not None:
            return
        usage = self._sample()
        met = run.met(self._limits, usage) if run.stop is None else None
        if met is not None:
            self._stop_run(run, *met)
        if self._run is run:
            run.tick = self.reactor.call_later(run.interval(self.hands.sampling, self._limits), self._tick)

    def _sample(self) -> Usage | None:
        """Add the time since the last sample to the action's clock, if code could run in it."""
        run = self._run
        if run is None:
            return None
        now = time.monotonic()
        usage = self.hands.usage()
        run.sample(now, usage, bool(self._waiting) and not self._down, self.suspended)
        return usage

    def _stop_run(self, run: Run, stop: Stop, grace_s: float) -> None:
        """SIGINT now, SIGKILL after the grace. The first reason stands."""
        first = run.stop is None
        if first:
            run.stop = stop
        if grace_s <= 0:
            self._kill(run)
            return
        if first:
            self._interrupts += 1
            self.hands.interrupt()
        self.reactor.call_later(grace_s, lambda: self._kill(run))

    def _kill(self, run: Run | None) -> None:
        if self._end is None and not self._closed and self._run is run:
            self.hands.kill()
            self.reactor.call_later(KILL_WAIT_S, self._assume_ended)

    def _assume_ended(self) -> None:
        if self._end is None and not self._closed:
            self.ended(-signal.SIGKILL)

    def _violate(self, what: str) -> None:
        """The worker broke the protocol: its box ends."""
        if self._broken is None and self._end is None:
            self._broken = f"the box broke the protocol: {what}"
            if self._run is not None:
                self._run.stop = Stop("protocol", None, self._broken)
            self._watch_worker()
            self._kill(self._run)

    def _safely(self, step: Callable[[], None]) -> None:
        """Whatever a worker's frames bring about ends this box and no other."""
        try:
            step()
        except FrameError as error:
            self._violate(str(error)[:MESSAGE_CHARS])
        except Exception as error:
            self._violate(f"{type(error).__name__}: {str(error)[:MESSAGE_CHARS]}")

    # -- ends --

    def _finish_dead(self, run: Run, status: int, limit: str | None, text: str) -> None:
        if run.stop is not None:
            error = error_fields(run.stop.kind, run.stop.message, limit=run.stop.limit)
        elif limit is not None:
            allowed = self._limits.get(limit)
            most = f": {allowed:,}" if allowed is not None else ""
            error = error_fields("limit", f"the limit `{limit}` was reached{most}", limit=limit)
        else:
            error = error_fields("ended", text, exit=status)
        self._finish(run, None, error, alive=False)

    def _finish(self, run: Run, shown: dict[str, str] | None, error: dict[str, Any] | None, alive: bool) -> None:
        self._drain()
        for pipe in self._pipes:
            rest = pipe.decoder.decode(b"", True)
            if rest and not run.out_cut:
                self._out(pipe, rest)
        self._sample()
        self._cancel_run()
        done = run.done(shown, error, self._idle_cut)
        done.update(lost=[] if alive else self._names, alive=alive)
        self._idle_cut = self._idle_out = 0
        self._run = None
        self._emit(done)
        self._watch_pipes()

    def _cancel_run(self) -> None:
        if self._run is not None and self._run.tick is not None:
            self._run.tick.cancel()

    def _emit(self, frame: dict[str, Any]) -> None:
        self.spool.add(frame)
        if self._harness is not None:
            self._harness.flush()

    def _drop_worker(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        if self._sock is not None:
            self.reactor.watch(self._sock.fileno(), 0, self._worker_ready)
            self._sock.close()
            self._sock = None
        if self._stall is not None:
            self._stall.cancel()
        self._down.clear()
        if self._harness is not None:
            self._harness.take_rest()


_HANDLERS: dict[str, Callable[[Supervisor, Connection, dict[str, Any]], None]] = {
    "hello": Supervisor._on_hello,
    "run": Supervisor._on_run,
    "reply": Supervisor._on_reply,
    "ack": Supervisor._on_ack,
    "interrupt": Supervisor._on_interrupt,
    "ping": Supervisor._on_ping,
    "put": Supervisor._on_put,
    "take": Supervisor._on_take,
    "save": Supervisor._on_unsupported,
    "load": Supervisor._on_unsupported,
}
_WORKER_HANDLERS: dict[str, Callable[[Supervisor, dict[str, Any]], None]] = {
    "ready": Supervisor._worker_ready_frame,
    "display": Supervisor._worker_display,
    "call": Supervisor._worker_call,
    "answer": Supervisor._worker_answer,
    "done": Supervisor._worker_done,
}


def _positive(number: object) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and number > 0


def _refused(kind: str, message: str) -> dict[str, str]:
    return {"type": kind, "message": message, "hint": ""}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "?"
