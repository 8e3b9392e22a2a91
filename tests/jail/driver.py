"""The host's side of the jail, run as another user by the tests: a line of JSON {do, …} in, {value} or {error} out.

`python -I driver.py SOURCE_FOLDER WORKER_FILE`. Boxes and zygotes are named by numbers.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])

from farhand.sandbox.local import cgroup, probe, syscall, watch
from farhand.sandbox.local.zygote import BoxHandles, BoxSpec, Zygote, ZygoteSpec

READ_S = 60.0


class Driver:
    def __init__(self) -> None:
        self.zygotes: dict[int, Zygote] = {}
        self.boxes: dict[int, BoxHandles] = {}
        self.watches: dict[int, watch.Watch] = {}
        self.numbers = 0

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def start(self, **spec: Any) -> dict[str, Any]:
        for name in ("site", "mplconfig"):
            if spec.get(name):
                spec[name] = Path(spec[name])
        spec["preload"] = tuple(spec.get("preload", ()))
        zygote = Zygote.start(ZygoteSpec(worker=Path(sys.argv[2]).read_text(), **spec))
        number = self.number()
        self.zygotes[number] = zygote
        return {
            "zygote": number, "pid": zygote.pid, "loaded": zygote.loaded, "failed": zygote.failed,
            "threaded": zygote.threaded,
        }  # fmt: skip

    def create(self, zygote: int, **spec: Any) -> dict[str, Any]:
        box = BoxSpec(**spec)
        handles = self.zygotes[zygote].create(box)
        number = self.number()
        self.boxes[number] = handles
        self.watches[number] = watch.Watch(handles.roots, box.memory_bytes, handles.scratch)
        return {"box": number, "init": handles.init_pid, "worker": handles.worker_pid}

    def create_in(self, zygote: int, group: str) -> None:
        """With any file as its control group."""
        with open(group, "wb", 0) as file:
            self.zygotes[zygote].create(BoxSpec(), [file.fileno()])

    def create_many(self, zygote: int, count: int) -> list[int]:
        """All asked for at once, taken as they come."""
        link = self.zygotes[zygote]
        tokens = {link.begin_create(BoxSpec()) for _ in range(count)}
        made: list[int] = []
        while tokens:
            readable, _, _ = select.select([link], [], [], READ_S)
            if not readable:
                raise TimeoutError(f"{len(tokens)} boxes did not come")
            for token, result in link.on_readable():
                tokens.remove(token)
                if isinstance(result, Exception):
                    raise result
                number = self.number()
                self.boxes[number] = result
                made.append(number)
        return made

    def send(self, box: int, code: str) -> None:
        os.write(self.boxes[box].frames, json.dumps({"code": code}).encode() + b"\n")

    def receive(self, box: int, timeout_s: float = READ_S) -> dict[str, Any] | None:
        """None when the worker has ended."""
        data, deadline = b"", time.monotonic() + timeout_s
        while not data.endswith(b"\n"):
            readable, _, _ = select.select([self.boxes[box].frames], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                raise TimeoutError("the worker did not answer")
            try:
                part = os.read(self.boxes[box].frames, 1 << 16)
            except ConnectionResetError:
                part = b""
            if not part:
                return None
            data += part
        answer: dict[str, Any] = json.loads(data)
        return answer

    def eval(self, box: int, code: str, timeout_s: float = READ_S) -> dict[str, Any] | None:
        self.send(box, code)
        return self.receive(box, timeout_s)

    def status(self, box: int, timeout_s: float = 10.0) -> str:
        """What init says of the worker's end."""
        readable, _, _ = select.select([self.boxes[box].status], [], [], timeout_s)
        return os.read(self.boxes[box].status, 4096).decode() if readable else "nothing"

    def stdout(self, box: int) -> str:
        return os.read(self.boxes[box].stdout, 1 << 20).decode()

    def usage(self, box: int) -> dict[str, Any]:
        usage = self.watches[box].usage()
        return {name: getattr(usage, name) for name in usage.__slots__}

    def bomb(self, box: int, bound_bytes: int, timeout_s: float = 30.0) -> dict[str, Any]:
        """Look at the box every 10 ms, as a host does, and end it when it passes the bound."""
        deadline, looks = time.monotonic() + timeout_s, 0
        while time.monotonic() < deadline:
            usage = self.watches[box].usage()
            looks += 1
            if usage.memory_bytes > bound_bytes:
                self.boxes[box].kill()
                return {"seen_bytes": usage.memory_bytes, "looks": looks, "gone": self.boxes[box].wait(10)}
            time.sleep(0.01)
        raise TimeoutError("the bound was not passed")

    def interrupt(self, box: int) -> None:
        self.boxes[box].interrupt()

    def suspend(self, box: int) -> list[str]:
        watch.suspend(self.boxes[box].roots)
        return [process.state for process in watch.processes(self.boxes[box].roots)]

    def resume(self, box: int) -> None:
        watch.resume(self.boxes[box].roots)

    def kill(self, box: int) -> bool:
        self.boxes[box].kill()
        return self.boxes[box].wait(10)

    def wait(self, box: int, timeout_s: float = 10.0) -> bool:
        return self.boxes[box].wait(timeout_s)

    def close_box(self, box: int) -> None:
        self.watches.pop(box, None)
        handles = self.boxes.pop(box)
        handles.kill()
        handles.wait(10)
        handles.close()

    def open_beneath(self, box: int, path: str, folder: str = "workspace") -> str:
        """The first bytes, or the name of the error."""
        try:
            descriptor = syscall.open_beneath(getattr(self.boxes[box], folder), path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError as error:
            return f"errno {error.errno}"
        try:
            return os.read(descriptor, 1000).decode()
        finally:
            os.close(descriptor)

    def owner(self, box: int) -> int:
        return os.fstat(self.boxes[box].workspace).st_uid

    def raw(self, zygote: int, message: str, descriptors: int = 0) -> None:
        """A request of any form. The answer, if it names no token that is waited for, is dropped."""
        link = self.zygotes[zygote]._link
        null = os.open("/dev/null", os.O_RDONLY)
        try:
            socket.send_fds(link, [message.encode("utf-8", "surrogatepass")], [null] * descriptors)
        except OSError as error:
            if error.errno != 90:
                raise
        finally:
            os.close(null)

    def ping(self, zygote: int) -> int:
        return self.zygotes[zygote].ping(5.0)

    def descriptors(self, pid: int) -> int:
        return len(os.listdir(f"/proc/{pid}/fd"))

    def close_zygote(self, zygote: int) -> None:
        self.zygotes.pop(zygote).close()

    def limit_descriptors(self, count: int, pid: int) -> int:
        """Lowers the bound of another process; gives the one before."""
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (count, before[1]))
        return before[0]

    def listen(self) -> dict[str, Any]:
        """Sockets on the machine that no box may reach."""
        number = self.number()
        abstract = socket.socket(socket.AF_UNIX)
        abstract.bind(f"\0farhand-test-{os.getpid()}-{number}")
        abstract.listen()
        tcp = socket.create_server(("127.0.0.1", 0))
        self.held = getattr(self, "held", []) + [abstract, tcp]
        return {"abstract": f"farhand-test-{os.getpid()}-{number}", "port": tcp.getsockname()[1]}

    def probe(self) -> dict[str, Any]:
        report = probe.probe()
        return {
            "missing": [wall.name for wall in report.missing],
            "walls": {wall.name: [wall.stands, wall.detail] for wall in report.walls},
            "privileged": report.privileged,
        }

    def grouped(self, zygote: int, **spec: Any) -> dict[str, Any] | None:
        """A box in a control group, used and removed. None where none can be made."""
        groups = cgroup.Cgroups.open()
        if groups is None:
            assert not cgroup.Cgroups.usable()
            return None
        box = BoxSpec(**spec)
        group = groups.create("trial", box.memory_bytes, box.disk_bytes, box.processes)
        opened = group.open_procs()
        try:
            handles = self.zygotes[zygote].create(box, opened)
        finally:
            for each in opened:
                os.close(each)
        number = self.number()
        self.boxes[number] = handles
        found: dict[str, Any] = {"controllers": sorted(groups.controllers), "before": group.memory_bytes()}
        found["eval"] = self.eval(number, "x = b'x' * (20 << 20); result = len(x)")
        found["after"], found["cpu_s"], found["oom_kills"] = group.memory_bytes(), group.cpu_s(), group.oom_kills()
        if group.can_freeze:
            group.freeze()
            self.send(number, "result = 2")
            found["frozen"] = not select.select([handles.frames], [], [], 0.1)[0]
            group.thaw()
            found["thawed"] = self.receive(number)
        self.close_box(number)
        found["removed"] = group.remove()
        groups.close()
        return found

    def close(self) -> None:
        for box in list(self.boxes):
            self.close_box(box)
        for zygote in list(self.zygotes):
            self.close_zygote(zygote)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    driver = Driver()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            value = getattr(driver, request.pop("do"))(**request)
            answer = {"value": value}
        except Exception as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)
    driver.close()


if __name__ == "__main__":
    main()
