"""A measured process of its own that does one thing at a time, when it is told to.

Contenders live in separate processes, so that each has its own peak memory, allocator and environment, and the parent
lets them run one after the other, never at the same time: a disturbance of the machine then hits neighbours alike. The
two talk in JSON lines over pipes; what a library prints in the child goes to its stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any


class ChildError(RuntimeError):
    """The measured process failed; its own output says why."""


class Child:
    """The parent's end."""

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        self.name = name
        try:
            self._process = subprocess.Popen(
                command, env=dict(environment), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise ChildError(f"{name}: cannot start {command[0]}: {error.strerror}") from None

    def ask(self, action: str, **arguments: Any) -> dict[str, Any]:
        """Have one action done and wait for its answer.

        Raises:
            ChildError: the process ended, or answered with an error.
        """
        self.send(action, **arguments)
        return self.receive()

    def send(self, action: str, **arguments: Any) -> None:
        """Have one action begun; ``receive`` must follow."""
        assert self._process.stdin is not None
        self._action = action
        with contextlib.suppress(BrokenPipeError):  # ``receive`` tells
            self._process.stdin.write(json.dumps({"action": action, **arguments}) + "\n")
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """The answer to ``send``; raises ChildError as ``ask`` does."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise ChildError(
                f"{self.name}: the process ended with code {code} during '{self._action}'; its messages are above"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{self.name}: {answer['error']}")
        return dict(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(actions: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """The child's end: answer requests until the parent closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # from here on print() of any library cannot disturb the answers
    for line in sys.stdin:
        request = json.loads(line)
        action = request.pop("action")
        try:
            answer = actions[action](**request)
        except Exception as error:  # whatever it is, the parent must hear of it instead of waiting
            answer = {"error": f"{type(error).__name__} during '{action}': {error}"}
        print(json.dumps(answer), file=answers, flush=True)
