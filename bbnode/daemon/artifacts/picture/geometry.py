"""What layout hands to drawing: boxes, lines and labels with their places.

Rule: plain data, in pixels from the picture's upper left corner.
"""

from __future__ import annotations

from dataclasses import dataclass

from bbnode.daemon.artifacts.picture.program import Box, Panel, Wire


@dataclass(slots=True)
class Rect:
    """A place in the picture, in pixels from its upper left corner."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class Chip:
    """One slot in a panel's header."""

    rect: Rect
    label: str
    role: str


@dataclass(frozen=True, slots=True)
class PlacedBox:
    """A box; `rect` is the op itself, its gates stand above and below it."""

    box: Box
    rect: Rect
    above: tuple[Rect, ...]
    below: tuple[Rect, ...]


@dataclass(frozen=True, slots=True)
class PlacedEdge:
    """A line down through `points`: straight where x stays, else a curve."""

    kind: str
    label: str
    source: str
    target: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class PlacedPanel:
    """A panel with its header chips."""

    panel: Panel
    rect: Rect
    header_height: float
    chips: tuple[Chip, ...]
    boxes: tuple[PlacedBox, ...]
    edges: tuple[PlacedEdge, ...]


@dataclass(frozen=True, slots=True)
class PlacedWire:
    """A polyline with right angles, and where its label stands."""

    wire: Wire
    points: tuple[tuple[float, float], ...]
    label: Rect
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Layout:
    """The whole picture."""

    width: float
    height: float
    panels: tuple[PlacedPanel, ...]
    wires: tuple[PlacedWire, ...]
