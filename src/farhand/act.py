"""Performing an action over a box: finding or making the box, sending `run`, turning frames into events.

`ack n` goes to the box only after what the frames up to n say is in the log.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from farhand import event as ev
from farhand import value
from farhand.action import BOUND_NAMES, bound_names
from farhand.call import intention
from farhand.decide import Act, Stop, limits_of
from farhand.errors import Fenced, ProtocolViolation, SandboxError, SandboxLost, StoreError
from farhand.event import NewEvent
from farhand.files import copy
from farhand.limits import INTERRUPT_GRACE_S, STOP_AGAIN_S, STOP_TRIES, Limits
from farhand.record import Recorder
from farhand.sandbox.environment import Environment
from farhand.sandbox.hand import BoxEnded, Hand
from farhand.sandbox.port import Box, Frame, Sandbox
from farhand.session import Session
from farhand.state import Action, Effect
from farhand.tool import Tool


class Outfit(Protocol):
    """What an actor needs of the equipment (`loop.Equipment`)."""

    @property
    def sandbox(self) -> Sandbox: ...
    @property
    def environment(self) -> Environment: ...
    @property
    def imports(self) -> tuple[str, ...] | None: ...
    @property
    def tools(self) -> dict[str, Tool]: ...
    @property
    def files(self) -> Path: ...


class Actor:
    """The hands of one driver: at most one box, one running action."""

    def __init__(self, session: Session, outfit: Outfit) -> None:
        self._session, self._outfit = session, outfit
        self._hand: Hand | None = None
        self._box: Box | None = None
        self._swept = False
        self.brought: list[str] = []
        """Names of files that a person added to the session's, and that a box which is there lacks."""
        self.manifest: copy.Manifest = {}
        """What the box said of its files when they were copied last."""
        self._finished = asyncio.Event()
        self._finished.set()

    async def act(self, command: Act) -> None:
        """From `action.started`, or from where an earlier driver left it, to `action.finished`."""
        self._finished.clear()
        try:
            action = self._session.state.action
            follow = await self._begin(command) if action is None else await self._take_over(action)
            if follow is not None:
                await self._follow(follow)
        finally:
            self._finished.set()

    async def _begin(self, command: Act) -> Action | None:
        """Start the action in a box. The action to follow, or None when the turn was stopped meanwhile."""
        hand = await self._ready_hand()
        turn = self._session.state.turn
        if turn is None or turn.cancel is not None:
            return None
        started = {"action": command.action, "step": command.step, "code": command.code, "box": hand.box_id}
        await self._session.append(NewEvent(ev.ACTION_STARTED, started))
        action = self._session.state.action
        assert action is not None
        return action if await self._send(hand, action) else None

    async def _send(self, hand: Hand, action: Action) -> bool:
        """Send `run`. False when the box is gone: the action is finished as lost then."""
        try:
            await hand.run(action.id, action.code, f"<action {action.step}>")
        except SandboxError as error:
            await self._lost(error)
            return False
        return True

    async def _take_over(self, action: Action) -> Action | None:
        """An action an older generation started: attach to its box, or say that it is lost."""
        hand = await self._existing_hand()
        if hand is None or hand.box_id != action.box:
            await self._lost(SandboxLost("its box is gone"))
            return None
        if action.id not in hand.attached.ran:
            return action if await self._send(hand, action) else None
        for call in hand.attached.waiting:
            effect = action.effects.get(call)
            if effect is not None and effect.outcome is not None:
                await self.deliver(effect)
        return action

    async def _follow(self, action: Action) -> None:
        """Log frames until the action is finished. A box that breaks off or breaks the rules ends it as lost."""
        hand = self._hand
        if hand is None:
            await self._lost(SandboxLost("its box is gone"))
            return
        recorder = Recorder(self._session, action.id, hand, bool(action.answers))
        try:
            async for frame in hand.frames():
                if await self._frame(action, hand, recorder, frame):
                    return
            raise SandboxLost("the box's channel ended in the middle of an action")
        except StoreError:
            raise
        except Exception as error:  # guest-controlled frames must not be able to wedge a session
            await recorder.finish()
            await self._lost(error)
        finally:
            await recorder.close()

    async def _frame(self, action: Action, hand: Hand, recorder: Recorder, frame: Frame) -> bool:
        """Log what one frame says. True after `done`."""
        kind = frame["t"]
        if frame.get("action") not in (action.id, None):
            raise ProtocolViolation(f"a {kind} frame of another action")
        if kind in ("out", "display", "answer"):
            await recorder.add(frame)
            return False
        if kind == "call":
            await recorder.before_call()
            await self._call(action, hand, recorder, frame)
            return False
        await recorder.finish()
        await self._done(action, hand, frame)
        return True

    async def _call(self, action: Action, hand: Hand, recorder: Recorder, frame: Frame) -> None:
        if frame["call"] in action.effects:  # sent again after a re-attachment
            return
        limits = limits_of(self._session.state)
        if len(action.effects) >= limits.tool_calls:
            text = f"the limit `tool_calls` was reached: {limits.tool_calls} calls in one action"
            if "tool_calls" not in action.limits:
                await self._session.append(limit_reached("tool_calls", limits.tool_calls, action.id, text))
            await hand.reply_error(frame["call"], "LimitReached", text, "Do the rest in another action.")
            await recorder.logged(frame["n"])
            return
        events = intention(self._session.state, action, self._outfit.tools, frame, hand.box_id)
        await self._session.append(*events)
        await recorder.logged(frame["n"])
        effect = action.effects[frame["call"]]
        if effect.outcome is not None:
            await self.deliver(effect)

    async def _done(self, action: Action, hand: Hand, frame: Frame) -> None:
        error, output = frame.get("error"), frame["output"]
        ok = bool(frame["ok"])
        files, left_out = await self._collect(hand)
        finished = {
            "action": action.id,
            "box": hand.box_id,
            "frame": frame["n"],
            "ok": ok,
            "value": frame.get("value"),
            "answer": _first_answer(action) if ok else None,
            "error": error,
            "usage": frame["usage"],
            "output": output,
            "lost": [] if frame["alive"] else _lost_names(action, frame),
            "files": files,
            "left_out": left_out,
        }
        events = [*self._limits_met(action, error, output), NewEvent(ev.ACTION_FINISHED, finished)]
        if not frame["alive"]:
            lost = {"box": hand.box_id, "reason": "ended", "lost": finished["lost"]}
            events.append(NewEvent(ev.SANDBOX_LOST, lost))
        await self._session.append(*events)
        if not frame["alive"]:
            await self._drop()
            return
        try:
            await hand.ack(frame["n"])
        except SandboxLost:
            return  # the next action finds out

    def _limits_met(self, action: Action, error: Any, output: dict[str, Any]) -> list[NewEvent]:
        limits, events = limits_of(self._session.state), []
        names = {field.name for field in fields(Limits)}
        if isinstance(error, dict) and error.get("limit") in names:
            name = error["limit"]
            events.append(limit_reached(name, getattr(limits, name), action.id, str(error.get("message", ""))[:2000]))
        if output.get("cut_bytes"):
            text = f"{output['cut_bytes']} bytes of output were cut"
            events.append(limit_reached("output_bytes", limits.output_bytes, action.id, text))
        if output.get("displays_cut"):
            text = f"{output['displays_cut']} displays were cut"
            events.append(limit_reached("displays", limits.displays, action.id, text))
        return events

    async def _collect(self, hand: Hand) -> tuple[list[dict[str, Any]], list[list[str]]]:
        """Copy what changed in /workspace to the session's folder: entries, and what is not kept with the reason."""
        state = self._session.state
        try:
            got = await copy.collect(hand, self._outfit.files, self.manifest, limits_of(state))
        except (SandboxError, OSError) as error:
            return [], [["/workspace", f"the files could not be saved: {str(error)[:500]}"]]
        self.manifest = got.manifest
        there = {path for path, entry in got.manifest.items() if entry.kind == "file"} | {p for p, _ in got.left_out}
        gone = [path for path in state.files if path not in there]
        return got.entries + [{"path": path, "removed": True} for path in gone], [list(pair) for pair in got.left_out]

    async def _lost(self, error: BaseException) -> None:
        """The box is gone or broke the rules: a running action ends so; nothing of it is run again."""
        state = self._session.state
        events = []
        if state.action is not None:
            events.append(NewEvent(ev.ACTION_FINISHED, self._lost_action(state.action, error)))
        if state.box is not None:
            events.append(NewEvent(ev.SANDBOX_LOST, {"box": state.box.id, "reason": "outside", "lost": []}))
        if events:
            await self._session.append(*events)
        await self._drop()

    def _lost_action(self, action: Action, error: BaseException) -> dict[str, Any]:
        kind = "lost" if isinstance(error, SandboxLost) else "protocol"
        if isinstance(error, BoxEnded):
            message = "the sandbox had ended before this code could run: it was not run; variables are gone"
        else:
            message = f"the sandbox was lost while this code ran ({str(error)[:300]}): how far it came is unknown"
        told = {"kind": kind, "type": type(error).__name__, "message": message}
        base = {"action": action.id, "box": action.box, "frame": None, "ok": False, "value": None, "answer": None}
        return {**base, "error": told, "usage": {}, "output": {}, "lost": [], "files": [], "left_out": []}

    async def deliver(self, effect: Effect) -> None:
        """Give a settled effect to the code that waits for it. The box ignores a second delivery."""
        hand = self._hand
        if hand is None or hand.box_id != effect.box:
            return
        try:
            if effect.error is not None:
                error = effect.error
                await hand.reply_error(effect.call, error["type"], error["message"], error.get("hint", ""))
            else:
                await hand.reply(effect.call, effect.value)
        except SandboxLost:
            return  # `_follow` says so

    async def stop(self, command: Stop) -> None:
        """Interrupt the action; returns when it has finished. A box that does not end it in time is destroyed."""
        for _ in range(STOP_TRIES):
            if self._finished.is_set():
                return
            hand = self._hand
            if hand is not None:
                try:
                    await hand.interrupt(command.action, "interrupt", INTERRUPT_GRACE_S)
                except SandboxLost:
                    pass
            try:
                await asyncio.wait_for(self._finished.wait(), STOP_AGAIN_S)
            except TimeoutError:
                continue
        await self._drop()
        await self._finished.wait()

    async def abandon(self, error: BaseException) -> None:
        """Give up on the running action, if there is one, and on its box."""
        if self._session.state.action is not None:
            await self._lost(error)

    # --- the box ---

    async def _ready_hand(self) -> Hand:
        """An attached box that is ready to run: the one there is, or a new one with the session's files."""
        hand = await self._existing_hand()
        if hand is not None:
            try:
                await hand.ping()
                if not hand.attached.ended:
                    await self._bring(hand)
                    return hand
                await self._lost(BoxEnded("its worker has ended"))
            except SandboxLost as error:
                await self._lost(error)
        return await self._new_hand()

    async def _bring(self, hand: Hand) -> None:
        for name in self.brought:
            await hand.write_file(name, (self._outfit.files / name).read_bytes())
        self.brought = []

    async def _existing_hand(self) -> Hand | None:
        """The box of the log, attached under this generation, if it is there. Others of the session are destroyed."""
        known = self._session.state.box
        hand = self._hand
        mine = (hand.box_id, hand.generation) if hand is not None else None
        if hand is not None and known is not None and mine == (known.id, self._session.generation):
            return hand
        await self.close()
        if not self._swept:
            await self._sweep(known.id if known is not None else None)
        if known is None:
            return None
        try:
            box = await self._outfit.sandbox.connect(known.id)
            return await self._open(box, known.frame)
        except SandboxLost as error:
            if self._session.state.action is None:
                await self._lost(error)
            return None

    async def _sweep(self, keep: str | None) -> None:
        """Destroy what earlier drivers of this session left behind; never what a newer one made."""
        for box in await self._outfit.sandbox.list({"session": self._session.id}):
            made = box.labels.get("generation", "0")
            if box.id != keep and made.isdecimal() and int(made) <= (self._session.generation or 0):
                await box.destroy()
        self._swept = True

    async def _new_hand(self) -> Hand:
        """A new box with the session's files. It is in the log only when it is complete."""
        outfit, session = self._outfit, self._session
        request = f"req_{session.state.seq + 1}"
        asked = {"request": request, "provider": outfit.sandbox.name, "environment": outfit.environment.hash}
        await session.append(NewEvent(ev.SANDBOX_REQUESTED, asked))
        labels = {"session": session.id, "generation": str(session.generation)}
        self._swept = False  # until it is in the log, the box is one to be swept
        limits = limits_of(session.state)
        self._box = await outfit.sandbox.create(outfit.environment, limits, labels)
        try:
            hand = await self._open(self._box, 0)
            self.manifest = await copy.restore(hand, outfit.files)
            self.brought = []
            created = {"box": self._box.id, "request": request, "provider": outfit.sandbox.name}
            await session.append(NewEvent(ev.SANDBOX_CREATED, created))
        except BaseException:
            await self._drop()
            raise
        self._swept = True
        return hand

    async def _open(self, box: Box, after: int) -> Hand:
        outfit = self._outfit
        hand = await Hand.open(
            box,
            generation=self._session.generation or 0,
            after=after,
            limits=limits_of(self._session.state),
            tools=[tool.stub() for tool in outfit.tools.values()],
            imports=outfit.imports,
            session=self._session.id,
        )
        self._box, self._hand = box, hand
        return hand

    async def _drop(self) -> None:
        """End the box, and let go of it. One that cannot be reached is left to its provider's sweep."""
        hand, box = self._hand, self._box
        self._hand = self._box = None
        self.manifest = {}
        try:
            if box is not None:
                await box.destroy()
        except (SandboxError, Fenced):
            pass
        finally:
            if hand is not None:
                await hand.close()

    async def close(self) -> None:
        """Let go of the box; it lives on."""
        hand, self._hand = self._hand, None
        if hand is not None:
            await hand.close()

    async def discard(self) -> None:
        """Destroy the box, under the claim, and say so in the log."""
        known = self._session.state.box
        if self._box is None and known is not None:
            try:
                self._box = await self._outfit.sandbox.connect(known.id)
            except SandboxLost:
                pass
        await self._drop()
        if known is not None:
            await self._session.append(NewEvent(ev.SANDBOX_DESTROYED, {"box": known.id}))


def _lost_names(action: Action, frame: Frame) -> list[str]:
    """What the box named after its last action, and what the code that died with it bound or would have bound."""
    named = [str(name)[:200] for name in (frame.get("lost") or [])[:BOUND_NAMES]]
    return list(dict.fromkeys([*named, *bound_names(action.code)]))


def limit_reached(name: str, allowed: float, action: str | None, message: str) -> NewEvent:
    return NewEvent(ev.LIMIT_REACHED, {"limit": name, "allowed": allowed, "action": action, "message": message})


def _first_answer(action: Action) -> dict[str, Any] | None:
    """The first final_answer counts; if its value cannot travel there is none, and the model is told."""
    if not action.answers:
        return None
    first = action.answers[0]
    if first.get("problem"):
        return None
    try:
        value.decode(first.get("value"))
    except value.ValueProblem as problem:
        first["problem"] = str(problem)[:500]
        return None
    return {"value": first.get("value"), "text": str(first.get("repr", ""))}
