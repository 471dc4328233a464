"""The report of a finished study: plain data per figure, the figures, and one offline HTML file."""

from __future__ import annotations
