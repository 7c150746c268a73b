"""Report of the packets that a sweep recorded: its figures (3-8, 3-10, 3-11 and B-5 of the thesis) and sentences."""

from __future__ import annotations

from ringtap.analysis.plots.style import BLUE, FAINT, VERMILION
from ringtap.analysis.structure.flow_roles import CROSSING, ONLY, SHARED

_ROLES = {ONLY: BLUE, SHARED: VERMILION, CROSSING: FAINT}
_PANEL = (4.6, 2.5)
_SHOWN_ITERATIONS = 3
PUBLISHED_NEAR = 0.05  # published loads as shares of the capacity, at most so far from the point's
