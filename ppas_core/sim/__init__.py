"""The simulator: vLLM's V1 step loop with a step-time model in place of the GPU."""
