"""action.py: what runs is exactly what the model meant to run, and any text at all is an answer within a second."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farhand.action import BLOCKS, Parsed, bound_names, fence_code, parse, parse_call, reminder

DOC = '''def readme():
    return """
```python
print("inside")
```
"""
print(readme())'''


def code(text: str, **options: str) -> str:
    parsed = parse(text, **options)  # type: ignore[arg-type]
    assert parsed.kind == "code", parsed
    return parsed.code


# What is code.


@pytest.mark.parametrize(
    "text",
    [
        "```python\nprint(1)\n```",
        "```py\nprint(1)\n```",
        "```python3\nprint(1)\n```",
        "```Python\nprint(1)\n```",
        "``` python \nprint(1)\n``` ",
        "```{python}\nprint(1)\n```",
        "```{.python .numberLines}\nprint(1)\n```",
        '```python title="x"\nprint(1)\n```',
        "````python\nprint(1)\n````",
        "~~~python\nprint(1)\n~~~",
        "~~~~ py\nprint(1)\n~~~~~",
        "```python\r\nprint(1)\r\n```\r\n",
        "```python\rprint(1)\r```",
        "```python\n\ufeffprint(1)\n```",
        "\ufeff```python\nprint(1)\n```" if False else "```python\n\u200b\u200dprint(1)\n```",
        "Words before.\n\n```python\nprint(1)\n```\n\nWords after.",
        "Words before: ```python\nprint(1)\n```",
        "```python print(1)```",
        "```python\nprint(1)```",
        "```python\nprint(1)\n</code>",
        "<code>print(1)</code>",
        "<code>\nprint(1)\n</code>",
        '<code lang="python">\nprint(1)\n</code> and so on',
        "<code>\n    print(1)\n</code>",
        "<code>\n```python\nprint(1)\n```\n</code>",
        "<code>\nprint(1)\n```\n",
        "Thoughts: <code>\nprint(1)\n</code>",
        "- ```python\n  print(1)\n  ```",
        "1. First:\n\n   ```python\n   print(1)\n   ```\n2. Second",
        "   ```python\nprint(1)\n   ```",
        "\t```python\n\tprint(1)\n\t```",
        "    ```python\n      print(1)\n    ```",
        "```\nprint(1)\n```",
        "~~~\nprint(1)\n~~~",
        "```python\nprint(1)\n```\nIt printed:\n```\n1\n```",
        "```python\nprint(1)\n```\n```text\n1\n```",
        "```json\n{}\n```\n```python\nprint(1)\n```",
        "```text\nnot = code\n```\n```\nprint(1)\n```",
        "```\nplain words here\n```\n```\nprint(1)\n```",
        "<think>\n```python\nbad()\n```\n</think>\n```python\nprint(1)\n```",
        "<think>x</think>```python\nprint(1)\n```",
    ],
)
def test_one_action_in_many_forms(text: str) -> None:
    assert code(text) == "print(1)"


def test_several_python_blocks_are_one_action() -> None:
    text = "First:\n```python\na = 1\n```\nthen\n```\n1\n```\n```bash\nls\n```\nand\n<code>b = 2</code>\n```py\n\n```\n"
    parsed = parse(text)
    assert parsed == Parsed("code", "a = 1\n\nb = 2", "First:", "2 blocks were joined")


def test_fences_inside_strings_do_not_end_the_block() -> None:
    for quote in ('"""', "'''"):
        source = DOC.replace('"""', quote)
        assert code(f"Here:\n```python\n{source}\n```\nDone.") == source
        assert code(f"<code>\n{source}\n</code>") == source
    assert code("```\n" + DOC + "\n```") == DOC
    assert code('<code>print("</code>")</code>') == 'print("</code>")'
    assert code("<code>print(1) # done</code>") == "print(1) # done"
    two = 'a = """\n```\n"""\nb = f"""\n```\n"""  # it\'s\n'
    assert code(f"```python\n{two}```\nthen\n```\nout\n```") == two.rstrip("\n")


def test_a_longer_fence_holds_shorter_ones() -> None:
    assert code("````python\nx = 1\n```\n````") == "x = 1\n```"


def test_a_string_that_never_ends_does_not_swallow_the_prose() -> None:
    broken = 'x = """never closed'
    assert code(f"```python\n{broken}\n```\nI said \"hi\" and '''that'''.\n```\nout\n```") == broken
    assert code(f'```python\n{broken}\n```\nmore """ here\n```\nout\n```') == broken


def test_code_with_an_error_in_it_is_still_the_action() -> None:
    assert code("```python\nprint(1\n```") == "print(1"
    assert code("```python\n  x = 1\n y = 2\n```") == "  x = 1\n y = 2"


