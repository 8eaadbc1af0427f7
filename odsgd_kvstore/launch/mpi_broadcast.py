"""Gives rank 0's standard input to all ranks of an MPI job, on their standard output.

A program of its own, `mpi.py` starts it: ``python mpi_broadcast.py OPEN_MPI SIZE
LIBRARY...``. So a library that does not fit can neither crash a rank nor hold it for
ever, and neither threads nor handlers of MPI's stay in the rank.

It calls MPI through ctypes. mpi4py would have to be built against the MPI of each
cluster, and what is needed are five functions.
"""

import ctypes
import sys

MARK = "odsgd-broadcast "
MOST_BYTES = 8192
# Of the ABI that MPICH, Intel MPI and MVAPICH share.
MPICH_COMM_WORLD, MPICH_BYTE = 0x44000000, 0x4C00010D


def main(is_open_mpi: bool, size: int, paths: list) -> int:
    """Broadcast with the first library that fits; the exit status."""
    lib, path = load(is_open_mpi, paths)
    if lib is None:
        return 3
    if is_open_mpi:
        world = address(lib, "ompi_mpi_comm_world")
        byte = address(lib, "ompi_mpi_byte")
    else:
        world, byte = ctypes.c_int(MPICH_COMM_WORLD), ctypes.c_int(MPICH_BYTE)
    call(lib, "MPI_Init", None, None)
    rank, found = ctypes.c_int(), ctypes.c_int()
    call(lib, "MPI_Comm_rank", world, ctypes.byref(rank))
    call(lib, "MPI_Comm_size", world, ctypes.byref(found))
    if found.value != size:
        say(
            f"{path} sees {found.value} ranks in place of {size}: it is not of this MPI"
        )
        return 4
    text = sys.stdin.buffer.read() if rank.value == 0 else b""
    buffer = ctypes.create_string_buffer(text, MOST_BYTES)
    call(lib, "MPI_Bcast", buffer, MOST_BYTES, byte, 0, world)
    call(lib, "MPI_Finalize")
    print("\n" + MARK + buffer.value.decode(), flush=True)
    return 0


def load(is_open_mpi: bool, paths: list) -> tuple:
    """The first library that is there and of the right kind, and its path."""
    reasons = []
    for path in paths:
        try:
            lib = ctypes.CDLL(path)
        except OSError as error:
            reasons.append(str(error))
            continue
        is_mpi = hasattr(lib, "MPI_Init")
        if is_mpi and hasattr(lib, "ompi_mpi_comm_world") == is_open_mpi:
            # Open MPI's plugins look for its symbols among the global ones; those
            # of a library of another kind must not get there.
            return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL), path
        reasons.append(f"{path} is {'of another MPI' if is_mpi else 'no MPI library'}")
    say("odsgd-launch: no library of MPI can be used: " + "; ".join(reasons))
    return None, ""


def address(lib: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    """The address of a variable of the library."""
    return ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(lib, name)))


def call(lib: ctypes.CDLL, name: str, *arguments: object) -> None:
    """Call a function of MPI's, which returns 0 if all is well."""
    code = getattr(lib, name)(*arguments)
    if code != 0:
        sys.exit(f"{name} failed with {code}")


def say(text: str) -> None:
    """A line for the message of a failure."""
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] == "1", int(sys.argv[2]), sys.argv[3:]))
