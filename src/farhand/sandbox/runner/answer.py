"""Answers and displays of the guest."""

from __future__ import annotations

from typing import Any

from farhand import value
from farhand.sandbox.runner.bounds import ANSWERS, KIB, REPR_CHARS
from farhand.sandbox.runner.channel import Channel
from farhand.sandbox.runner.display import bundle_of
from farhand.sandbox.runner.output import flush_output
from farhand.sandbox.runner.text import clean, fitting


class Answered:
    """Sends what `final_answer` and `display` are given."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.result_bytes = 512 * KIB
        self.answers = 0

    def final_answer(self, answer: Any = None) -> Any:
        """Give the answer to the user's task. Returns it; the code goes on."""
        self.channel.require_own_process()
        self.answers += 1
        if self.answers > ANSWERS + 1:
            return answer
        tree, problem = None, None
        try:
            tree = value.encode(answer, name="the answer", max_bytes=self.result_bytes)
        except (ValueError, TypeError) as error:
            problem = str(error)
        try:
            shown = fitting(repr(answer), REPR_CHARS)
        except Exception as error:
            shown = f"<{type(answer).__name__} whose repr raised {type(error).__name__}>"
        flush_output()
        self.channel.send({"t": "answer", "value": tree, "repr": shown, "problem": problem and clean(problem)}, True)
        return answer

    def display(self, *shown: Any) -> None:
        """Show values as they would be shown at the end of the code."""
        flush_output()
        for each in shown:
            self.channel.send({"t": "display", "bundle": bundle_of(each)}, True)
