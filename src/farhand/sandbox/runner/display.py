"""A value as it is shown: a MIME bundle."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Iterator
from typing import Any

from farhand.sandbox.runner.bounds import BUNDLE_BYTES, BUNDLE_TYPES, KIB, NAME_CHARS, TEXT_BYTES
from farhand.sandbox.runner.text import clean, fitting, json_size

_REPRS = (
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("image/jpeg", "_repr_jpeg_"),
    ("text/latex", "_repr_latex_"),
)


def bundle_of(shown: Any) -> dict[str, str]:
    """A value as a MIME bundle that fits a frame. Raises what its repr raises; a failing rich form is left out."""
    bundle = {"text/plain": fitting(repr(shown), TEXT_BYTES)}
    room = BUNDLE_BYTES - json_size(bundle["text/plain"]) - 4 * KIB
    for kind, data in _rich_forms(shown):
        text = base64.b64encode(data).decode("ascii") if isinstance(data, bytes) else clean(data)
        size = json_size(text)
        if size > room and kind in ("image/png", "image/jpeg"):
            smaller = _smaller(data, room)
            if smaller:
                bundle["text/plain"] += f"\n[its {kind} form of {size:,} bytes is scaled down to fit]"
                kind, text, size = "image/png", smaller, json_size(smaller)
        if not text or size > room or len(bundle) >= BUNDLE_TYPES:
            bundle["text/plain"] += f"\n[its {kind} form of {size:,} bytes is left out: too large]"
            continue
        if kind not in bundle:
            bundle[kind] = text
            room -= size
    return bundle


def _rich_forms(shown: Any) -> Iterator[tuple[str, Any]]:
    picture = _picture(shown)
    if picture is not None:
        yield "image/png", picture
        return
    if isinstance(shown, type):
        return
    for kind, data in _mimebundle(shown):
        if isinstance(kind, str) and isinstance(data, (str, bytes)) and kind != "text/plain":
            yield kind[:NAME_CHARS], data
    for kind, name in _REPRS:
        try:
            method = getattr(shown, name, None)
            data = method() if callable(method) else None
            data = data[0] if isinstance(data, tuple) else data
        except Exception:
            continue
        if isinstance(data, (str, bytes)) and data:
            yield kind, data


def _mimebundle(shown: Any) -> list[tuple[Any, Any]]:
    try:
        method = getattr(shown, "_repr_mimebundle_", None)
        found = method(include=None, exclude=None) if callable(method) else None
        found = found[0] if isinstance(found, tuple) else found
        return list(found.items()) if isinstance(found, dict) else []
    except Exception:
        return []


def _loaded(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None) if module in sys.modules else None


def is_figure(shown: Any) -> bool:
    figure = _loaded("matplotlib.figure", "Figure")
    return isinstance(figure, type) and isinstance(shown, figure)


def _picture(shown: Any) -> bytes | None:
    """PNG of a matplotlib figure or a PIL image."""
    try:
        if is_figure(shown):
            return _png_of_figure(shown)
        image = _loaded("PIL.Image", "Image")
        if isinstance(image, type) and isinstance(shown, image):
            return _png_of_image(shown)
    except Exception:
        pass
    return None


def _png_of_figure(figure: Any) -> bytes:
    data = b""
    for dpi in (100, 60, 30):
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=dpi, bbox_inches="tight")
        data = file.getvalue()
        if len(data) * 4 // 3 < BUNDLE_BYTES // 2:
            break
    return data


def _png_of_image(image: Any) -> bytes:
    file = io.BytesIO()
    if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16"):
        image = image.convert("RGB")
    image.save(file, format="PNG")
    return file.getvalue()


def _smaller(data: Any, room: int) -> str:
    """An image scaled down until it fits, as base64; empty when it cannot be."""
    try:
        from PIL import Image

        image: Any = Image.open(io.BytesIO(data))
        for _ in range(8):
            image = image.resize((max(1, image.width // 2), max(1, image.height // 2)))
            text = base64.b64encode(_png_of_image(image)).decode("ascii")
            if len(text) + 2 <= room:
                return text
    except Exception:
        pass
    return ""
