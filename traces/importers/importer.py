"""How a foreign file becomes a trace: every row kept, dropped for a named reason, or the file refused."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ppas_core.errors import InvalidInput
from traces.format import Trace, TraceRequest, read_trace
from traces.importers.clock import OrderCheck, check_unit, find_tick, spread
from traces.importers.detect import detect
from traces.importers.formats import FORMATS, NAMES, OWN, Format
from traces.importers.otel import otel_rows
from traces.importers.rows import Row, csv_columns, csv_rows, json_rows
from traces.importers.runs import aiperf_rows, guidellm_rows
from traces.importers.values import TIME_UNITS, TimeReader, block_ids, session_id, tokens
from traces.importers.vllm_log import vllm_log_rows
from traces.ledger import Ledger

NO_OUTPUT: Final = "without output tokens"
_BLOCK_SIZES: Final = tuple(2**power for power in range(13))


@dataclass(frozen=True, slots=True)
class Imported:
    """A trace and the account of the file that it came from; the account is in the trace's provenance, too."""

    trace: Trace
    ledger: Ledger


@dataclass(slots=True)
class _Columns:
    """The kept rows, in the file's order: nanoseconds, tokens, tokens, block ids, conversations."""

    time_ns: array[int] = field(default_factory=lambda: array("q"))
    prompt: array[int] = field(default_factory=lambda: array("q"))
    output: array[int] = field(default_factory=lambda: array("q"))
    blocks: list[Sequence[int]] = field(default_factory=list)
    session: list[str | None] = field(default_factory=list)


def import_trace(
    path: Path,
    *,
    format_name: str | None = None,
    time_unit: str | None = None,
    block_size: int | None = None,
    name: str | None = None,
    regime: str | None = None,
    spread_seed: int | None = None,
    any_order: bool = False,
    benchmark: int | None = None,
) -> Imported:
    """The trace in the foreign file `path`, plain or gzip.

    format_name: one of NAMES; None detects it from the content.
    time_unit: one of TIME_UNITS, where the file has another than its format; a named unit is believed.
    block_size: prompt tokens per block id, where the file has another than its format.
    name, regime: of the trace; the file's name without endings by default.
    spread_seed: spreads quantised arrivals within their tick with this seed.
    any_order: the rows are in no order of time: sort them whatever the clock does.
    benchmark: which benchmark of a guidellm report, from 1.

    Raises InvalidInput, with the file, the row and the value, for anything that cannot be used.
    """
    _check_option("format", format_name, NAMES)
    _check_option("time unit", time_unit, TIME_UNITS)
    if block_size is not None and block_size < 1:
        raise InvalidInput(f"block size is {block_size}; allowed: at least 1 prompt token")
    chosen = detect(path) if format_name is None else format_name
    if chosen == OWN:
        return _import_own(path, time_unit, block_size, spread_seed, name, regime)
    form = FORMATS[chosen]
    times = TimeReader(time_unit or form.unit)
    order = OrderCheck(any_order or form.any_order)
    columns = _Columns()
    dropped: Counter[str] = Counter()
    rows_read = 0
    read_row = _row_reader(form, times)
    for number, row in _rows(form, path, benchmark, block_size):
        rows_read += 1
        try:
            reason = read_row(row, columns, number, order)
        except InvalidInput as error:
            where = "" if str(error).startswith("row ") else f"row {number}: "
            raise InvalidInput(f"{path}, {where}{error}") from None
        if reason is not None:
            dropped[reason] += 1
    if not columns.time_ns:
        reasons = "; ".join(f"{count} {reason}" for reason, count in dropped.items()) or "it has no rows"
        raise InvalidInput(f"{path}: holds no request that can be replayed ({reasons}); a trace has at least one")
    try:
        size, without_blocks = _fit_blocks(columns, form, block_size)
        places = range(len(columns.time_ns))
        if order.late_rows:
            places = sorted(places, key=columns.time_ns.__getitem__)  # type: ignore[assignment]
        sorted_ns = array("q", (columns.time_ns[place] for place in places))
        if time_unit is None:
            check_unit(sorted_ns, times.unit)
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error}") from None
    offset_ns = sorted_ns[0]
    tick = find_tick(sorted_ns)
    spread_ns = sorted_ns if tick is None or spread_seed is None else array("q", spread(sorted_ns, tick, spread_seed))
    ledger = Ledger(
        format=chosen,
        time_unit=times.unit,
        rows_read=rows_read,
        kept=len(columns.time_ns),
        dropped=dict(dropped),
        without_block_hashes=without_blocks,
        late_rows=order.late_rows,
        offset=times.text(offset_ns),
        tick_s=tick.tick_ns / 1e9 if tick else None,
        requests_per_tick=tick.requests_per_tick if tick else 1.0,
        spread_seed=spread_seed if tick else None,
    )
    trace = Trace(
        name=name or _plain_name(path),
        requests=tuple(_requests(columns, places, spread_ns, offset_ns)),
        regime=regime or "all",
        block_size=size,
        provenance={"source": "imported", "file": path.name, "import": ledger.provenance()},
    )
    return Imported(trace, ledger)


def _check_option(what: str, value: str | None, allowed: Sequence[str]) -> None:
    if value is not None and value not in allowed:
        raise InvalidInput(f"{what} is {value!r}; allowed: {', '.join(allowed)}")


