"""The model's request, derived from the state. Pure.

Because it is derived it is valid by construction: every native call has exactly one result, in the next messages,
whatever
became of the action; a call without a result is rendered as what it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from farhand.action import fence_code, reminder
from farhand.limits import TRANSCRIPT_OUTPUT_CHARS
from farhand.model.port import Message, ModelRequest, Prompting, ToolCall, ToolSpec
from farhand.state import FENCED, PYTHON, TOOL, Action, Effect, State, Step, Turn
from farhand.tool import Tool

_COMMON = """\
You solve the user's task by writing Python. Each of your replies is one action: code that runs in a sandbox, in one
namespace that lives on: variables, functions and imports of earlier actions are still there. You are shown what the
code printed, the value of its last expression, and any error. Work in small steps and print what you need to see.

When you know the answer, call final_answer(value) in your code. The answer may be any value: text, a number, a list,
a table.

Rules
- Files live in /workspace (the current folder). There is no network in the sandbox and no input().
- The tools below are functions that are already defined: call them, do not import or redefine them.
- Imports: {imports}.
- Never repeat a call whose outcome is unknown.
"""

_FENCED_FORM = """\
Reply with a short thought and then exactly one fenced block:

```python
# your code
```
"""

_TOOL_FORM = "Act by calling the tool `python` with your code. One call per reply.\n"

_PYTHON_SPEC = ToolSpec(
    name=PYTHON,
    description="Run Python code in the sandbox. Variables live on between calls. Call final_answer(value) to answer.",
    parameters=json.dumps(
        {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The Python code to run."}},
            "required": ["code"],
            "additionalProperties": False,
        }
    ),
)

EFFECT_VALUE_CHARS = 400
FENCED_STOP = ("\n```\n\n", "</code>\n")


def system_prompt(tools: Sequence[Tool], imports: str, instructions: str, dialect: str) -> str:
    parts = [_COMMON.format(imports=imports), _FENCED_FORM if dialect == FENCED else _TOOL_FORM]
    if tools:
        parts.append("Tools\n\n```text\n" + "\n\n".join(_tool_text(tool) for tool in tools) + "\n```\n")
    if instructions:
        parts.append("Instructions\n" + instructions.strip() + "\n")
    return "\n".join(parts)


def _tool_text(tool: Tool) -> str:
    word = "async def" if tool.is_async else "def"
    doc = "\n".join("    " + line for line in tool.description.strip().splitlines())
    head = f"{word} {tool.signature_text()}:"
    return f"{head}\n{doc}" if doc else head


def request(
    state: State, *, system: str, dialect: str, prompting: Prompting, max_output_tokens: int | None = None
) -> ModelRequest:
    """The request for the open turn's next step."""
    if prompting.examples:
        return _example_request(state, prompting, max_output_tokens)
    messages = [Message("system", system)]
    for turn in state.turns:
        messages.extend(_turn(turn, state, dialect))
    return ModelRequest(
        messages=tuple(_joined(messages)),
        tools=(_PYTHON_SPEC,) if dialect == TOOL else (),
        stop=FENCED_STOP if dialect == FENCED else (),
        max_output_tokens=max_output_tokens,
    )


def _example_request(state: State, prompting: Prompting, max_output_tokens: int | None) -> ModelRequest:
    """A list of examples and the question alone: for models too small for instructions."""
    messages = []
    for question, code in prompting.examples:
        messages += [Message("user", question), Message("assistant", code)]
    turn = state.turns[-1]
    messages.append(Message("user", "\n".join(text for _, text in turn.messages)))
    return ModelRequest(
        messages=tuple(messages),
        max_output_tokens=max_output_tokens or 160,
        temperature=0.0 if turn.step is None or turn.step.reply is None else 0.7,
        seed=len(turn.steps),
        grammar=prompting.grammar,
        stop=(),
    )


def _joined(messages: Iterable[Message]) -> list[Message]:
    """Neighbouring user messages as one: some servers insist on taking turns."""
    out: list[Message] = []
    for message in messages:
        if out and message.role == "user" == out[-1].role:
            out[-1] = Message("user", out[-1].text + "\n\n" + message.text)
        else:
            out.append(message)
    return out


def _turn(turn: Turn, state: State, dialect: str) -> list[Message]:
    messages: list[Message] = []
    after = 0
    for step in turn.steps:
        if step.reply is None:
            break
        messages += _said(turn, state, after, step.seen)
        messages += _step(turn, step, state, dialect)
        after = step.seen
    messages += _said(turn, state, after, turn.until)
    if turn.status == "cancelled":
        messages.append(Message("user", f"(The user stopped this turn: {turn.cancel or 'cancelled'}.)"))
    if turn.status == "failed" and turn.error:
        messages.append(Message("user", f"(This turn failed: {turn.error.get('message', '')})"))
    return messages


def _said(turn: Turn, state: State, after: int, until: int | None) -> list[Message]:
    """What the user wrote, and what the model is told besides, between two places of the log."""
    start = max(after, turn.messages[0][0] - 1)
    heard = [*turn.messages, *(note for note in state.notes if note[0] > start)]
    texts = [text for seq, text in sorted(heard) if seq > start and (until is None or seq <= until)]
    return [Message("user", "\n\n".join(texts))] if texts else []


