"""An embed function of known meaning: one direction for each concept, words of two languages on the same one.

Knows: a few words. Does not know: models.
"""

from collections.abc import Sequence

from appliance.errors import ContextLengthError, DeviceError

CONCEPTS = (("cat", "katze", "feline"), ("rain", "regen", "wet"), ("invoice", "rechnung", "bill"), ("router", "modem", "network"))


class FakeEmbedder:
    """Vectors of `width` numbers, one for each concept, the last for what has none.

    Attributes:
        asked: every text, in order.
        longest: characters of a text that it takes.
        broken: raise `DeviceError`.
    """

    def __init__(self, width: int = 5, longest: int = 10000):
        self.width = width
        self.longest = longest
        self.broken = False
        self.asked: list[str] = []

    def __call__(self, texts: Sequence[str]) -> list[list[float]]:
        if self.broken:
            raise DeviceError("the fake is broken", "mend it")
        for text in texts:
            if len(text) > self.longest:
                raise ContextLengthError(f"{len(text)} characters", "split it")
        self.asked += texts
        return [self._vector(text) for text in texts]

    def _vector(self, text: str) -> list[float]:
        words = text.lower()
        found = [float(sum(words.count(word) for word in concept)) for concept in CONCEPTS]
        found = [*found, 0.1 if any(found) else 1.0] + [0.0] * (self.width - 5)
        length = sum(one * one for one in found) ** 0.5
        return [one / length for one in found]
