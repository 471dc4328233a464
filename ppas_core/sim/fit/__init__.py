"""What step-time coefficients a step log holds: `fit_steps`, and `steps_table`, the log of a simulated server."""

from ppas_core.sim.fit.identify import Coefficient
from ppas_core.sim.fit.log import StepFeatures, lone_requests, steps_table
from ppas_core.sim.fit.regression import StepFit, fit_steps

__all__ = ["Coefficient", "StepFeatures", "StepFit", "fit_steps", "lone_requests", "steps_table"]
