"""One rule turned off at a time, and the tests that must notice. Exit 1 when a mutant lives or cannot be made.

`scripts/test-mutants [NAME…]`. A mutant is an edit of one place in a copy of the tree. Its tests run there twice:
without the edit they must pass, with it they must fail.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 300


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "intent after dispatch",
        "src/farhand/act.py",
        '        await self._session.append(*events)\n        await recorder.logged(frame["n"])\n',
        '        tool = self._outfit.tools.get(frame["tool"])\n'
        "        if tool is not None:\n"
        '            tool.function(*frame["args"])\n'
        '        await self._session.append(*events)\n        await recorder.logged(frame["n"])\n',
        ("tests/test_agent.py",),
    ),
    Mutant(
        "ack before append",
        "src/farhand/record.py",
        "        await self._session.append(NewEvent(ev.ACTION_WROTE, data))\n",
        "        await self._hand.ack(told)\n        await self._session.append(NewEvent(ev.ACTION_WROTE, data))\n",
        ("tests/test_record.py",),
    ),
    Mutant(
        "no generation check in the store",
        "src/farhand/store/admission.py",
        "    if generation < 1 or generation != row.generation:\n",
        "    if generation < 1:\n",
        ("tests/contract/test_store.py",),
    ),
    Mutant(
        "no generation check in the box",
        "src/farhand/sandbox/runner/supervisor.py",
        '        generation = whole_field(frame, "gen")\n        if generation < self.generation:\n',
        '        generation = whole_field(frame, "gen")\n        if False:\n',
        ("tests/test_runner.py", "tests/test_hand.py"),
    ),
    Mutant(
        "lease ignored by the store",
        "src/farhand/store/admission.py",
        "    if lease is not None and lease.generation == row.generation and now < lease.ends_at:\n",
        "    if False:\n",
        ("tests/contract/test_store.py",),
    ),
    Mutant(
        "lease ignored before a tool",
        "src/farhand/call.py",
        "        if not self._lease_holds():\n            raise _LeaseOver\n",
        "        return\n",
        ("tests/test_call.py",),
    ),
    Mutant(
        "blob not fsynced",
        "src/farhand/files/blobs.py",
        "    os.fsync(fd)\n",
        "    return\n",
        ("tests/contract/test_blobs.py",),
    ),
    Mutant(
        "cut settled value",
        "src/farhand/call.py",
        '    data = {"effect": effect, "call": call, "outcome": outcome, "value": tree, "error": error}\n',
        "    tree = tree[:100] if isinstance(tree, str) else tree\n"
        '    data = {"effect": effect, "call": call, "outcome": outcome, "value": tree, "error": error}\n',
        ("tests/test_call.py",),
    ),
    Mutant(
        "seccomp off",
        "src/farhand/sandbox/local/box.py",
        "[syscall.no_capabilities(), seccomp.Filter(seccomp.program()).install]",
        "[syscall.no_capabilities()]",
        ("tests/jail/test_hardening.py",),
    ),
    Mutant(
        "netns off",
        "src/farhand/sandbox/local/box.py",
        " | syscall.CLONE_NEWUTS | syscall.CLONE_NEWNET\n",
        " | syscall.CLONE_NEWUTS\n",
        ("tests/jail/test_hardening.py",),
    ),
    Mutant(
        "quota off",
        "src/farhand/sandbox/local/mount.py",
        'f"size={size_bytes},nr_inodes={files + _OWN_INODES + len(seeds) * 2},mode=755"',
        '"mode=755"',
        ("tests/jail/test_sandbox.py", "tests/jail/test_zygote.py", "tests/jail/test_hardening.py"),
    ),
    Mutant(
        "an adapter imported from the core",
        "src/farhand/loop.py",
        "from farhand.session import Session\n",
        "from farhand.session import Session\nfrom farhand.store.sqlite import SqliteStore as SqliteStore\n",
        ("LINT",),
    ),
)


def run(tree: Path, tests: tuple[str, ...]) -> tuple[bool, str]:
    """Whether the tests pass in `tree`, and the end of what they printed."""
    if tests == ("LINT",):
        command = [str(ROOT / ".venv/bin/lint-imports"), "--no-cache"]
    else:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environ = {**os.environ, "PYTHONPATH": str(tree / "src")}
    try:
        done = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False, "timed out"
    return done.returncode == 0, "\n".join((done.stdout + done.stderr).splitlines()[-8:])


def copy_tree(to: Path) -> None:
    for name in ("src", "tests", "scripts", "pyproject.toml", "README.md"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, to / name)


def killed(mutant: Mutant) -> str:
    """'' when the tests notice the mutant, else why not."""
    with tempfile.TemporaryDirectory(prefix="farhand-mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        file = tree / mutant.file
        text = file.read_text()
        if text.count(mutant.old) != 1 or mutant.old == mutant.new:
            return f"the place to change stands {text.count(mutant.old)} times in {mutant.file}"
        passed, printed = run(tree, mutant.tests)
        if not passed:
            return f"the tests fail without the change already:\n{printed}"
        file.write_text(text.replace(mutant.old, mutant.new))
        passed, printed = run(tree, mutant.tests)
        return "the suite stays green" if passed else ""


def main(names: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    if not chosen:
        print("there is no such mutant; there are: " + ", ".join(mutant.name for mutant in MUTANTS))
        return 2
    alive = 0
    for mutant in chosen:
        why = killed(mutant)
        alive += bool(why)
        print(f"{'LIVES' if why else 'killed':8}{mutant.name}{': ' + why if why else ''}", flush=True)
    print(f"{len(chosen) - alive} of {len(chosen)} mutants killed")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
