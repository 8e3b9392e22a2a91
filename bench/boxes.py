"""Farhand's side: hosts of the local jail in a scratch home, and code run through a Hand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from farhand.errors import SandboxError
from farhand.home import farhand_home
from farhand.limits import Limits
from farhand.sandbox.environment import BARE, DEFAULT, Environment
from farhand.sandbox.hand import Hand
from farhand.sandbox.local.lifecycle import Options
from farhand.sandbox.local.sandbox import LocalSandbox
from farhand.sandbox.port import Box, Frame

PATIENCE_S = 60.0
POLL_S = 0.005
LIMITS = Limits()
_numbers = itertools.count(1)


class Rig:
    """One home folder with its host. `pool` boxes of each environment are kept ready."""

    def __init__(self, scratch: Path, name: str, pool: int) -> None:
        self.home = scratch / name
        self.home.mkdir()
        environments = farhand_home() / "environments"
        environments.mkdir(exist_ok=True)
        (self.home / "environments").symlink_to(environments)
        self.sandbox = LocalSandbox(self.home, options=Options(pool=pool))

    async def open(self, environment: Environment, limits: Limits = LIMITS) -> Hand:
        number = next(_numbers)
        box = await self.sandbox.create(environment, limits, {"session": f"ses_bench{number}", "generation": "1"})
        try:
            return await Hand.open(box, generation=1, limits=limits)
        except BaseException:
            await box.destroy()
            raise

    async def warm(self, environments: Sequence[Environment] = (BARE, DEFAULT)) -> None:
        """Host and zygotes run when this returns."""
        for environment in environments:
            hand = await self.open(environment)
            if environment is DEFAULT:
                loaded = await run(hand, "import sys; {'numpy', 'pandas'} <= set(sys.modules)")
                if loaded != "True":
                    raise SandboxError("numpy and pandas are not loaded in a new box")
            await close(hand)

    async def status(self) -> dict[str, Any]:
        found = await self.sandbox.status()
        if found is None:
            raise SandboxError("no host runs")
        return found

    async def pooled(self, environment: Environment) -> None:
        """Returns when a box of the environment waits in the pool."""
        loop = asyncio.get_running_loop()
        until = loop.time() + PATIENCE_S
        packages = bool(environment.packages)
        while True:
            for told in (await self.status())["environments"]:
                if told["ready"] and bool(told["packages"]) == packages:
                    return
            if loop.time() > until:
                raise SandboxError("the pool stays empty")
            await asyncio.sleep(POLL_S)

    async def zygote(self, environment: Environment) -> int:
        """The pid of the environment's zygote."""
        for told in (await self.status())["environments"]:
            if bool(told["packages"]) == bool(environment.packages) and told["zygote"]:
                return int(told["zygote"])
        raise SandboxError("there is no zygote")

    async def close(self) -> None:
        await self.sandbox.stop(force=True)
        await self.sandbox.close()


async def run(hand: Hand, code: str) -> str:
    """Run code to its end; the text of its value. Frames are acknowledged as the loop does it."""
    done = await run_to_done(hand, code)
    shown = done["value"] or {}
    return str(shown.get("text/plain", ""))


async def run_to_done(hand: Hand, code: str) -> Frame:
    async with asyncio.timeout(PATIENCE_S):
        await hand.run(f"act_{next(_numbers)}", code, "<action>")
        async for frame in hand.frames():
            if frame["t"] in ("out", "done"):
                await hand.ack(frame["n"])
    if not frame["ok"]:
        raise SandboxError(f"the code failed: {frame['error']}")
    return frame


async def close(hand: Hand) -> None:
    box: Box = hand.box
    await hand.close()
    await box.destroy()


@asynccontextmanager
async def kept(rig: Rig, environment: Environment, limits: Limits = LIMITS) -> AsyncIterator[Hand]:
    """A box for many samples."""
    hand = await rig.open(environment, limits)
    try:
        yield hand
    finally:
        await close(hand)
