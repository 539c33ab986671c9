"""Citations made and checked by code.

    summary --split--> sentence --bind--> best supporting quote of a passage --check--> verified | why not

Knows: sentences, numbers, how much of a sentence a quote must carry. Does not know: models, or how documents are read.
A small model cannot be trusted to cite. So it only writes sentences; this file ties each to the passage that supports it best,
with a quote copied from there, and drops what nothing supports. The check reads the source from disk anew and trusts
neither the index nor the report.
"""

import functools
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence

from appliance.errors import ApplianceError
from appliance.jobs.draft import Claim, Passage

LEAST_SUPPORT = 0.85
"""Share of a sentence's content words that its quote must hold: all of up to six, all but one of up to thirteen. At a half, a
135M model's "the day shift starts" passed for a source's "the night shift starts". Words are compared by their first letters, so
that "requires" meets "required"."""
STEM = 5  # letters
LEAST_WORDS = 5  # content words of a sentence that does not end like one; fewer are a heading
LEAST_LEADING = 3  # content words of a sentence that stands for its document
MOST_LEADING = 3  # such sentences
MOST_QUOTED = (
    2  # sentences in a row; of three, "the beam is set to 3.1 mm" found the beam in one and the tyres' 3.1 mm in another
)
LONGEST_QUOTE = 600  # characters
SHORT_LINE = 60  # characters

_BOUNDARY = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?![a-z])"  # not after "e.g." and the like
    r"|(?<=[。！？])"
    r"|\n\s*\n"
    r"|\n(?=\s*(?:[-*+•#|>]|\d{1,2}[.)]\s))"  # a list's next item
)
_END = re.compile(r"[.!?。！？][\"')\]”’]*$")
_DENIALS = frozenset(["not", "no", "never", "none", "nobody", "nothing", "without", "neither", "nor", "cannot"])
_WORD = re.compile(r"\w+")
_NO_SPACES = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff]")
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_LIST_MARK = re.compile(r"^\s*(?:[-*+•]|\d{1,2}[.)])\s+|^\s*#+\s+|\*\*|`|^\s*>\s+")
_FUNCTION_WORDS = (
    "a an and are as at be been by can could did do does for from had has have he her his how i if in instead into is it its may "
    "more most must no not of on or our she should so some such than that the their them then there these they this those to was "
    "we were what when where which who will with would you your document text passage summary section according also"
)
_NO_CONTENT = frozenset(_FUNCTION_WORDS.split())


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, without list marks and emphasis; headings and table rules are left out."""
    found = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith(("#", "|", "---", "```")):
            continue
        line = _LIST_MARK.sub("", line).strip()
        pieces = [line[start:end].strip() for start, end in _spans(line)]
        found += [piece for piece in pieces if _END.search(piece) or len(_content(piece)) >= LEAST_WORDS]
    return found


def normalize(text: str) -> str:
    """What does not count when texts are compared: runs of white space, and how characters are composed."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def numbers(text: str) -> Counter[str]:
    """Numbers as they are written, without thousands commas, and how often."""
    return Counter(re.sub(r",(?=\d{3}\b)", "", found) for found in _NUMBER.findall(text))


def support(sentence: str, quote: str) -> float:
    """Share of the sentence's content words that the quote holds, 0 to 1.

    0 when a number of the sentence stands less often in the quote, or when only one of the two denies something.
    """
    if numbers(sentence) - numbers(quote) or _denies(sentence) != _denies(quote):
        return 0.0
    words = _content(sentence)
    return len(words & _content(quote)) / len(words) if words else 0.0


def bind(sentence: str, passages: Sequence[Passage]) -> Claim | None:
    """The sentence with the quote that supports it best; None when no passage does."""
    best, claim = 0.0, None
    for passage in passages:
        for quote in _quotes(_without_heading(passage)):
            score = support(sentence, quote) - len(quote) / 1e6  # of equal quotes the shortest
            if score + 1e-3 >= LEAST_SUPPORT and score > best:
                best, claim = score, Claim(sentence=sentence, path=passage.path, anchor=passage.anchor, quote=quote)
    return claim


def bind_all(text: str, passages: Sequence[Passage]) -> tuple[tuple[Claim, ...], int]:
    """Every sentence of `text` that a passage supports, each once, and how many none does."""
    claims: dict[str, Claim] = {}
    dropped = 0
    for sentence in split_sentences(text):
        rest = sentence[:1].islower() and len(_content(sentence)) < LEAST_WORDS  # of a line that the model broke
        claim = None if rest else bind(sentence, passages)
        if claim is None:
            dropped += 1
        else:
            claims.setdefault(normalize(sentence).lower().rstrip(" .!?\"'"), claim)
    return tuple(claims.values()), dropped


