"""Simulator profiles from measurements: from the step log of a server at hand, or from runs that were measured already."""
