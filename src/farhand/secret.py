"""Keeping secrets out of texts that leave the harness. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_URL = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
"""User and password in a URL."""
SHORTEST = 8
MASK = "[secret]"


def is_secret(name: str, held: object, environ: Mapping[str, str]) -> bool:
    """Whether what `name` holds must stay on this side: a text under a name that says so, or one with a secret variable
    of the environment in it."""
    if isinstance(held, bytes):
        held = held.decode("utf-8", "replace")
    if not isinstance(held, str) or len(held) < SHORTEST:
        return False
    return bool(_NAME.search(name)) or redactor(environ)(held) != held


def redactor(environ: Mapping[str, str]) -> Callable[[str], str]:
    """A function that masks, in any text, the values of variables whose names say that they are secret."""
    secrets = sorted(
        {text for name, text in environ.items() if _NAME.search(name) and len(text) >= SHORTEST}, key=len, reverse=True
    )
    pattern = re.compile("|".join(re.escape(secret) for secret in secrets) or r"(?!)")
    return lambda text: _URL.sub(MASK, pattern.sub(MASK, text))
