"""Replaying a trace against a live server. `autotune.replay.run` is the entry; the client is a process of its own."""
