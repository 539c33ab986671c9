"""Pieces of HTML and SVG. All text goes through `escape`: names of tensors, prompts and answers come from strangers' models.

Knows: elements, tables, axes. Does not know: records.
"""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class Safe(str):
    """Markup that is finished; everything else is text, and is escaped."""

    __slots__ = ()


def escape(value: object) -> Safe:
    """Text as it may stand in an element or a quoted attribute."""
    return value if isinstance(value, Safe) else Safe(html.escape(_printable(str(value))))


def _printable(text: str) -> str:
    """Control characters and the marks that turn the direction of text would hide or garble what is around them."""
    return "".join(char if char.isprintable() or char in "\n " else f"\\x{ord(char):02x}" for char in text)


def element(name: str, attributes: Mapping[str, object], *inner: object) -> Safe:
    """<name attributes>inner</name>."""
    said = "".join(f' {key}="{escape(value)}"' for key, value in attributes.items())
    return Safe(f"<{name}{said}>{''.join(map(escape, inner))}</{name}>")


def joined(parts: Sequence[object]) -> Safe:
    """One piece after the other."""
    return Safe("".join(map(escape, parts)))


def table(head: Sequence[str], rows: Sequence[Sequence[object]], words: int = 1) -> Safe:
    """A table; the first `words` columns hold words, the others numbers.

    In a box of its own that scrolls sideways: a wide table must not widen the page.
    """

    def row(kind: str, cells: Sequence[object]) -> Safe:
        inner = (element(kind, {"class": "word" if at < words else "number"}, cell) for at, cell in enumerate(cells))
        return element("tr", {}, *inner)

    head_row = element("thead", {}, row("th", head))
    body = element("tbody", {}, *(row("td", cells) for cells in rows))
    return element("div", {"class": "wide"}, element("table", {}, head_row, body))


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at or below `low` to at or above `high`."""
    span = (high - low) or abs(high) or 1.0
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, max(last, first + 1) + 1)]


@dataclass(frozen=True)
class Frame:
    """A plot's place: data coordinates to pixels. `log` spaces the x axis by powers of two."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: int = 520
    height: int = 260
    left: int = 62
    right: int = 14
    top: int = 12
    bottom: int = 42
    log: bool = False

    def across(self, value: float) -> float:
        """Pixels from the left."""
        low, high = self.x
        if self.log:
            low, high, value = math.log2(low), math.log2(high), math.log2(value)
        return round(self.left + (value - low) / ((high - low) or 1) * (self.width - self.left - self.right), 1)

    def down(self, value: float) -> float:
        """Pixels from the top."""
        low, high = self.y
        return round(self.height - self.bottom - (value - low) / ((high - low) or 1) * (self.height - self.top - self.bottom), 1)


def svg(frame: Frame, about: str, *inner: object) -> Safe:
    """The picture, as wide as its place; `about` is what a screen reader says."""
    box = f"0 0 {frame.width} {frame.height}"
    return element("svg", {"viewBox": box, "role": "img"}, element("title", {}, about), *inner)


def text(x: float, y: float, kind: str, words: object, turn: str = "") -> Safe:
    """Words in a picture; `kind` names classes of the style sheet."""
    attributes = {"x": x, "y": y, "class": kind} | ({"transform": turn} if turn else {})
    return element("text", attributes, words)


def stroke(x: tuple[float, float], y: tuple[float, float], kind: str) -> Safe:
    """A straight line from (x[0], y[0]) to (x[1], y[1])."""
    return element("line", {"x1": x[0], "x2": x[1], "y1": y[0], "y2": y[1], "class": kind})


def box(x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> Safe:
    """A filled rectangle; `tip` is shown when it is pointed at."""
    sizes = {"x": round(x, 1), "y": round(y, 1), "width": round(max(width, 0.5), 1), "height": round(height, 1), "class": kind}
    return element("rect", sizes, *([element("title", {}, tip)] if tip else []))


def axes(frame: Frame, x_ticks: Mapping[float, str], y_ticks: Mapping[float, str], x_name: str, y_name: str) -> Safe:
    """Grid lines, numbers and names."""
    left, right = frame.left, frame.width - frame.right
    top, bottom = frame.top, frame.height - frame.bottom
    parts: list[Safe] = []
    for value, label in y_ticks.items():
        at = frame.down(value)
        parts += [stroke((left, right), (at, at), "grid"), text(left - 6, at + 4, "tick end", label)]
    parts += [text(frame.across(value), bottom + 16, "tick middle", label) for value, label in x_ticks.items()]
    parts.append(stroke((left, right), (bottom, bottom), "axis"))
    parts.append(text((left + right) / 2, frame.height - 6, "name middle", x_name))
    centre = (top + bottom) / 2
    parts.append(text(12, centre, "name middle", y_name, f"rotate(-90 12 {centre})"))
    return joined(parts)


def line(frame: Frame, points: Sequence[tuple[float, float]], series: int) -> Safe:
    """A series as a line with a dot at each point."""
    placed = [(frame.across(x), frame.down(y)) for x, y in points]
    path = element("polyline", {"points": " ".join(f"{x},{y}" for x, y in placed), "class": f"line s{series}"})
    dots = (element("circle", {"cx": x, "cy": y, "r": 2.6, "class": f"dot s{series}"}) for x, y in placed)
    return joined([path, *dots])


def legend(names: Sequence[str]) -> Safe:
    """Which colour is which series, as text beside the plot."""
    keys = (
        element("span", {"class": "entry"}, element("i", {"class": f"key s{number}"}), name)
        for number, name in enumerate(names, 1)
    )
    return element("div", {"class": "legend"}, *keys)


def figure(title: str, explained: str, *inner: object) -> Safe:
    """A plot with what it shows in words."""
    return element("figure", {}, element("h3", {}, title), *inner, element("figcaption", {}, explained))