def test_blank_lines_of_a_block_are_kept() -> None:
    assert code("```python\n\nx = 1\n\n```") == "\nx = 1\n"


def test_a_list_item_keeps_the_inner_indentation() -> None:
    text = "* ```python\n  if x:\n      y = 1\n\n  z = 2\n  ```\n* next"
    assert code(text) == "if x:\n    y = 1\n\nz = 2"


# What is not.


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", "none"),
        ("   \n", "none"),
        ("The answer is 3.", "none"),
        ("print(1)", "none"),
        ("Use the `<code>` tag or ``` fences.", "none"),
        ("```\nsome output of words\n```", "none"),
        ("```bash\nls -l\n```", "other_language"),
        ("```json\n[1]\n```", "other_language"),
        ("```python\n```", "empty"),
        ("```python\n\n   \n```", "empty"),
        ("```\n\n```", "empty"),
        ("<code></code>", "empty"),
        ("```python", "empty"),
        ("```python\nprint(1\n", "unclosed"),
        ("```python\nprint(1)\n\nThis prints one.", "unclosed"),
        ("<code>\nfor x in y:\n", "unclosed"),
        ("<think>\n```python\nbad()\n```\n</think>\nNothing to do.", "none"),
        ("<think>\n```python\nbad()\n```\n", "none"),
    ],
)
def test_what_cannot_be_run(text: str, kind: str) -> None:
    parsed = parse(text)
    assert (parsed.kind, parsed.code) == (kind, "")
    assert parsed.note


@pytest.mark.parametrize(
    "text", ["", "Let me think about", "```python\nx = 1\nprint(", "```python\nx = 1", "<code>x", "```\nx"]
)
def test_a_reply_that_was_cut_off_is_never_run(text: str) -> None:
    assert parse(text, finish="length").kind == "cut_off"


def test_a_reply_cut_off_after_its_code_is_run() -> None:
    assert code("```python\nx = 1\n```\nNow we wai", finish="length") == "x = 1"
    cut = "```python\nx = 1\n```\nand\n```python\ny = "
    assert parse(cut, finish="length").kind == "cut_off"
    assert parse(cut).kind == "unclosed"
    assert code(cut + "2") == "x = 1\n\ny = 2"


@pytest.mark.parametrize(
    "tail", ["", "\n", "\n`", "\n``", "\n```", "</co", "\n</", "\n<", "\n</code", "`", "\n~~", "\nObserv"]
)
def test_half_a_stop_sequence_is_taken_off(tail: str) -> None:
    stop = ("</code>\n", "\nObservation:", "\n```\n\n")
    for start in ("```python\n", "<code>\n") if "~" not in tail else ("~~~python\n",):
        parsed = parse(f"Hm.\n{start}x = 'a'{tail}", stop=stop)
        assert parsed == Parsed("code", "x = 'a'", "Hm.", parsed.note)


def test_a_stop_sequence_is_not_taken_out_of_whole_code() -> None:
    assert code("```python\nx = 1 # </co") == "x = 1 # </co"


def test_prose_is_what_stands_before_the_code() -> None:
    assert parse("I will\nlook.\n\n```python\nx\n```\nlater").prose == "I will\nlook."
    assert parse("Only words.").prose == "Only words."
    assert parse("Hm ```python\nx\n```").prose == "Hm"


# The native tool.


@pytest.mark.parametrize(
    "arguments",
    [
        '{"code": "print(\\"a\\")\\nprint(2)"}',
        '{"code": "print(\\"a\\")\\nprint(2)",}',
        ' {"code" : "print(\\"a\\")\\nprint(2)" , } ',
        '{"code": "print(\\"a\\")\nprint(2)"}',
        '{"code": "print("a")\\nprint(2)"}',
        '{"code": "print(\\"a\\")\\r\\nprint(2)"}',
        '{"code": "\\ufeffprint(\\"a\\")\\nprint(2)"}',
        '{"code": "```python\\nprint(\\"a\\")\\nprint(2)\\n```"}',
        '{"code": "<code>print(\\"a\\")\\nprint(2)</code>"}',
        '{"code": ["print(\\"a\\")", "print(2)\\n"]}',
        '{"source": "print(\\"a\\")\\nprint(2)"}',
        '{"code": "print(\\"a\\")\\nprint(2)", "timeout": 5}',
        "{'code': 'print(\"a\")\\nprint(2)'}",
        '{"code": "print(\\"a\\")\\nprint(2)"',
        '"print(\\"a\\")\\nprint(2)"',
        'print("a")\nprint(2)',
        '```python\nprint("a")\nprint(2)\n```',
        '```json\n{}\n```\n```python\nprint("a")\nprint(2)\n```',
    ],
)
def test_what_models_send_to_the_tool(arguments: str) -> None:
    parsed = parse_call(arguments)
    assert (parsed.kind, parsed.code) == ("code", 'print("a")\nprint(2)'), parsed


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ("", "empty"),
        ("{}", "empty"),
        ('{"code": ""}', "empty"),
        ('{"code": " \\n"}', "empty"),
        ('{"code": "x = 1\\nprint(', "cut_off"),
        ('{"code": "', "cut_off"),
        ('{"code": "x\\', "cut_off"),
        ('{"code": 5}', "none"),
        ('{"a": "x", "b": "y"}', "none"),
        ('{"code": [1]}', "none"),
        ("[1]", "none"),
        ("5 is the answer", "none"),
        ('{"code": "say "hi" and "bye', "none"),
        ("null", "none"),
        ("[" * 100_000, "none"),
        ("9" * 100_000, "none"),
    ],
)
def test_what_is_no_call(arguments: str, kind: str) -> None:
    parsed = parse_call(arguments)
    assert (parsed.kind, parsed.code) == (kind, ""), parsed
    assert parsed.note


