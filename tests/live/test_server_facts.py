"""Whatever a server says of itself, it is facts or nothing, and never the end of the tuner."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.server_facts import ServerFacts, read_facts

Tell = Callable[[dict[str, bytes]], str]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["data", "id", "max_model_len", "version"]), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def tell() -> Iterator[Tell]:
    """Has a server answer with these bodies, by path; returns its URL."""
    bodies: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = bodies.get(self.path, b"")
            self.send_response(200 if self.path in bodies else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def answer(with_bodies: dict[str, bytes]) -> str:
        bodies.clear()
        bodies.update(with_bodies)
        return f"http://127.0.0.1:{server.server_port}"

    yield answer
    server.shutdown()
    server.server_close()
    thread.join()


def test_pages_of_any_shape_are_facts_or_nothing(tell: Tell) -> None:
    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(JSON, JSON, st.text(max_size=40))
    def probe(models: object, version: object, words: str) -> None:
        url = tell(
            {
                "/v1/models": json.dumps(models).encode(),
                "/version": json.dumps(version).encode(),
                "/metrics": f'vllm:cache_config_info{{num_gpu_blocks="{words}",block_size="²"}} 1'.encode(),
            }
        )
        facts = read_facts(url, f"non-default args: {{{words}}}\nmax_num_batched_tokens={'9' * 5000}")
        json.dumps(facts.to_dict())
        assert facts.max_num_batched_tokens is None
        assert facts.model is None or isinstance(facts.model, str)
        assert facts.max_model_len is None or isinstance(facts.max_model_len, int)

    probe()


@pytest.mark.parametrize("body", [b"[" * 200_000, b"\xff" * 100, b'{"data": ' + b"9" * 10_000 + b"}", b""])
def test_bodies_that_break_parsers_are_nothing(tell: Tell, body: bytes) -> None:
    facts = read_facts(tell({"/v1/models": body, "/version": body, "/metrics": body}), "")
    assert facts == ServerFacts()


@pytest.mark.parametrize(
    "flags", ["{" + "[" * 50_000, "{" + "-" * 50_000 + "1", "{1: X()}", "{'a': " + "9" * 9_000 + "}"]
)
def test_flags_that_nobody_can_parse_are_said_to_be_so(tell: Tell, flags: str) -> None:
    facts = read_facts(tell({}), f"non-default args: {flags}}}")
    assert list(facts.flags) == ["unparsed"]
