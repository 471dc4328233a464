"""Readers of run-level results: the published sweep logs, our own run folders, tables of runs. One model for all."""
