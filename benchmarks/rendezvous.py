"""Horovod's rendezvous server, in the scheduler's place: PORT, then a name per rank."""

from __future__ import annotations

import sys

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer


def serve(port: int, hosts: list[str]) -> None:
    """Introduce the workers to each other until this process is ended."""
    server = RendezvousHTTPServer(("0.0.0.0", port), RendezvousHandler, 0)
    slots = parse_hosts(",".join(f"{host}:1" for host in hosts))
    server.init(get_host_assignments(slots, len(hosts)))
    server.serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
