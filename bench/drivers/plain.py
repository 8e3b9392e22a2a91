"""The barest worker: a namespace, code on standard input, the value of a trailing expression on standard output.

A request is a line `BODY EXPRESSION` of two sizes in bytes and then both texts, an answer the repr's size in a line and
the repr. It imports only `sys`, so that what is measured is Python, pipes and the wall around them.
"""

import sys


def main():
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    space = {"__name__": "__main__", "__builtins__": __builtins__}
    while True:
        line = asked.readline()
        if not line:
            return
        body, expression = (asked.read(int(size)).decode() for size in line.split())
        if body:
            exec(compile(body, "<action>", "exec"), space)
        value = eval(compile(expression, "<action>", "eval"), space) if expression else None
        shown = repr(value).encode()
        answers.write(b"%d\n%b" % (len(shown), shown))
        answers.flush()


main()