def leading(passages: Sequence[Passage]) -> tuple[Claim, ...]:
    """Whole sentences of the source, for where nothing the model said can be tied to it: the first of every passage, then the
    second ones, until there are enough."""
    found: dict[str, tuple[int, Claim]] = {}
    said = [_whole_sentences(_without_heading(passage)) for passage in passages]
    for row in itertools.zip_longest(*said):
        for at, (passage, sentence) in enumerate(zip(passages, row, strict=True)):
            if sentence is not None and len(found) < MOST_LEADING:
                claim = Claim(sentence=normalize(sentence), path=passage.path, anchor=passage.anchor, quote=sentence)
                found.setdefault(claim.sentence, (at, claim))
    return tuple(claim for _, claim in sorted(found.values(), key=lambda one: one[0]))


def _whole_sentences(text: str) -> list[str]:
    """Those that are whole, say something, and may stand as a quote."""
    sentences = [text[start:end].strip() for start, end in _spans(text)]
    return [one for one in sentences if _END.search(one) and len(_content(one)) >= LEAST_LEADING and len(one) <= LONGEST_QUOTE]


def check(claim: Claim, locate: Callable[[str, str], str]) -> str | None:
    """Why a claim does not hold against its source as it is on disk now; None when it does.

    Args:
        claim: what is claimed.
        locate: path, anchor -> the source's text there; raises an `ApplianceError` when there is none.
    """
    try:
        source = locate(claim.path, claim.anchor)
    except ApplianceError as failure:
        return failure.what
    except OSError as failure:
        return f"the source cannot be read: {failure.strerror}"
    if not claim.quote.strip() or normalize(claim.quote) not in normalize(source):
        return "the quote is not in the source"
    missing = sorted((numbers(claim.sentence) - numbers(claim.quote)).keys())
    if missing:
        return f"{', '.join(missing)} is not in the quote"
    if support(claim.sentence, claim.quote) < LEAST_SUPPORT:
        return "the quote does not support the sentence"
    return None


def _quotes(text: str) -> list[str]:
    """Pieces of a text that may stand as a quote: up to two sentences in a row, copied as they are."""
    spans = _spans(text)
    quotes = []
    for first in range(len(spans)):
        for last in range(first, min(first + MOST_QUOTED, len(spans))):
            if _denies(text[slice(*spans[last])]) != _denies(text[slice(*spans[first])]):
                break  # what one of the two denies, the other says: together they would support either
            quote = text[spans[first][0] : spans[last][1]].strip()
            if len(quote) <= LONGEST_QUOTE:
                quotes.append(quote)
    return quotes


def _without_heading(passage: Passage) -> str:
    """The passage without the heading that it stands under, if it begins with that: a quote should be a sentence."""
    heading = re.sub(r" \[\d+\]$", "", passage.anchor.rpartition(" > ")[2])
    first, _, rest = passage.text.lstrip("# ").partition("\n")
    return rest.lstrip() if heading and normalize(first) == normalize(heading) else passage.text


def _denies(text: str) -> bool:
    return not _DENIALS.isdisjoint(word.lower() for word in _WORD.findall(text.replace("n't", " not")))


def _spans(text: str) -> list[tuple[int, int]]:
    """Start and end of each sentence that says something."""
    breaks = sorted([*(found.span() for found in _BOUNDARY.finditer(text)), *_headings(text)])
    edges = [0, *(at for span in breaks for at in span), len(text)]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if _content(text[start:end])]


def _headings(text: str) -> list[tuple[int, int]]:
    """Ends of lines that are shorter than a line of running text, with a line after them that begins anew."""
    found = []
    start = 0
    for line in text.splitlines(keepends=True):
        end = start + len(line)
        says_more = end < len(text) and (text[end].isupper() or text[end].isdigit())
        if line.endswith("\n") and len(line) < SHORT_LINE and says_more and not _END.search(line.rstrip()):
            found.append((end - 1, end))
        start = end
    return found


@functools.lru_cache(maxsize=8192)  # every sentence is compared with every quote
def _content(text: str) -> frozenset[str]:
    """The words that say something; of scripts without spaces, every two characters in a row."""
    found = set()
    for word in _WORD.findall(_NUMBER.sub(" ", unicodedata.normalize("NFC", text).lower())):
        if _NO_SPACES.match(word):
            found |= {word[at : at + 2] for at in range(max(len(word) - 1, 1))}
        elif word not in _NO_CONTENT and len(word) > 1:
            found.add(word[:STEM])
    return frozenset(found)
