"""Which trials of a shared study count follows from their numbers alone."""

from hypothesis import given
from hypothesis import strategies as st

from autotune.distributed.beats import Watch
from autotune.distributed.slots import Attempt, make_slots, retry_key


def test_of_two_trials_with_one_key_the_lower_number_counts() -> None:
    slots = make_slots([Attempt(3, "done", 3, key="known:0"), Attempt(1, "waiting", 1, key="known:0")])
    assert [slot.last.number for slot in slots] == [1]


def test_a_retry_belongs_to_its_slot_and_keeps_its_rank() -> None:
    first, second = Attempt(0, "dead", 0), Attempt(1, "done", 1)
    again = Attempt(2, "running", 0, attempt=2, deaths=1, key="retry:0:2")
    slots = make_slots([second, again, first])
    assert [(slot.index, slot.last.number) for slot in slots] == [(0, 2), (1, 1)]
    assert slots[0].done is None
    assert retry_key(slots[0]) == "retry:0:3"


def test_a_trial_that_was_taken_back_opens_no_slot() -> None:
    assert make_slots([Attempt(0, "dead", 0, void=True)]) == []


@given(st.lists(st.sampled_from(["first", "retry", "twice", "void"]), max_size=12), st.randoms())
def test_every_order_of_reading_gives_the_same_slots(kinds: list[str], random: object) -> None:
    trials: list[Attempt] = []
    for number, kind in enumerate(kinds):
        open_slots = make_slots(trials)
        if kind in ("retry", "twice") and open_slots:
            slot = open_slots[number % len(open_slots)]
            key = retry_key(slot)
            root, attempt = slot.attempts[0].number, slot.last.attempt + 1
            trials.append(Attempt(number, "waiting", root, attempt, key=key))
        else:
            trials.append(Attempt(number, "running", number, void=kind == "void"))
    shuffled = list(trials)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    slots = make_slots(shuffled)
    assert slots == make_slots(trials)
    counted = [attempt.number for slot in slots for attempt in slot.attempts]
    assert len(counted) == len(set(counted))
    assert [slot.index for slot in slots] == list(range(len(slots)))


def test_a_beat_that_stands_still_for_four_intervals_is_given_up_and_one_that_moves_is_not() -> None:
    now = [0.0]
    watch = Watch(1.0, clock=lambda: now[0])
    for count in range(6):
        now[0] = float(count)
        stale = watch.look({1: ("a", None), 2: ("b", count)})
    assert stale == {1}


def test_an_observer_that_was_away_starts_counting_anew() -> None:
    now = [0.0]
    watch = Watch(1.0, clock=lambda: now[0])
    watch.look({1: ("a", 7)})
    now[0] = 100.0  # the storage was away, or this machine slept
    assert watch.look({1: ("a", 7)}) == frozenset()
