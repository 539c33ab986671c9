"""The frontier as one SVG: a panel a model, bits a body weight to the right, mean KL upwards on a logarithmic scale.

Written by hand, as the report's plots are: a plotting library would be the only one that the benches bring along.

Knows: points as the JSON object has them. Does not know: what they mean.
"""

import math
from html import escape
from typing import Any

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 620, 460, 64, 36, 44
COLOURS = {"appliance": "#0b63ce", "llama.cpp": "#c2410c", "genai": "#15803d"}
BITS = (4.0, 9.5)


def plot(results: list[dict[str, Any]]) -> str:
    """The whole picture."""
    panels = [_panel(one, at * WIDTH) for at, one in enumerate(results)]
    size = f'width="{WIDTH * len(results)}" height="{HEIGHT}" viewBox="0 0 {WIDTH * len(results)} {HEIGHT}"'
    style = "text{font:11px sans-serif;fill:#222}.s{font-size:9px}.g{stroke:#ddd}.a{text-anchor:middle}.e{text-anchor:end}"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(panels)}</svg>\n'


def _panel(result: dict[str, Any], shift: int) -> str:
    points = [one for one in result["points"] if BITS[0] <= one["body_bits"] <= BITS[1] and one["kl"] > 0]
    decades = [math.log10(one["kl"]) for one in points] or [0.0]
    low, high = math.floor(min(decades)), math.ceil(max(decades) + 0.01)
    right = WIDTH - 16

    def x(bits: float) -> float:
        return shift + LEFT + (bits - BITS[0]) / (BITS[1] - BITS[0]) * (right - LEFT)

    def y(decade: float) -> float:
        return TOP + (high - decade) / (high - low) * (HEIGHT - TOP - BOTTOM)

    channels = "channels shuffled" if result["seed"] else "channels as they were"
    found = [f'<text x="{shift + LEFT}" y="20">{escape(str(result["model"]))}, {result["windows"]} windows, {channels}</text>']
    for decade in range(low, high + 1):
        found.append(f'<line class="g" x1="{x(BITS[0])}" x2="{x(BITS[1])}" y1="{y(decade):.1f}" y2="{y(decade):.1f}"/>')
        found.append(f'<text class="e" x="{x(BITS[0]) - 6}" y="{y(decade) + 4:.1f}">{10.0**decade:g}</text>')
    for bits in range(math.ceil(BITS[0]), math.floor(BITS[1]) + 1):
        found.append(f'<line class="g" x1="{x(bits):.1f}" x2="{x(bits):.1f}" y1="{y(high)}" y2="{y(low)}"/>')
        found.append(f'<text class="a" x="{x(bits):.1f}" y="{y(low) + 16}">{bits}</text>')
    found.append(f'<text class="a" x="{x(sum(BITS) / 2)}" y="{HEIGHT - 10}">bits a weight of the body, scales included</text>')
    found.append(f'<text x="{shift + 6}" y="{TOP - 4}">mean KL</text>')
    for side, colour in COLOURS.items():
        found += _series(side, colour, [one for one in points if one["name"].startswith(f"{side}/")], x, y)
    return "".join(found)


def _series(side: str, colour: str, points: list[dict[str, Any]], x: Any, y: Any) -> list[str]:
    """Points with their names; a line through those that nothing of the same side beats."""
    found, best, line = [], math.inf, []
    for one in sorted(points, key=lambda one: (one["body_bits"], one["kl"])):
        place = x(one["body_bits"]), y(math.log10(one["kl"]))
        found.append(f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="3.5" fill="{colour}"/>')
        name = escape(one["name"].split("/")[1])
        found.append(f'<text class="s" x="{place[0] + 5:.1f}" y="{place[1] - 4:.1f}" style="fill:{colour}">{name}</text>')
        if one["kl"] < best:
            best = one["kl"]
            line.append(f"{place[0]:.1f},{place[1]:.1f}")
    path = (
        f'<polyline points="{" ".join(line)}" fill="none" stroke="{colour}" stroke-opacity=".5"><title>{side}</title></polyline>'
    )
    return [path, *found]
