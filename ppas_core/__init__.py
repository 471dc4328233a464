"""The P-PAS and P-PAS+ policy and what executes it. Importing it needs the standard library alone."""

from ppas_core.errors import PpasError
from ppas_core.policy import Branch, Decision, PolicyParams, QueueState, Scope, decide

__all__ = ["Branch", "Decision", "PolicyParams", "PpasError", "QueueState", "Scope", "decide"]

__version__ = "0.1.0"
