"""The proxy that breaks requests: each fault is what it says, and everything else passes unchanged."""

import http.client
import http.server
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from dataclasses import dataclass, field

import pytest

from torchinstruments.testing.fault_proxy import FaultProxy


@dataclass
class _Upstream:
    """A server that keeps what it received and answers with a thousand bytes."""

    url: str = ""
    received: list[tuple[str, str, bytes]] = field(default_factory=list)


@pytest.fixture
def upstream() -> Generator[_Upstream]:
    """Runs an HTTP server on loopback."""
    seen = _Upstream()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.received.append((self.command, self.path, body))
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"x" * 1000)

        def do_GET(self) -> None:
            self._serve()

        def do_PUT(self) -> None:
            self._serve()

        # pyrefly: ignore[missing-override-decorator]
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    seen.url = f"http://127.0.0.1:{server.server_port}"
    yield seen
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def proxy(upstream: _Upstream) -> Generator[FaultProxy]:
    """Puts the proxy in front of it."""
    with FaultProxy(upstream.url) as one:
        yield one


def _request(
    proxy: FaultProxy, method: str = "GET", path: str = "/a", body: bytes | None = None
) -> tuple[int, bytes]:
    request = urllib.request.Request(f"{proxy.url}{path}", data=body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def test_without_a_rule_everything_passes(proxy: FaultProxy, upstream: _Upstream) -> None:
    """Method, path, query and body arrive as they were sent, and the log tells of them."""
    assert _request(proxy, "PUT", "/a%20b?x=1&y=%2F", b"body" * 50_000) == (200, b"x" * 1000)
    assert upstream.received == [("PUT", "/a%20b?x=1&y=%2F", b"body" * 50_000)]
    assert [(e.method, e.target, e.action, e.body_bytes) for e in proxy.log] == [
        ("PUT", "/a%20b?x=1&y=%2F", "pass", 200_000)
    ]


def test_chunked_bodies_and_one_connection_for_many_requests_pass(
    proxy: FaultProxy, upstream: _Upstream
) -> None:
    """A client that keeps its connection and sends without a length is served alike."""
    connection = http.client.HTTPConnection(proxy.url.removeprefix("http://"), timeout=10)
    for number in range(3):
        connection.request("PUT", f"/{number}", body=iter([b"ab", b"cde"]), encode_chunked=True)
        assert connection.getresponse().read() == b"x" * 1000
    connection.close()
    assert upstream.received == [("PUT", f"/{number}", b"abcde") for number in range(3)]


def test_a_status_is_answered_in_place_of_the_server(proxy: FaultProxy, upstream: _Upstream) -> None:
    """The given number of requests gets the error document, the next one passes."""
    proxy.status(503, "SlowDown", times=2)
    answers = [_request(proxy, "PUT", body=b"1") for _ in range(3)]
    assert [status for status, _ in answers] == [503, 503, 200]
    assert b"<Code>SlowDown</Code>" in answers[0][1]
    assert len(upstream.received) == 1


def test_rules_choose_by_method_path_and_turn(proxy: FaultProxy) -> None:
    """Only what matches is broken, and only from the turn on that was given."""
    proxy.status(500, "InternalError", method="PUT|POST", path="/part", skip=1, times=1)
    assert _request(proxy, "GET", "/part")[0] == 200
    assert _request(proxy, "PUT", "/other", b"1")[0] == 200
    assert [_request(proxy, "PUT", "/part-1", b"1")[0] for _ in range(3)] == [200, 500, 200]


def test_a_reset_never_reaches_the_server(proxy: FaultProxy, upstream: _Upstream) -> None:
    """The client sees a reset, the server nothing."""
    proxy.reset(times=1)
    with pytest.raises((ConnectionResetError, urllib.error.URLError)):
        _request(proxy)
    assert upstream.received == []


def test_a_reset_in_the_body_cuts_the_request(proxy: FaultProxy, upstream: _Upstream) -> None:
    """The server never gets the whole of it."""
    proxy.reset_body(1000, method="PUT", times=1)
    with pytest.raises((ConnectionError, urllib.error.URLError, http.client.HTTPException)):
        _request(proxy, "PUT", body=b"y" * 500_000)
    assert all(len(body) < 500_000 for _, _, body in upstream.received)


def test_a_dropped_answer_was_carried_out(proxy: FaultProxy, upstream: _Upstream) -> None:
    """The server did it, and the client cannot know."""
    proxy.drop_response(times=1)
    with pytest.raises((ConnectionError, urllib.error.URLError, http.client.HTTPException)):
        _request(proxy, "PUT", body=b"done")
    assert upstream.received == [("PUT", "/a", b"done")]
    assert _request(proxy)[0] == 200


def test_a_truncated_answer_ends_early(proxy: FaultProxy) -> None:
    """Less arrives than was announced."""
    proxy.truncate(500, times=1)
    with pytest.raises((ConnectionError, http.client.IncompleteRead)):
        _request(proxy)


def test_a_stalled_request_is_never_answered(proxy: FaultProxy, upstream: _Upstream) -> None:
    """The client's own timeout is all that ends it."""
    proxy.stall(times=1)
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(f"{proxy.url}/a", timeout=0.5)
    assert upstream.received == []


def test_a_delayed_request_passes_later(proxy: FaultProxy) -> None:
    """It is answered after the given time, not before."""
    proxy.delay(0.3, times=1)
    began_s = time.monotonic()
    assert _request(proxy)[0] == 200
    assert time.monotonic() - began_s >= 0.3


def test_down_refuses_and_up_serves_at_the_same_address(proxy: FaultProxy) -> None:
    """A store that goes away and comes back has not moved."""
    address = proxy.url
    proxy.down()
    with pytest.raises(urllib.error.URLError):
        _request(proxy)
    proxy.up()
    assert proxy.url == address
    assert _request(proxy)[0] == 200


def test_cleared_rules_are_forgotten(proxy: FaultProxy) -> None:
    """After clearing, requests pass again."""
    proxy.status(503, "SlowDown")
    assert _request(proxy)[0] == 503
    proxy.clear()
    assert _request(proxy)[0] == 200


def test_an_upstream_that_is_no_address_is_refused() -> None:
    """The message shows what an address looks like."""
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:8333"):
        FaultProxy("127.0.0.1:8333")
