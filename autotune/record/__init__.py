"""Recording the traffic of a running server. `autotune.record.run` is the entry; what is written holds no text."""
