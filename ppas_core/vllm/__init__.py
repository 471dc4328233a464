"""P-PAS inside a running vLLM: scheduler, activation, live settings, step log."""
