"""Every public sample comes in with the counts, units and prefixes that its source states."""

from pathlib import Path

import pytest

from traces.describe import describe
from traces.format import read_trace, write_trace
from traces.importers import import_trace

pytestmark = pytest.mark.shared


@pytest.mark.parametrize(
    ("file", "form", "requests", "duration_s", "prompt_tokens", "output_tokens", "block_size"),
    [
        ("azure2023_conv_500.csv", "azure", 500, 129.012474, (374, 1033), (44, 420), None),
        ("vidur_splitwise_conv_500.csv", "vidur", 500, 129.012474, (374, 1033), (44, 420), None),
        ("inference_perf_azure_19.csv", "azure", 20, 13.025088, (374, 1353), (44, 142), None),
        ("mooncake_conversation_300.jsonl", "mooncake", 300, 102.0, (6758, None), (500, None), 512),
        ("burstgpt3_first4_raw.csv", "burstgpt", 4, 144.0, (906, 935), (446, 178), None),
        ("bailian_doc_examples_3.jsonl", "bailian", 3, 62.5, (502, 400), (1494, 80), 16),
    ],
)
def test_every_sample_is_detected_and_has_its_counts_and_units(
    shared: Path,
    tmp_path: Path,
    file: str,
    form: str,
    requests: int,
    duration_s: float,
    prompt_tokens: tuple[int, int | None],
    output_tokens: tuple[int, int | None],
    block_size: int | None,
) -> None:
    imported = import_trace(shared / "traces" / file)
    trace, ledger = imported.trace, imported.ledger
    assert (ledger.format, ledger.rows_read, ledger.kept, dict(ledger.dropped)) == (form, requests, requests, {})
    assert trace.requests[0].arrival_s == 0
    assert trace.duration_s == duration_s
    assert trace.block_size == block_size
    ends = (trace.requests[0], trace.requests[-1])
    for request, prompt, output in zip(ends, prompt_tokens, output_tokens, strict=True):
        assert prompt is None or request.prompt_tokens == prompt
        assert output is None or request.output_tokens == output
    write_trace(trace, tmp_path / "t.jsonl.gz")
    assert read_trace(tmp_path / "t.jsonl.gz") == trace


def test_the_azure_and_the_vidur_sample_are_the_same_requests_to_the_nanosecond(shared: Path) -> None:
    azure, vidur = (
        import_trace(shared / "traces" / name).trace
        for name in ("azure2023_conv_500.csv", "vidur_splitwise_conv_500.csv")
    )
    assert azure.requests == vidur.requests


def test_azure_keeps_all_seven_digits_of_its_clock(shared: Path) -> None:
    imported = import_trace(shared / "traces" / "azure2023_conv_500.csv")
    assert imported.ledger.offset == "2023-11-16 18:15:46.680590000"
    assert imported.trace.requests[1].arrival_s == 4.314579  # 50.9951690 - 46.6805900


def test_burstgpt_3_is_read_by_column_name_and_rebased(shared: Path) -> None:
    imported = import_trace(shared / "traces" / "burstgpt3_first4_raw.csv")
    assert [request.arrival_s for request in imported.trace.requests] == [0, 51, 82, 144]
    assert [request.prompt_tokens for request in imported.trace.requests] == [906, 36, 1779, 935]
    assert imported.trace.requests[0].session == "1722ac82-0a46-4bf0-aa08-89794e7a2b3f"
    assert imported.ledger.offset == "19440110 s"


def test_mooncake_keeps_every_block_id_and_reports_its_tick(shared: Path) -> None:
    imported = import_trace(shared / "traces" / "mooncake_conversation_300.jsonl")
    assert sum(len(request.block_hashes) for request in imported.trace.requests) == 8490
    assert len({block for request in imported.trace.requests for block in request.block_hashes}) == 7814
    assert imported.ledger.tick_s == 3.0
    assert imported.ledger.requests_per_tick == pytest.approx(300 / 35)
    assert any("tick every 3 s" in line for line in imported.ledger.lines())
    assert describe(imported.trace)["prompt tokens in prefixes seen before"] > 100_000


def test_bailian_conversations_share_a_session_and_short_block_lists_are_named(shared: Path) -> None:
    imported = import_trace(shared / "traces" / "bailian_doc_examples_3.jsonl")
    assert [request.session for request in imported.trace.requests] == ["0", "159", "159"]
    assert [len(request.block_hashes) for request in imported.trace.requests] == [32, 0, 0]
    assert (imported.ledger.without_block_hashes, imported.ledger.late_rows) == (2, 1)
    assert any("2 requests are kept without block hashes" in line for line in imported.ledger.lines())