def _rows(form: Format, path: Path, benchmark: int | None, block_size: int | None) -> Iterator[Row]:
    if benchmark is not None and form.name != "guidellm":
        raise InvalidInput(f"{path}: benchmark is {benchmark}, but a file in the format {form.name} has no benchmarks")
    if form.kind == "csv":
        if missing := form.missing(csv_columns(path)):
            raise InvalidInput(
                f"{path}, row 1: the column {missing[0]!r} is missing; the format {form.name} needs "
                f"{', '.join(form.needed)}. Is it another format?"
            )
        return csv_rows(path)
    if form.name == "aiperf":
        return aiperf_rows(path)
    if form.name == "vllm-log":
        return vllm_log_rows(path, block_size or form.block_size or 1)
    if form.name == "otel":
        return otel_rows(path)
    return guidellm_rows(path, benchmark) if form.kind == "document" else json_rows(path)


def _row_reader(
    form: Format, times: TimeReader
) -> Callable[[Mapping[str, Any], _Columns, int, OrderCheck], str | None]:
    """What reads one row of `form` into the columns and says why it was left out, if it was."""
    conversations = _Conversations()

    def read(row: Mapping[str, Any], columns: _Columns, number: int, order: OrderCheck) -> str | None:
        reason = form.skip(row)
        if reason is not None:
            return reason
        for column in form.needed:
            if column not in row:
                raise InvalidInput(f"{column!r} is missing; the format {form.name} needs {', '.join(form.needed)}")
        time_ns = times.read_ns(form.time, row[form.time])
        prompt = tokens(form.prompt, row[form.prompt], 1)
        output = tokens(form.output, row[form.output], 0)
        blocks = block_ids(form.hashes, row.get(form.hashes)) if form.hashes else ()
        session = conversations.root(row) if form.name == "bailian" else None
        if form.session:
            session = session_id(form.session, row.get(form.session))
        order.add(time_ns, number, f"{form.time} {row[form.time]}")
        if output == 0:
            return NO_OUTPUT
        columns.time_ns.append(time_ns)
        columns.prompt.append(prompt)
        columns.output.append(output)
        columns.blocks.append(blocks)
        columns.session.append(session)
        return None

    return read


class _Conversations:
    """Follows Bailian's `parent_chat_id` back to the chat that a conversation began with."""

    def __init__(self) -> None:
        self._roots: dict[str, str] = {}

    def root(self, row: Mapping[str, Any]) -> str | None:
        chat = session_id("chat_id", row.get("chat_id"))
        parent = session_id("parent_chat_id", row.get("parent_chat_id"))
        if chat is None:
            return None
        root = chat if parent in (None, "-1") else self._roots.get(str(parent), str(parent))
        self._roots[chat] = root
        return root


def _fit_blocks(columns: _Columns, form: Format, named: int | None) -> tuple[int | None, int]:
    """The block size, and how many requests lost their block ids because these do not cover their prompts.

    Raises InvalidInput when another size fits more requests, or when none fits.
    """
    size = named or form.block_size
    if size is None or not any(columns.blocks):
        return None, 0
    shapes = Counter((prompt, len(ids)) for prompt, ids in zip(columns.prompt, columns.blocks, strict=True) if ids)

    def fits(candidate: int) -> int:
        return sum(count for (prompt, blocks), count in shapes.items() if -(-prompt // candidate) == blocks)

    total, fitting = sum(shapes.values()), fits(size)
    if fitting == total:
        return size, 0
    best = max((candidate for candidate in _BLOCK_SIZES if candidate != size), key=fits)
    if fits(best) > fitting and named is None:
        raise InvalidInput(
            f"{form.hashes} fit blocks of {size} tokens in {fitting} of {total} rows, blocks of {best} in "
            f"{fits(best)}; name the size: --block-size {best}, or --block-size {size} if it is right"
        )
    if fitting == 0:
        raise InvalidInput(f"{form.hashes} fit blocks of {size} tokens in no row; name the size with --block-size")
    for place, (prompt, ids) in enumerate(zip(columns.prompt, columns.blocks, strict=True)):
        if ids and -(-prompt // size) != len(ids):
            columns.blocks[place] = ()
    return size, total - fitting


def _requests(
    columns: _Columns, places: Sequence[int], time_ns: Sequence[int], offset_ns: int
) -> Iterator[TraceRequest]:
    same: dict[int, int] = {}  # lengths repeat: one object for each number
    for place, now_ns in zip(places, time_ns, strict=True):
        prompt, output = columns.prompt[place], columns.output[place]
        yield TraceRequest(
            arrival_s=(now_ns - offset_ns) / 1e9,
            prompt_tokens=same.setdefault(prompt, prompt),
            output_tokens=same.setdefault(output, output),
            block_hashes=columns.blocks[place],
            session=columns.session[place],
        )


def _import_own(
    path: Path,
    time_unit: str | None,
    block_size: int | None,
    spread_seed: int | None,
    name: str | None,
    regime: str | None,
) -> Imported:
    """Our own format says everything itself; it is read, checked and handed on."""
    for what, value in (("time unit", time_unit), ("block size", block_size), ("seed to spread with", spread_seed)):
        if value is not None:
            raise InvalidInput(f"{path}: is a trace of our own, which needs no {what}; leave the option out")
    trace = read_trace(path)
    ledger = Ledger(format=OWN, time_unit="s", rows_read=len(trace.requests), kept=len(trace.requests))
    provenance = {"import": ledger.provenance(), **trace.provenance}  # the account of a first import stays
    return Imported(
        replace(trace, name=name or trace.name, regime=regime or trace.regime, provenance=provenance), ledger
    )


def _plain_name(path: Path) -> str:
    return re.sub(r"(\.(csv|jsonl?|gz))+$", "", path.name) or path.name
