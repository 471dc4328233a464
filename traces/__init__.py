"""Request traces: what arrives when, and how long it is. Format, generators and validation."""

from traces.format import Trace, TraceRequest, read_trace, write_trace

__all__ = ["Trace", "TraceRequest", "read_trace", "write_trace"]
