"""What the roles write, cut into lines."""

from __future__ import annotations

from odsgd_kvstore.launch.commands import Role

MAX_LINE_BYTES = 64 << 20
REDRAW_S = 1.0


def print_line(role: Role, text: str) -> None:
    """Write ``[worker 1] text`` to the standard output."""
    print(f"[{role.name}] {text}", flush=True)


class LineSplitter:
    """Cuts bytes into whole lines; of a line drawn over itself, keeps what is seen."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._redrawn_at = -float("inf")

    def feed(self, data: bytes, now: float) -> list[str]:
        """Return the lines that `data` completes; `now` in seconds limits redraws."""
        self._rest += data
        if len(self._rest) > MAX_LINE_BYTES:  # Better in pieces than without memory.
            self._rest += b"\n"
        if self._rest.endswith(b"\n") or b"\n" in data:
            *lines, self._rest = self._rest.split(b"\n")
            return [self._visible(line) for line in lines]
        # A progress bar may not end its line for hours: show it now and then. What
        # follows the last '\r' is not complete, and a '\r' at the end may be '\r\n'.
        cut = self._rest.rfind(b"\r", 0, -1) if b"\r" in data else -1
        text = self._visible(self._rest[:cut]) if cut >= 0 else ""
        del self._rest[: cut + 1]
        if not text or now - self._redrawn_at < REDRAW_S:
            return []
        self._redrawn_at = now
        return [text]

    def close(self) -> list[str]:
        """Return the last line if no newline ended it."""
        return list(filter(None, [self._visible(self._rest)]))

    @staticmethod
    def _visible(line: bytearray) -> str:
        """The text after the last '\\r' that anything follows."""
        return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
