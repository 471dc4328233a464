"""A recording of a server in a thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.record import run
from autotune.record.run import RecordPlan, Status


@contextmanager
def recorded(upstream: str, output: Path, block_size: int) -> Iterator[str]:
    """The address of a recording proxy before `upstream`; its trace is in `output` afterwards."""
    listening, ended, url = threading.Event(), threading.Event(), [""]

    def watch(status: Status) -> None:
        url[0] = status.url
        listening.set()

    plan = RecordPlan(upstream, output, port=0, block_size=block_size)
    thread = threading.Thread(target=run.record, args=(plan, watch), kwargs={"stop": ended.is_set})
    thread.start()
    try:
        assert listening.wait(30)
        yield url[0]
    finally:
        ended.set()
        thread.join(30)
