"""What clients and the server see of the proxy: nothing."""

import json
import socket
import time
from pathlib import Path

import pytest
from recordings import Record, Serve
from talk import chat, get, opened, send

from ppas_core.errors import NoResult

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_an_answer_is_the_same_byte_for_byte_with_and_without_the_proxy(serve: Serve, record: Record) -> None:
    server = serve()
    proxy = record(server).url
    usage = {"stream_options": {"include_usage": True}}
    for path, body in (
        (CHAT, chat("be brief", "hello")),
        (CHAT, chat("be brief", "hello", stream=True)),
        (CHAT, chat("be brief", "hello", stream=True, **usage)),
        (COMPLETIONS, {"model": "m", "prompt": "héllo", "stream": True, "stream_options": None}),
        (COMPLETIONS, {"model": "m", "prompt": [1, 2, 3], "stream": True}),
        ("/v1/responses", {"model": "m", "input": "hello", "stream": True}),
        ("/v1/messages", {"model": "m", "messages": "hello", "stream": True}),
        ("/v1/embeddings?x=%2F%20a", b"anything \x00 at all"),
    ):
        direct, passed = send(server, path, body), send(proxy, path, body)
        assert passed.status == direct.status
        if direct.status == 418:
            direct_shown, shown = json.loads(direct.body), json.loads(passed.body)
            assert {**shown, "headers": 0} == {**direct_shown, "headers": 0}
            continue
        assert passed.body == direct.body
        assert (b'"usage"' in passed.body) == (b'"usage"' in direct.body)


def test_every_method_path_header_and_status_passes_both_ways(serve: Serve, record: Record) -> None:
    server = serve()
    proxy = record(server).url
    for method in ("GET", "PUT", "DELETE", "PATCH", "POST", "OPTIONS"):
        headers = {"Authorization": "Bearer abc", "X-Other": "1", "Connection": "X-Hop", "X-Hop": "mine"}
        found = send(proxy, "/a%20b/c?d=e%26f", None if method == "GET" else b"{}", method, **headers)
        assert (found.status, found.headers["X-Mine"], found.headers["Set-Cookie"]) == (418, "kept", "a=b")
        shown = json.loads(found.body)
        assert (shown["method"], shown["path"]) == (method, "/a%20b/c?d=e%26f")
        assert shown["headers"]["Authorization"] == "Bearer abc"
        assert shown["headers"]["X-Other"] == "1"
        assert "X-Hop" not in shown["headers"]
        assert "Cookie" not in shown["headers"]
    assert send(proxy, "/a", method="HEAD").status == 418


def test_the_server_gets_the_users_key_and_a_question_for_lengths_and_nothing_else_new(
    serve: Serve, record: Record
) -> None:
    server = serve()
    body = chat("be brief", "hello", stream=True, temperature=0.5)
    send(record(server).url, CHAT, body, Authorization="Bearer abc")
    (seen,) = get(server, "/seen")["requests"]
    assert seen["body"] == {**body, "stream_options": {"include_usage": True}}
    assert seen["headers"]["Authorization"] == "Bearer abc"


def test_untouched_requests_are_really_untouched_and_streams_without_lengths_are_left_out(
    serve: Serve, record: Record
) -> None:
    server = serve()
    recording = record(server, untouched=True)
    body = chat("be brief", "hello", stream=True)
    send(recording.url, CHAT, body)
    send(recording.url, CHAT, {**body, "stream": False})
    assert [seen["body"] for seen in get(server, "/seen")["requests"]] == [body, {**body, "stream": False}]
    account = recording.end()
    assert (account["kept"], account["dropped"]) == (1, {"the answer tells no lengths": 1})


@pytest.mark.parametrize("usage", [False, True], ids=["filtered", "as it is"])
def test_the_first_token_arrives_long_before_the_last_is_sent(serve: Serve, record: Record, usage: bool) -> None:
    body = chat("be brief", "hello", stream=True, **({"stream_options": {"include_usage": True}} if usage else {}))
    found = send(record(serve(gap_s=0.15)).url, CHAT, body)
    assert len(found.times_s) >= 6
    gaps = [later - earlier for earlier, later in zip(found.times_s[:5], found.times_s[1:6], strict=True)]
    assert min(gaps) > 0.05
    assert found.times_s[5] - found.times_s[0] > 0.6


def test_a_client_that_leaves_is_gone_for_the_server_too(serve: Serve, record: Record) -> None:
    server = serve(first_s=30.0)
    recording = record(server)
    connection = opened(recording.url, CHAT, chat("be brief", "hello", stream=True))
    while not get(server, "/seen")["requests"]:
        time.sleep(0.02)
    connection.close()
    deadline = time.monotonic() + 10
    while not get(server, "/seen")["left"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    send(recording.url, COMPLETIONS, {"model": "m", "prompt": "x"})
    assert recording.end()["dropped"] == {"the client left before the end": 1}


def test_a_cut_answer_is_cut_for_the_client_too(serve: Serve, record: Record) -> None:
    proxy = record(serve(fault="cut")).url
    with pytest.raises(Exception, match=r"IncompleteRead|reset|closed"):
        send(proxy, CHAT, chat("be brief", "hello", stream=True))


def test_a_server_that_is_not_there_is_a_bad_gateway_in_words(record: Record) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        recording = record(f"http://127.0.0.1:{closed.getsockname()[1]}")
        found = send(recording.url, CHAT, chat("be brief", "hello"))
    assert found.status == 502
    assert "no answer from the server" in json.loads(found.body)["error"]["message"]
    with pytest.raises(NoResult, match="1 no answer from the server"):
        recording.end()
    assert list(recording.output.parent.iterdir()) == []


def test_a_large_body_announced_with_a_question_passes(serve: Serve, record: Record) -> None:
    server = serve()
    host, port = record(server).url.removeprefix("http://").split(":")
    data = json.dumps({"model": "m", "prompt": list(range(300_000))}).encode()
    with socket.create_connection((host, int(port)), timeout=20) as client:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(data)}\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 100 ")
        client.sendall(data)
        assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
    assert len(get(server, "/seen")["requests"][0]["body"]["prompt"]) == 300_000


def test_it_listens_on_loopback_alone_unless_told_otherwise(serve: Serve, record: Record) -> None:
    recording = record(serve())
    port = int(recording.url.rpartition(":")[2])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]