def _step(turn: Turn, step: Step, state: State, dialect: str) -> list[Message]:
    assert step.reply is not None
    if dialect == TOOL and step.reply.calls:
        return _native(turn, step, state)
    text = step.reply.text
    if step.reply.calls:  # the session was driven in the other dialect then
        text = (text + "\n\n" + fence_code(step.reply.parsed.code)).strip()
    return [Message("assistant", text or "(nothing)"), Message("user", _observation(turn, step, state, dialect))]


def _native(turn: Turn, step: Step, state: State) -> list[Message]:
    assert step.reply is not None
    calls = tuple(
        ToolCall(call.get("id") or f"call_{step.number}_{i}", call["name"], call.get("arguments") or "{}")
        for i, call in enumerate(step.reply.calls)
    )
    messages = [Message("assistant", step.reply.text, calls=calls)]
    taken = next((i for i, call in enumerate(calls) if call.name == PYTHON), None)
    for i, call in enumerate(calls):
        if i == taken:
            text = _observation(turn, step, state, TOOL)
        elif call.name == PYTHON:
            text = "Not run: one call of `python` per reply. Send it again if it is still wanted."
        else:
            text = f"There is no tool `{call.name}`. The only tool is `python`; call functions inside its code."
        messages.append(Message("tool", text, call_id=call.id))
    return messages


def _observation(turn: Turn, step: Step, state: State, dialect: str) -> str:
    assert step.reply is not None
    action = step.action
    if action is None:
        if step.reply.parsed.kind == "code":
            return _repeat_text(turn, step) if turn.status == "open" else "(The code was not run.)"
        return reminder(step.reply.parsed, dialect="tool" if dialect == TOOL else "fenced")
    return observation(action)


def _repeat_text(turn: Turn, step: Step) -> str:
    return (
        "Not run: this is the same code as in your last actions, and its result is above. "
        "Do something different, or call final_answer(...) with what you know."
    )


def observation(action: Action) -> str:
    """What the model is shown of an action: output, value, error, effects, files, losses."""
    parts = []
    output = "".join(text for _, text in action.chunks)
    if output:
        parts.append("Output:\n" + cut_middle(output, TRANSCRIPT_OUTPUT_CHARS))
    if action.cut_bytes:
        parts.append(f"[{action.cut_bytes:,} more bytes of output were cut]")
    if action.displays:
        kinds = ", ".join(sorted({kind for bundle in action.displays for kind in bundle}))
        parts.append(f"[shown to the user: {len(action.displays)} × {kinds}]")
    parts += _outcome(action)
    cut_off = action.finish is not None and action.finish.error is not None
    parts += [text for effect in action.effects.values() if (text := _effect_text(effect, cut_off))]
    return "\n".join(parts) or "The code ran without output."


def _outcome(action: Action) -> list[str]:
    finish = action.finish
    if finish is None:
        return ["[The action is still running.]"]
    parts = []
    if finish.value is not None and finish.value.get("text/plain"):
        parts.append("Value: " + cut_middle(finish.value["text/plain"], TRANSCRIPT_OUTPUT_CHARS))
    if finish.error is not None:
        parts.append(_error_text(finish.error))
        if finish.answer is not None or action.answers:
            parts.append("[The action called final_answer but then failed: the answer was not taken.]")
    elif action.answers and action.answers[0].get("problem"):
        parts.append(f"[final_answer was not taken: {action.answers[0]['problem']}]")
    if finish.lost:
        parts.append(f"[The sandbox was replaced. Files are kept; these names are lost: {_names(finish.lost)}]")
    if finish.left_out:
        parts.append("[Not saved: " + "; ".join(f"{path}: {reason}" for path, reason in finish.left_out[:10]) + "]")
    changed = [entry["path"] for entry in finish.files if not entry.get("removed")]
    if changed:
        parts.append(f"[Files saved: {_names(changed)}]")
    return parts


def _error_text(error: dict[str, Any]) -> str:
    text = error.get("traceback") or f"{error.get('type') or error.get('kind')}: {error.get('message', '')}"
    text = "Error:\n" + cut_middle(str(text), TRANSCRIPT_OUTPUT_CHARS // 2)
    if error.get("kind") == "limit":
        text += f"\n[The limit `{error.get('limit')}` was reached.]"
    if error.get("hint") and error["hint"] not in text:
        text += f"\n{error['hint']}"
    return text


def _effect_text(effect: Effect, cut_off: bool) -> str:
    """What became of a call; of those that are done only where the code did not live to use it."""
    if effect.outcome == "unknown":
        return (
            f"[The outcome of {effect.tool}(…) ({effect.id}) is unknown: it may or may not have happened. "
            "It will not be started again with these arguments until that is settled.]"
        )
    if effect.outcome is None:
        return f"[The call {effect.tool}(…) ({effect.id}) has not returned.]"
    if cut_off and effect.outcome == "done" and effect.effect_class != "pure":
        given = cut_middle(json.dumps(effect.value), EFFECT_VALUE_CHARS)
        return f"[Done, do not repeat: {effect.tool}({cut_middle(json.dumps(effect.arguments), 200)}) returned {given}]"
    return ""


def _names(names: Sequence[str], most: int = 40) -> str:
    text = ", ".join(names[:most])
    return text if len(names) <= most else f"{text} and {len(names) - most} more"


def cut_middle(text: str, most: int) -> str:
    """Head and tail of a text, the cut announced."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters cut …]\n{text[-half:]}"
