"""From text to what the full-text index holds, and from a question to what it is asked.

Knows: scripts that write words without spaces. Does not know: SQLite's tokenizer beyond its name, ranking.

Chinese, Japanese, Korean, Thai, Lao, Khmer and Burmese go in as overlapping pairs of characters: with no dictionary, any word
of two characters or more is found, and never half a word of another script.

    "GPU 显存不足"  ->  "GPU 显存 存不 不足 足"
"""

import re
import unicodedata

TOKENIZER = "unicode61 remove_diacritics 2 categories 'L* N* Co M*'"
"""M*: the vowel signs of Indic scripts are parts of words, not gaps between them."""

_UNSPACED = (
    "\u0e00-\u0e7f\u0e80-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    "\u1100-\u11ff\u3005-\u3007\u3031-\u3035\u3040-\u30ff\u3130-\u318f\u31f0-\u31ff"  # Hangul letters, kana, iteration marks
    "\u3400-\u4dbf\u4e00-\u9fff\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff"  # Han, Hangul
)
_RUN = re.compile(f"[{_UNSPACED}]+")
MOST_TERMS = 64
"""Words of a question that are looked up; the rest of a very long one changes little and costs much."""


def segmented(text: str) -> str:
    """The text for the index: compatibility forms made plain, unspaced runs as pairs of characters."""
    return _RUN.sub(lambda run: f" {' '.join([*_pairs(run[0]), run[0][-1]])} ", unicodedata.normalize("NFKC", text))


def question(text: str) -> str:
    """An FTS5 expression that finds passages with any of the question's words; "" when it has none."""
    plain = unicodedata.normalize("NFKC", text)
    found: dict[str, None] = {}
    for run in _RUN.findall(plain):
        # A single character is the first of a pair, or the lone last one that `segmented` adds.
        found.update(dict.fromkeys(f'"{pair}"' for pair in _pairs(run)) if len(run) > 1 else {f'"{run}" *': None})
    for word in _words(_RUN.sub(" ", plain)):
        found[f'"{word}"'] = None
    return " OR ".join(list(found)[:MOST_TERMS])


def _pairs(run: str) -> list[str]:
    return [run[at : at + 2] for at in range(len(run) - 1)]


def _words(text: str) -> list[str]:
    """Words as the tokenizer sees them: letters, digits and the marks on them."""
    kept = "".join(one if unicodedata.category(one)[0] in "LNM" else " " for one in text)
    return kept.split()
