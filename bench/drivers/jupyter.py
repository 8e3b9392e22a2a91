"""Drives Jupyter kernels with jupyter_client and times them itself. Requests and answers are lines of JSON."""

import json
import sys
import time

from jupyter_client.manager import KernelManager

PATIENCE_S = 120.0


class Kernel:
    """One kernel and its client."""

    def __init__(self):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)

    def run(self, code):
        """The value's text and the number of characters of output, when the kernel says that it is idle again."""
        asked = self.client.execute(code)
        shown, written = None, 0
        while True:
            message = self.client.get_iopub_msg(timeout=PATIENCE_S)
            if message["parent_header"].get("msg_id") != asked:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "execute_result":
                shown = content["data"]["text/plain"]
            elif kind == "stream":
                written += len(content["text"])
            elif kind == "error":
                raise RuntimeError("\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return shown, written

    def stop(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


class Driver:
    def __init__(self):
        self.kernels = []
        self.timer = time.perf_counter

    def first(self, code):
        """From nothing to the value of some code, in a new kernel."""
        began = self.timer()
        kernel = Kernel()
        try:
            text, _ = kernel.run(code)
            return {"seconds": self.timer() - began, "text": text}
        finally:
            kernel.stop()

    def run(self, code):
        """Some code in a kernel that is kept."""
        if not self.kernels:
            self.kernels.append(Kernel())
            self.kernels[0].run("0")
        began = self.timer()
        text, written = self.kernels[0].run(code)
        return {"seconds": self.timer() - began, "text": text, "written": written}

    def hold(self, code, count):
        """That many kernels that ran some code, and their processes."""
        while len(self.kernels) < count:
            self.kernels.append(Kernel())
        for kernel in self.kernels:
            kernel.run(code)
        return {"pids": [kernel.manager.provisioner.pid for kernel in self.kernels]}

    def close(self):
        while self.kernels:
            self.kernels.pop().stop()
        return {}


def main():
    driver = Driver()
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            print(json.dumps(getattr(driver, asked.pop("op"))(**asked)), flush=True)
    finally:
        driver.close()


main()
