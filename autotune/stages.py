"""The names of a study's stages that more than one module asks for: whoever works says them, whoever looks plans by them."""

from __future__ import annotations

from typing import Final

NOISE: Final = "Measuring the noise (reference against itself)"
CALIBRATION: Final = "Calibrating"
SEARCH: Final = "Searching"
"""The stage whose steps are the study's trials."""
CONFIRMATION: Final = "Measuring the best settings again"
HELD_OUT: Final = "Replaying held-out traces"
COLD: Final = "Checking the export on a cold server"
