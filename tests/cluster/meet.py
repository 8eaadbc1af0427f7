"""A rank that meets the others and exchanges a frame with each, and nothing else.

``python meet.py LAUNCHER TIMEOUT [PORT-PORT]`` under mpirun or srun. With MEET_EXIT
rank 0 ends with that code; with MEET_ABSENT that rank does not come.
"""

import json
import os
import sys

sys.argv[0] = "odsgd-launch"  # As the launcher, whose part this is, without MXNet.
from odsgd_kvstore.errors import ODSGDError
from odsgd_kvstore.launch import mpi, ranks, slurm

WAYS = {"mpi": mpi.ByBroadcast, "slurm": slurm.ByNodeList}


def main(launcher, timeout, ports):
    """Meet, exchange, and print what was heard."""
    rank = ranks.of_environment(launcher, os.environ)
    if str(rank.rank) == os.environ.get("MEET_ABSENT"):
        return 0
    way = WAYS[launcher](rank, os.environ, ports)
    if rank.rank == 0:
        guests = ranks.meet_as_controller(rank, way, timeout=timeout)
        for guest in guests:
            guest.connection.send_bytes(b"say")
        heard = [json.loads(guest.connection.recv_bytes()) for guest in guests]
        nodes = {guest.node for guest in guests}
        met = {"size": rank.size, "heard": heard, "nodes": len(nodes)}
        print("met", json.dumps(met), flush=True)
        return int(os.environ.get("MEET_EXIT", "0"))
    connection = ranks.meet_as_agent(rank, way, timeout=timeout)
    assert connection.recv_bytes() == b"say"
    connection.send_bytes(json.dumps(rank.rank).encode())
    return 0


if __name__ == "__main__":
    first, _, last = (sys.argv[3:] or ["20000-32767"])[0].partition("-")
    try:
        sys.exit(main(sys.argv[1], float(sys.argv[2]), (int(first), int(last))))
    except ODSGDError as error:
        sys.exit(f"rank failed: {error}")
