"""`farhand setup`: fetch what boxes and the small local model are made of."""

from __future__ import annotations

from pathlib import Path

from farhand.cli.progress import Progress
from farhand.home import farhand_home


def setup(what: str | None) -> int:
    home = farhand_home()
    for name, fetch in (("environment", _environment), ("local", _local)):
        if what in (None, name):
            with Progress(always=True) as progress:
                text = fetch(home, progress)
            print(f"{name}: {text}")
    return 0


def _environment(home: Path, progress: Progress) -> str:
    from farhand.sandbox.environment import DEFAULT, build

    built = build(DEFAULT, home, progress)
    return f"{', '.join(DEFAULT.packages)} in {built.path}"


def _local(home: Path, progress: Progress) -> str:
    from farhand.model.local import setup_local

    return f"SmolLM2-135M in {setup_local(progress, home)}; it solves one-line tasks only"
