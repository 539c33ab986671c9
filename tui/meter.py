"""How fast an answer comes, measured from its stream.

Knows: when pieces came. Does not know: what is in them.
"""

from collections.abc import Callable


class Meter:
    """Times the pieces of one answer.

    Args:
        clock: seconds from any fixed point, as `time.monotonic` gives them; read once a piece.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._first = 0.0
        self.last = 0.0  # when the newest piece came
        self.pieces = 0

    def tick(self) -> None:
        """A piece came."""
        self.last = self._clock()
        if not self.pieces:
            self._first = self.last
        self.pieces += 1

    def rate(self, tokens: int | None = None) -> float | None:
        """Tokens a second after the first one; None before the second.

        Args:
            tokens: as the daemon counted them, once it has; until then every piece counts for one.
        """
        counted = self.pieces if tokens is None else tokens
        seconds = self.last - self._first
        return (counted - 1) / seconds if counted > 1 and seconds > 0 else None
