"""Text of a worker, clean and cut to size."""

from __future__ import annotations

import json

_dumps = json.dumps  # bound here because guest code may take it out of its module


def json_size(text: str) -> int:
    return len(_dumps(text))


def clean(text: str) -> str:
    """The text without half surrogate pairs."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def fitting(text: str, most: int) -> str:
    """The text, or its beginning and a word on how much is missing; `most` counts bytes of JSON."""
    text = str.__str__(text)
    whole = len(text)
    cut = clean(text[:most])
    while json_size(cut) > most:
        cut = cut[: max(0, int(len(cut) * 0.9 * most / json_size(cut)))]
    return cut if len(cut) >= whole else f"{cut}… [{whole - len(cut):,} of {whole:,} characters cut]"


def middle_cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n… [{len(text) - 2 * half:,} characters cut] …\n{text[-half:]}"
