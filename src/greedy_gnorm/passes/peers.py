"""How several processes wait for one another: as long as all of them live, and no longer.

A collective of torch knows only a timeout. Here every process holds a connection to the first one. The kernel closes it
when a process ends, so a dead process is noticed at once, and a busy one may take as long as it needs.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import threading
import time
from collections import defaultdict
from contextlib import suppress
from typing import Any

from greedy_gnorm.errors import GnormError, ProcessGone

LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher sets for each process that it starts; a scheduler may leave some of these behind."""

LINGER = 30.0
"""Seconds that a failed process waits for the first one to show its error."""

GRACE = 0.5
"""Seconds for a process to fail with an error of its own before that of another process interrupts it."""

RESUME = "Completed steps are saved: continue with --resume."


def launched() -> bool:
    """Whether a launcher started this process as one of several; otherwise a variable here or there means nothing."""
    if any(name not in os.environ for name in LAUNCHER):
        return False
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < max(int(size), 1)):
        raise GnormError(
            f"RANK is {rank!r} and WORLD_SIZE is {size!r}, which is not one of several processes. "
            "Unset them to run a single process."
        )
    return int(size) > 1


def speaks_for_all() -> bool:
    """Whether this process is the only one or the first; known before they have joined and after they have parted."""
    return not launched() or os.environ["RANK"] == "0"


class Coordinator:
    """Runs in threads of the first process: knows who has arrived, failed, left or died, and tells all processes."""

    def __init__(self, world_size: int) -> None:
        self.token = secrets.token_hex(16)  # so that no other program on the network can join
        self._world_size = world_size
        self._lock = threading.Lock()
        self._channels: dict[int, _Channel] = {}
        self._arrived: dict[int, set[int]] = defaultdict(set)
        self._left: set[int] = set()
        self._failure: str | None = None
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=world_size, dualstack_ipv6=dual)
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Handle the messages of one process until it ends."""
        channel = _Channel(connection)
        token, _, rank = channel.read_line(limit=100).partition(" ")
        if token != self.token:
            connection.close()
            return
        with self._lock:
            self._channels[int(rank)] = channel
            if self._failure is not None:
                channel.send({"failed": self._failure})
        while (message := channel.read()) is not None:
            self._handle(int(rank), message)
        with self._lock:
            if int(rank) not in self._left:
                self._fail(f"Process {rank} is gone. {RESUME}")

    def _handle(self, rank: int, message: dict[str, Any]) -> None:
        with self._lock:
            if "failed" in message:
                self._fail(message["failed"] if rank == 0 else f"Process {rank} failed: {message['failed']}")
            elif "left" in message:
                self._left.add(rank)
                if rank == 0:
                    self._send_all(message)
            else:
                self._arrived[message["arrived"]].add(rank)
            for turn, ranks in list(self._arrived.items()):
                if len(ranks) == self._world_size:
                    del self._arrived[turn]
                    self._send_all({"complete": turn})
                elif missing := self._left - ranks:
                    self._fail(f"Process {min(missing)} ended before the others. {RESUME}")

    def _fail(self, reason: str) -> None:
        """Tell all processes of the first failure; any other one may follow from it."""
        if self._failure is None and 0 not in self._left:
            self._failure = reason
            self._send_all({"failed": reason})

    def _send_all(self, message: dict[str, Any]) -> None:
        for rank in sorted(self._channels, reverse=True):  # the first process may end once it has received this itself
            self._channels[rank].send(message)


class Peers:
    """The connection of one process to the coordinator, and what it said."""

    def __init__(self, rank: int, address: tuple[str, int], token: str) -> None:
        self.failure: str | None = None
        self._rank = rank
        self._turn = self._complete = 0
        self._changed = threading.Condition()
        self._interrupts = self._waiting = False
        self._first_knows = self._first_left = self._closed = False
        try:
            self._channel = _Channel(socket.create_connection(address))
        except OSError as error:
            raise GnormError(f"Can't connect to process 0 at {address[0]}:{address[1]}: {error}.") from error
        self._channel.send_line(f"{token} {rank}")
        threading.Thread(target=self._listen, daemon=True).start()

    def wait(self) -> None:
        """Return when all processes have called this equally often; raise if one of them has failed or ended."""
        self._turn += 1
        self._channel.send({"arrived": self._turn})
        with self._changed:
            self._waiting = True
            try:
                self._changed.wait_for(lambda: self.failure is not None or self._complete >= self._turn)
            finally:
                self._waiting = False
        if self.failure is not None:
            raise ProcessGone(self.failure)

    def interrupt_on_failure(self) -> None:
        """From now on, the failure of another process interrupts the main thread, as Ctrl-C does."""
        self._interrupts = True

    def failure_within(self, seconds: float) -> str | None:
        """The failure of a process, if one becomes known in this time."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, seconds)
        return self.failure

    def leave(self) -> None:
        """Say that this process has done its part."""
        with self._changed:
            self._interrupts = False
            self._channel.send({"left": True})
            if self._rank == 0:
                self._changed.wait_for(lambda: self._first_left, LINGER)

    def report(self, reason: str) -> bool:
        """Say why this process fails, and wait until the first one needs no other; whether that one shows the error."""
        with self._changed:
            self._interrupts = False
            self._channel.send({"failed": reason})
            self._changed.wait_for(lambda: self._first_knows or self._closed, LINGER)
            if self._rank == 0 or not self._first_knows:
                return False
            return self._changed.wait_for(lambda: self._closed or self._first_left, LINGER)

    def _listen(self) -> None:
        """Follow what the coordinator says until the first process ends."""
        while (message := self._channel.read()) is not None:
            with self._changed:
                self._complete = message.get("complete", self._complete)
                self._first_left |= "left" in message
                self._first_knows |= "failed" in message
                self.failure = self.failure or message.get("failed")
                self._changed.notify_all()
            if "failed" in message:
                self._interrupt_main()
        with self._changed:
            self._closed = True
            self.failure = self.failure or f"Process 0 is gone. {RESUME}"
            self._changed.notify_all()
        if not self._first_left:
            self._interrupt_main()

    def _interrupt_main(self) -> None:
        time.sleep(GRACE)
        with self._changed:
            if self._interrupts and not self._waiting:
                self._interrupts = False
                signal.pthread_kill(_main_thread(), signal.SIGINT)  # wakes it from a system call, too


