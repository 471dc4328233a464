"""What an error message says of a name that nobody knows."""

from ppas_core.naming import did_you_mean


def test_with_a_suggestion_many_names_are_left_out_and_without_one_all_are_listed() -> None:
    many = [*"abcdefghi", "trials"]
    assert did_you_mean("trails", many) == "; did you mean 'trials'?"
    assert did_you_mean("xyz", many) == f"; allowed: {', '.join(many)}"
    assert did_you_mean("0.27.0", ["0.22.1", "0.27.1"]) == "; did you mean '0.27.1'? allowed: 0.22.1, 0.27.1"
