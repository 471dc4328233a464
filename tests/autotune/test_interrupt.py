"""An interrupt that a library swallowed is not lost."""

import os
import signal

import pytest

from autotune import interrupt


class Swallows:
    """Raises from a finaliser, where Python prints and forgets it, as libraries' callbacks do."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_got_lost_in_a_finaliser_is_raised_at_the_next_check() -> None:
    with interrupt.remembered():
        Swallows()
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
    interrupt.check()  # outside nothing is remembered
    assert signal.getsignal(signal.SIGINT) is not interrupt._on_sigint