def _main_thread() -> int:
    identity = threading.main_thread().ident
    assert identity is not None
    return identity


class _Channel:
    """Messages over one connection, a line of JSON each."""

    def __init__(self, connection: socket.socket) -> None:
        _keep_alive(connection)
        self._connection = connection
        self._lines = connection.makefile("rb")

    def send(self, message: dict[str, Any]) -> None:
        self.send_line(json.dumps(message))

    def send_line(self, line: str) -> None:
        # A broken connection is found by the thread that reads from it
        with suppress(OSError):
            self._connection.sendall(line.encode() + b"\n")

    def read(self) -> dict[str, Any] | None:
        """The next message, or None where the connection has ended."""
        line = self.read_line()
        message: dict[str, Any] | None = json.loads(line) if line else None
        return message

    def read_line(self, limit: int = -1) -> str:
        """The next line, empty where the connection has ended: closed, reset, or its host no longer answers."""
        try:
            line = self._lines.readline(limit)
        except OSError:
            return ""
        return line.decode(errors="replace").removesuffix("\n") if line.endswith(b"\n") else ""


def _keep_alive(connection: socket.socket) -> None:
    """Notice within two minutes that a host no longer answers; the kernel answers for a busy process."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 6}
    options = {**seconds, "TCP_USER_TIMEOUT": 120_000}  # milliseconds
    for name, value in options.items():
        if hasattr(socket, name):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
