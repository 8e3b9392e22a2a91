"""The reactor."""

from __future__ import annotations

import socket

from farhand.sandbox.runner.reactor import READ, Reactor


def test_timers_come_in_their_order_and_after_descriptors() -> None:
    reactor, seen = Reactor(), []
    ours, theirs = socket.socketpair()
    try:
        reactor.call_later(0.02, lambda: seen.append("late"))
        reactor.call_later(0.0, lambda: seen.append("early"))
        reactor.call_later(0.0, lambda: seen.append("never")).cancel()
        reactor.call_later(0.03, reactor.stop)
        reactor.watch(ours.fileno(), READ, lambda mask: seen.append(ours.recv(9).decode()))
        theirs.send(b"read")
        reactor.call_soon(lambda: seen.append("soon"))
        reactor.run()
        assert seen == ["read", "soon", "early", "late"]
        reactor.watch(ours.fileno(), 0, lambda mask: None)
    finally:
        reactor.close()
        ours.close()
        theirs.close()