@given(st.text(min_size=1))
@example("\ud83d")
@example("😀\\")
def test_every_code_survives_the_json(source: str) -> None:
    plain = source.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff\u200b\u200c\u200d\u2060")
    if plain.strip().startswith(("```", "<code>")):
        return
    for arguments in (json.dumps({"code": source}), json.dumps({"code": source}, ensure_ascii=False)):
        parsed = parse_call(arguments)
        assert parsed.code == (plain if plain.strip() else "")


@given(st.text(), st.integers(0, 40))
def test_every_truncated_call_is_cut_off_or_whole(source: str, cut: int) -> None:
    arguments = json.dumps({"code": "x = 1\n" + source})
    parsed = parse_call(arguments[: len(arguments) - 2 - min(cut, len(source))])
    assert parsed.kind == "cut_off"


# Reminders.


@pytest.mark.parametrize("kind", ["none", "empty", "unclosed", "cut_off", "other_language"])
def test_a_reminder_says_what_is_wrong_and_what_to_do(kind: str) -> None:
    parsed = Parsed(kind, note="x" * 5000)  # type: ignore[arg-type]
    fenced, tool = reminder(parsed, dialect="fenced"), reminder(parsed, dialect="tool")
    assert fenced.splitlines()[0] == tool.splitlines()[0]
    assert fenced.splitlines()[0].endswith(".")
    assert "```python" in fenced
    assert "final_answer(answer)" in fenced
    assert "`python`" in tool
    assert "```" not in tool
    assert len(fenced) < 700
    assert parse(fenced).kind == "empty" or parse(fenced).code.startswith("#")


def test_code_needs_no_reminder() -> None:
    assert reminder(parse("```python\nx\n```"), dialect="fenced") == ""


def test_the_reason_of_each_reply_is_its_own() -> None:
    replies = ["words", "```python\n\n```", "```python\nprint(", "```bash\nls\n```", "```\nplain words\n```"]
    reasons = {reminder(parse(reply), dialect="fenced").splitlines()[0] for reply in replies}
    assert len(reasons) == len(replies)
    assert any("'bash'" in reason for reason in reasons)


# Any text at all.

pieces = st.lists(
    st.sampled_from(
        [
            *[
                "```",
                "````",
                "~~~",
                "```python",
                "<code>",
                "</code>",
                "`",
                "``",
                "\n",
                "\n\n",
                "\r\n",
                "  ",
                "\t",
                "- ",
            ],
            *['"""', "'''", '"', "'", "\\", "#", "x = 1", "print(", ")", "{", "}", "def f():\n", "    ", "é", "\ud800"],
            *["<think>", "</think>", "python", "json", ":", "\ufeff", "\0", "f'", 'rb"', "\u2028", "await x", "\\\n"],
        ]
    ),
    max_size=40,
).map("".join)


@settings(max_examples=800)
@given(pieces | st.text(), st.sampled_from(["stop", "length", "tool_calls", ""]))
def test_parsing_is_total(text: str, finish: str) -> None:
    for parsed in (parse(text, finish=finish, stop=("</code>", "\n```\n\n")), parse_call(text)):
        assert (parsed.kind == "code") == bool(parsed.code.strip())
        assert "\r" not in parsed.code
        reminder(parsed, dialect="fenced")
        if parsed.kind == "code":
            assert parse(fence_code(parsed.code)).code == parsed.code.lstrip("\ufeff\u200b\u200c\u200d\u2060")


