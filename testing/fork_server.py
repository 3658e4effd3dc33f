"""A process that has the broker loaded and forks one for each request: a fork takes a few milliseconds, an import 300.

`python -m qb.testing.fork_server FD` serves the socket with that number: one JSON object a request, and one a reply.
When the socket is closed, it kills the brokers that are left and exits.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
from typing import Any

from qb import server

MOST = 64 * 1024  # bytes of one request


def main(requests: socket.socket) -> None:
    """Answer requests until the other end is gone."""
    children: set[int] = set()
    gc.freeze()  # what is loaded is not garbage in any child
    while True:
        data, passed, *_ = socket.recv_fds(requests, MOST, 2)
        if not data:
            break
        requests.send(json.dumps(_carry_out(json.loads(data), passed, children)).encode())
    for child in children:
        os.kill(child, signal.SIGKILL)


def _carry_out(request: dict[str, Any], passed: list[int], children: set[int]) -> dict[str, int]:
    if request["what"] == "wait":
        pid, status = os.waitpid(request["pid"], 0)
        children.discard(pid)
        return {"code": os.waitstatus_to_exitcode(status)}
    child = os.fork()
    if not child:
        _become_broker(request, *passed)
    for each in passed:
        os.close(each)
    children.add(child)
    return {"pid": child}


def _become_broker(request: dict[str, Any], output: int, errors: int) -> None:
    """Run a broker in this new process, with these descriptors as its standard output and error. Never returns."""
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.closerange(3, 256)  # also the socket of requests
        os.environ.update(request["environment"])
        if request["journal"]:
            from qb.testing.power_journal import PowerJournal

            PowerJournal(request["data_dir"], request["journal"]).install()
        code = server.main([])
        sys.stdout.flush()
    finally:
        os._exit(code)


if __name__ == "__main__":
    for name in [name for name in os.environ if name.startswith("QB_")]:
        del os.environ[name]
    main(socket.socket(fileno=int(sys.argv[1])))
