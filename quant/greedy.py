"""Greedy divergence: how long the text that a bundle writes stays the text that the float model would have written.

Knows: prompts, and that one pass of the float model over prompt and answer settles it: as long as both wrote the same, the
float model's likeliest next token at each place is the one it would have written itself.
Does not know: who runs either model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from appliance.bundle.record import GreedyRecord
from appliance.bundle.store import Bundle
from appliance.runtime.chat_template import load_chat_template
from appliance.runtime.tokenizer import Tokenizer
from quant.evaluate import Floats, agreement
from quant.windows import Ids, Window

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Explain in three sentences why the sky is blue.",
    "Write a short story about a baker who finds a letter.",
    "List five things to check before a long drive.",
)
PROMPT = 32
"""Tokens of a prompt that is the beginning of a text."""
SHORTEST = 8
"""An answer that could not be longer than this tells nothing."""


@dataclass(frozen=True)
class Answer:
    """A prompt and what the bundle wrote after it."""

    name: str
    prompt: tuple[int, ...]
    written: tuple[int, ...]

    def ids(self) -> Ids:
        """[1,n]: what the float model reads; after the last token nothing is asked."""
        return np.array([[*self.prompt, *self.written[:-1]]], np.int64)


def prompts(bundle: Bundle, tokenizer: Tokenizer, windows: Sequence[Window], count: int) -> list[tuple[str, tuple[int, ...]]]:
    """Up to `count` named prompts: questions in the model's chat template where it has one, else and beside them beginnings of
    pieces of the texts."""
    found: list[tuple[str, tuple[int, ...]]] = []
    template = load_chat_template(bundle, tokenizer)
    if template is not None:
        for number, question in enumerate(QUESTIONS[: (count + 1) // 2], 1):
            said = template.render([{"role": "user", "content": question}])
            found.append((f"question {number}", tuple(tokenizer.encode(said, bos=False))))
    rest = count - len(found)
    for at in range(rest):
        window = windows[at * len(windows) // rest]
        start = (at * PROMPT) % max(len(window.ids) - PROMPT, 1)
        front = window.ids[:1].tolist() if start and window.bos else []
        ids = (*front, *window.ids[start : start + PROMPT].tolist())
        found.append((f"{window.text} {window.number + 1}", ids))
    return found


def read_along(answer: Answer, hidden: np.ndarray, logits: Callable[[Floats], Floats], tokenizer: Tokenizer) -> GreedyRecord:
    """Where the float model would have gone another way.

    Args:
        hidden: [1,n,K]: what its head takes, of `answer.ids()`.
        logits: its head.
    """
    rows = np.asarray(hidden[0, len(answer.prompt) - 1 :], np.float32)
    likeliest = [int(row) for row in logits(rows)[:, : tokenizer.vocab_size].argmax(1)]
    agreed = agreement(likeliest, answer.written)
    parted = agreed < len(answer.written)
    return GreedyRecord(
        name=answer.name,
        prompt=tokenizer.decode(answer.prompt, skip_special=False),
        tokens=len(answer.written),
        agreed=agreed,
        common=tokenizer.decode(answer.written[:agreed], skip_special=False),
        next=tokenizer.decode(answer.written[agreed : agreed + 1], skip_special=False) if parted else "",
        reference_next=tokenizer.decode(likeliest[agreed : agreed + 1], skip_special=False) if parted else "",
    )