@settings(max_examples=800)
@given(pieces | st.text(), st.sampled_from(["", "Let me see.\n\n", "```json\n{}\n```\n"]))
@example("x = 1\n", "")
@example('"""\n```\n"""', "")
@example("```", "")
@example("~~~\n</code>", "")
def test_fenced_code_comes_back_exactly(source: str, before: str) -> None:
    source = source.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff\u200b\u200c\u200d\u2060")
    parsed = parse(before + fence_code(source))
    if source.strip():
        assert parsed == Parsed("code", source, before.strip() if "json" not in before else parsed.prose, "")
    else:
        assert parsed.kind == "empty"


MEGABYTE = 1_000_000
HOSTILE = {
    "prose": "word " * (MEGABYTE // 5),
    "one line": "x" * MEGABYTE,
    "backticks": "`" * MEGABYTE,
    "tildes": "~" * MEGABYTE,
    "spaces": " " * MEGABYTE,
    "spaces after a fence": "```python" + " " * MEGABYTE,
    "newlines": "\n" * MEGABYTE,
    "open fences": "```python\n" * (MEGABYTE // 10),
    "closed blocks": "```python\nx\n```\n" * (MEGABYTE // 16),
    "bare blocks": "```\n(((\n```\n" * (MEGABYTE // 12),
    "strings that never end": '```python\n\\"""\n```\n' * (MEGABYTE // 18),
    "strings of two kinds": "```python\n\"\"\"\n```\n'''\n```\n" * (MEGABYTE // 25),
    "shrinking fences": "".join("`" * (999 - n % 900) + "python\n" for n in range(1500)),
    "escapes": '```python\n"' + '\\"' * (MEGABYTE // 2),
    "escaped quotes": "```python\n" + '\\"' * (MEGABYTE // 2) + "\n```",
    "quotes": "```python\n" + "\"'" * (MEGABYTE // 2) + "\n```\n```",
    "open tags": "<code>" * (MEGABYTE // 6),
    "closing tags": "<code>" + "</code>" * (MEGABYTE // 7),
    "tags in strings": "<code>'''" + "</code>\n" * (MEGABYTE // 8),
    "tag lines": "<code>\n'''\n</code>\n" * (MEGABYTE // 19),
    "fences in a string": "```python\n'''\n" + "```\n" * (MEGABYTE // 4),
    "valid code": "```python\n" + "x = 1\n" * (MEGABYTE // 6) + "```",
    "valid code, unclosed": "```python\n" + "x = 1\n" * (MEGABYTE // 6),
    "bare valid code": "```\n" + "x = 1\n" * (MEGABYTE // 6) + "```",
    "deep code": "```python\n" + "(" * MEGABYTE,
    "sums": "```\n" + "a+" * 40_000 + "a\n```",
    "indented": (" " * 50 + "```python\n" + " " * 50 + "if x:\n") * 8_000,
    "list items": "- " * (MEGABYTE // 2),
    "late fences": "a ```python\n" * (MEGABYTE // 12),
    "late ends": "````python\nx```\n" * (MEGABYTE // 16),
    "ends of another length": "````python\nx````\n```\n" * (MEGABYTE // 22),
    "nested": "<code>```python\n" * (MEGABYTE // 16),
    "thought": "<think>" * (MEGABYTE // 7),
    "commas": '{"code": ' + ", " * (MEGABYTE // 2),
    "cut call": '{"code": "' + "\\n" * (MEGABYTE // 2),
    "quoted call": '{"code": "' + 'a"' * (MEGABYTE // 2) + '"}',
    "braces": '{"a":' * (MEGABYTE // 5),
    "null bytes": "```python\n" + "\0" * MEGABYTE + "\n```",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_megabyte_of_anything_takes_less_than_a_second(name: str) -> None:
    text = HOSTILE[name]
    for call in (parse, parse_call, lambda it: parse(it, finish="length", stop=("</code>\n", "x" * 50)), fence_code):
        started = time.process_time()
        call(text)
        assert time.process_time() - started < 1.0


def test_too_many_blocks_are_counted_not_hidden() -> None:
    parsed = parse("```python\nx\n```\n" * (BLOCKS + 5))
    assert parsed.code.count("x") == BLOCKS
    assert f"only the first {BLOCKS} blocks" in parsed.note


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = 1\ny: int = 2\nz += 1", "x y z"),
        ("import os.path, json as j\nfrom a.b import c as d, e", "os j d e"),
        ("def f():\n    inner = 1\nclass C:\n    attribute = 1", "f C"),
        ("for a, (b, *c) in d:\n    with e as f, g as h:\n        i = 1", "a b c f h i"),
        ("[q for q in r]\nlambda s: s\n(t := 1)", "t"),
        ("from m import *\nx.y = z[0] = 1", ""),
        ("not python at all", ""),
    ],
)
def test_the_names_that_code_binds(source: str, names: str) -> None:
    assert bound_names(source) == tuple(names.split())
