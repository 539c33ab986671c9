"""Stop strings: cut the answer at the first one, and hold back only what could still become one.

Knows: text. Does not know: tokens or engines.

The first stop string is the one that is complete first; of several complete at the same character, the one that began
first. So the outcome is the same however the text is split into pushes.
"""

from collections.abc import Sequence

from appliance.errors import RequestError


class StopStrings:
    """Looks for stop strings in a stream of text.

    Raises:
        RequestError: a stop string is empty.
    """

    def __init__(self, stops: Sequence[str]):
        if "" in stops:
            raise RequestError("a stop string is empty", "leave it out", param="stop")
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """Take more text.

        Returns:
            The text that may be sent, and whether a stop string was found; from then on nothing more comes out.
        """
        if self._stopped:
            return "", True
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._stopped = True
            self._held = ""
            return text[: min(found)[1]], True
        keep = min((self._open_from(text, stop) for stop in self._stops), default=len(text))
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """What is still held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _open_from(text: str, stop: str) -> int:
        """Where the longest end of `text` that begins `stop` starts; its length when there is none."""
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        return at if at >= 0 else len(text)
