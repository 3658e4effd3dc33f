"""Pictures of how costs grow, as SVG that is readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 44, 48  # what is left free around the drawing
STYLE = (
    "text { font: 12px system-ui, sans-serif; fill: #333 } .title { font-weight: 600; font-size: 14px } "
    ".grid { stroke: #8884 } .publish { stroke: #0b62c4; fill: #0b62c4 } .push { stroke: #b3470f; fill: #b3470f } "
    "text.publish, text.push { stroke: none } polyline { stroke-width: 2 } "
    "@media (prefers-color-scheme: dark) { text { fill: #ddd } .publish { stroke: #6db1ff; fill: #6db1ff } "
    ".push { stroke: #ffa66b; fill: #ffa66b } }"
)


class GrowthPoint(NamedTuple):
    """What a message costs at one size, in microseconds of processor time."""

    size: int
    publish_us: float
    push_us: float


def picture(dimension: str, points: Sequence[GrowthPoint]) -> str:
    """Return an SVG of both costs by size; the sizes on a logarithmic axis, the costs from 0 on."""
    return "\n".join(_parts(dimension, sorted(points))) + "\n"


def _parts(dimension: str, points: Sequence[GrowthPoint]) -> Iterator[str]:
    most = _round_up(max(max(point.publish_us, point.push_us) for point in points))
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    yield f"<title>The cost of a message by {escape(dimension)}</title><style>{STYLE}</style>"
    yield f'<text class="title" x="{LEFT}" y="20">µs of processor time a message, by {escape(dimension)}</text>'
    for step in range(5):
        at = _y(most * step / 4, most)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{most * step / 4:g}</text>'
    for point in points:
        at = _x(point.size, points)
        yield f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{_short(point.size)}</text>'
    for number, name in enumerate(("publish", "push")):
        spots = [(_x(point.size, points), _y(getattr(point, f"{name}_us"), most)) for point in points]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        yield f'<polyline class="{name}" style="fill: none" points="{line}"/>'
        yield from (f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in spots)
        yield f'<text class="{name}" x="{LEFT + 90 * number}" y="{TOP - 6}">● {name}</text>'
    yield "</svg>"


def _x(size: int, points: Sequence[GrowthPoint]) -> float:
    low, high = math.log10(points[0].size), math.log10(points[-1].size)
    share = (math.log10(size) - low) / (high - low) if high > low else 0.5
    return LEFT + share * (WIDTH - LEFT - RIGHT - 20)


def _y(cost: float, most: float) -> float:
    return HEIGHT - BOTTOM - cost / most * (HEIGHT - BOTTOM - TOP)


def _round_up(value: float) -> float:
    """Return the next value of which a quarter is a short number."""
    unit: float = 10.0 ** math.floor(math.log10(max(value, 1e-6)))
    return next(step * unit for step in (1, 2, 4, 8, 10) if step * unit >= value)


def _short(size: int) -> str:
    for unit, name in ((10**6, "M"), (10**3, "k")):
        if size >= unit:
            return f"{size / unit:g}{name}"
    return str(size)
