"""The process on each host of a cluster: starts roles there and ends them in time.

It obeys one controller, over one connection of JSON messages. When the connection
closes or falls silent, it ends all that it started. Standard library only.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from odsgd_kvstore._version import __version__
from odsgd_kvstore.launch import EXIT_LOST, probe
from odsgd_kvstore.launch.children import Child, Guard, end_all

ALIVE_S = 2.0
LEAST_SILENCE_S = 8.0
DRAIN_S = 0.5


class Agent:
    """One host's part of a job.

    Parameters
    ----------
    reader, writer : multiprocessing.connection.Connection
        From and to the controller; may be the same.
    silence_s : float
        Seconds without a message after which the controller counts as lost.
    linger_s : float
        Seconds to wait at the end for the controller's own end.
    """

    def __init__(
        self,
        reader: Connection,
        writer: Connection,
        silence_s: float = 30.0,
        linger_s: float = 0.0,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._silence_s, self._linger_s = max(silence_s, LEAST_SILENCE_S), linger_s
        self._lock = threading.Lock()
        self._children: dict[str, Child] = {}
        self._readers: list[threading.Thread] = []
        self._stop_read, self._stop_write = os.pipe()
        self._ended = threading.Event()

    def serve(self) -> int:
        """Obey until the controller ends the job or is lost.

        Returns
        -------
        int
            The job's exit code; 255 if the controller is lost. Nothing that was
            started here runs any more.
        """
        self._guard = Guard(())
        self._send(op="hello", version=__version__, pid=os.getpid())
        threading.Thread(target=self._say_alive, daemon=True).start()
        code = None
        try:
            while code is None and self._reader.poll(self._silence_s):
                code = self._obey(json.loads(self._reader.recv_bytes()))
        except (OSError, EOFError, ValueError):
            pass  # The controller is gone, or what speaks is not one.
        finally:
            self._end()
        return EXIT_LOST if code is None else code

    def _obey(self, message: dict[str, Any]) -> int | None:
        """Do what a message says; return the job's exit code if it was the last one."""
        op = message["op"]
        if op == "start":
            # Not in a thread of its own: a child ends with the thread that made it.
            self._answer(message, self._start)
        elif op == "signal":
            child = self._children.get(message["role"])
            if child is not None:
                (child.send if message["group"] else child.poke)(message["number"])
        elif op in probe.OPERATIONS:
            arguments = (message, probe.OPERATIONS[op])
            threading.Thread(target=self._answer, args=arguments, daemon=True).start()
        return message["code"] if op == "end" else None

    def _answer(self, message: dict[str, Any], function: Callable) -> None:
        """Send what `function` makes of a request, or its error."""
        try:
            answer = {"value": function(message["request"])}
        except Exception as error:
            text = str(error) or repr(error)
            if not isinstance(error, (OSError, RuntimeError)):
                text = traceback.format_exc()
            answer = {"error": text, "is_missing": isinstance(error, FileNotFoundError)}
        self._send(op="answer", id=message["id"], **answer)

    def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        """Start a role."""
        name, env = request["role"], dict(os.environ)
        for variable in request["unset"]:
            env.pop(variable, None)
        env.update(request["env"])
        if "PATH" not in request["env"]:
            env["PATH"] = probe.with_interpreter(env.get("PATH", os.defpath))
        child = Child(request["argv"], env, cwd=request["cwd"])
        self._children[name] = child
        self._guard.add(child.pid)
        reader = threading.Thread(target=self._read, args=(name, child), daemon=True)
        self._readers.append(reader)
        reader.start()
        threading.Thread(target=self._wait, args=(name, child), daemon=True).start()
        return {"pid": child.pid}

    def _read(self, name: str, child: Child) -> None:
        """Pass on the output of a role."""

        def pass_on(data: bytes) -> None:
            if data:
                text = base64.b64encode(data).decode()
                self._send(op="output", role=name, data=text)

        child.read(self._stop_read, pass_on)
        self._send(op="closed", role=name)

    def _wait(self, name: str, child: Child) -> None:
        """Tell of the end of a role, and of the end of its process group."""
        child.exit_code = child.wait()
        self._send(op="exit", role=name, code=child.exit_code)
        while child.lives() and not self._ended.wait(0.1):
            pass
        self._send(op="gone", role=name)

    def _end(self) -> None:
        """End all children, pass on the rest of their output, close."""
        self._ended.set()
        end_all(list(self._children.values()), _pause)
        _pause(DRAIN_S, self._any_reads)
        os.close(self._stop_write)  # A child outside our groups may hold a pipe.
        _pause(DRAIN_S, self._any_reads)
        self._guard.close()
        self._send(op="ended")
        self._wait_for_controller()
        for connection in {self._reader, self._writer}:
            connection.close()

    def _wait_for_controller(self) -> None:
        """Wait for its end, so that this process does not end before it."""
        deadline = time.monotonic() + self._linger_s
        with contextlib.suppress(OSError, EOFError):
            while self._reader.poll(max(0.0, deadline - time.monotonic())):
                self._reader.recv_bytes()

    def _any_reads(self) -> bool:
        return any(reader.is_alive() for reader in self._readers)

    def _say_alive(self) -> None:
        """Send something now and then, so that silence means a loss."""
        while not self._ended.wait(ALIVE_S):
            self._send(op="alive")

    def _send(self, **message: Any) -> None:
        """Send a message; a lost controller is noticed where messages are read."""
        data = json.dumps(message).encode()
        with self._lock:
            try:
                self._writer.send_bytes(data)
            except (OSError, ValueError):
                pass


def _pause(seconds: float, needed: Callable[[], bool]) -> None:
    """Wait while `needed`, and no longer than `seconds`."""
    deadline = time.monotonic() + seconds
    while needed() and time.monotonic() < deadline:
        time.sleep(0.02)


def main(silence_s: float) -> None:
    """Serve the controller at the other end of standard input and output."""
    reader, writer = Connection(os.dup(0)), Connection(os.dup(1))
    # Whatever a library prints here must not fall between the messages.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    code = Agent(reader, writer, silence_s).serve()
    os._exit(code)  # A thread may be stuck in a closed pipe.
