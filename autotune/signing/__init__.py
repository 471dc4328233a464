"""Signed provenance of an export: keys from files, and the statement that is signed and checked."""
