"""The program in a box, one noun a module: a supervisor that never runs guest code, and a worker that runs it.

It is sent into boxes as one text, joined to `value.py` (`sandbox/program.py`, which lists the modules in order); the
host of the local jail imports the supervisor and plays it outside the wall. So each module runs on Python 3.9 and
imports the standard library, `farhand.value` and modules before it, all of them at its top. docs/protocol.md is what
the two roles speak. What a worker sends is guest-controlled. The supervisor never waits for it, never unpickles, and
bounds what it keeps.
"""
