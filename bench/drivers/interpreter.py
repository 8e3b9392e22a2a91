"""Drives smolagents' LocalPythonExecutor, which interprets in this process. Requests and answers are lines of JSON."""

import json
import os
import sys
import time

from smolagents.local_python_executor import LocalPythonExecutor

IMPORTS = ["json", "re", "time", "numpy", "pandas"]


def new_executor(tools=None):
    executor = LocalPythonExecutor(additional_authorized_imports=IMPORTS)
    executor.send_tools(tools or {})
    return executor


def ping(n):
    return n


class Driver:
    def __init__(self):
        self.executor = None
        self.held = []
        self.timer = time.perf_counter

    def prepare(self, code):
        exec(code, {})
        return {}

    def first(self, code):
        began = self.timer()
        value = new_executor()(code).output
        return {"seconds": self.timer() - began, "text": repr(value)}

    def run(self, code):
        if self.executor is None:
            self.executor = new_executor({"ping": ping})
        began = self.timer()
        value = self.executor(code).output
        return {"seconds": self.timer() - began, "text": repr(value), "written": 0}

    def hold(self, code, count):
        while len(self.held) < count:
            self.held.append(new_executor())
            self.held[-1](code)
        return {"pids": [os.getpid()]}

    def close(self):
        self.executor = None
        self.held.clear()
        return {}


def main():
    driver = Driver()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = getattr(driver, asked.pop("op"))(**asked)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(json.dumps(answer), flush=True)


main()
