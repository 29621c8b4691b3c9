import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from packer import http_images, storage
from packer.format.errors import RowError, StorageFault
from packer.format.reasons import Reason
from packer.references import ReferenceReader, ReferenceRules

SECRET = "X-Amz-Signature=s3cret"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append((self.path, self.headers.get("Authorization")))
        self.server.answer(self)

    def log_message(self, *arguments):
        pass

    def send(self, status, body=b"", length=None, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingHTTPServer):
    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.requests = []
        self.released = threading.Event()
        self.host = f"127.0.0.1:{self.server_port}"


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(storage.faults, "RETRY_DELAYS_SECONDS", (0.0, 0.0))
    monkeypatch.setenv("no_proxy", "*")
    servers = []

    def start(answer):
        server = Server(answer)
        servers.append((server, threading.Thread(target=server.serve_forever, args=(0.01,))))
        servers[-1][1].start()
        return server

    yield start
    for server, thread in servers:
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def read(url, *hosts, max_bytes=1000):
    rules = ReferenceRules(image_root=None, archive=None, allow_hosts=hosts, max_bytes=max_bytes)
    return ReferenceReader(rules).read(url)


def refusal(url, *hosts):
    with pytest.raises(RowError) as caught:
        read(url, *hosts)
    assert "s3cret" not in caught.value.detail
    return caught.value.reason


def test_an_allowed_host_is_read_with_or_without_its_port(serve):
    server = serve(lambda handler: handler.send(200, b"picture"))
    url = f"http://{server.host}/a%20b/사진 1.jpg?w=1#x"
    assert [read(url, server.host), read(url, "other.org", "127.0.0.1")] == [b"picture"] * 2
    assert server.requests[0] == ("/a%20b/%EC%82%AC%EC%A7%84%201.jpg?w=1", None)


def test_user_info_is_sent_as_basic_authorization(serve):
    server = serve(lambda handler: handler.send(200, b"picture"))
    assert read(f"http://us%3Aer:pass@{server.host}/a.jpg", server.host) == b"picture"
    assert server.requests == [("/a.jpg", "Basic dXM6ZXI6cGFzcw==")]


@pytest.mark.parametrize("hosts", [(), ("example.org",), ("example.com:8080",), ("www.example.com",)])
def test_other_hosts_are_refused_by_name_without_a_connection(hosts):
    for url in (f"https://us:s3cret@example.com/a.jpg?{SECRET}", "HTTPS://EXAMPLE.com./a.jpg"):
        with pytest.raises(RowError, match=r"example\.com") as caught:
            read(url, *hosts)
        assert caught.value.reason is Reason.REMOTE_NOT_ALLOWED
        assert "s3cret" not in caught.value.detail


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (404, Reason.MISSING_IMAGE),
        (410, Reason.MISSING_IMAGE),
        (401, Reason.UNREADABLE_IMAGE),
        (403, Reason.UNREADABLE_IMAGE),
        (451, Reason.UNREADABLE_IMAGE),
        (206, Reason.UNREADABLE_IMAGE),
        (304, Reason.UNREADABLE_IMAGE),
        (200, Reason.EMPTY_IMAGE),
    ],
)
def test_a_status_says_what_is_wrong_and_is_asked_once(serve, status, reason):
    server = serve(lambda handler: handler.send(status))
    assert refusal(f"http://{server.host}/a.jpg?{SECRET}", server.host) is reason
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_a_passing_fault_is_asked_again(serve, status):
    server = serve(lambda handler: handler.send(200, b"picture") if len(handler.server.requests) > 2 else handler.send(status))
    assert read(f"http://{server.host}/a.jpg", server.host) == b"picture"
    assert len(server.requests) == 3


def break_off(handler):
    handler.send(200, b"half", length=8)


def break_status_line(handler):
    handler.wfile.write(b"nonsense\r\n\r\n")


def hold(handler):
    handler.server.released.wait(20)


def drip(handler):
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.released.wait(0.01):
        try:
            handler.wfile.write(b"x")
        except OSError:
            return


@pytest.mark.parametrize("answer", [break_off, break_status_line, hold, drip, lambda handler: handler.send(500)])
def test_a_host_that_keeps_failing_is_a_storage_fault(serve, answer, monkeypatch):
    monkeypatch.setattr(http_images, "TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(http_images, "DEADLINE_SECONDS", 0.1)
    server = serve(answer)
    with pytest.raises(StorageFault, match=server.host) as caught:
        read(f"http://us:s3cret@{server.host}/a.jpg?{SECRET}", server.host)
    assert "s3cret" not in str(caught.value)
    assert len(server.requests) == 3


def test_a_closed_port_is_a_storage_fault(serve):
    server = serve(lambda handler: None)
    server.server_close()
    with pytest.raises(StorageFault, match=server.host):
        read(f"http://{server.host}/a.jpg", server.host)


def test_redirects_are_followed_only_to_allowed_hosts(serve):
    target = serve(lambda handler: handler.send(200, b"picture"))
    server = serve(lambda handler: handler.send(302, Location=f"http://{target.host}/b.jpg?{SECRET}"))
    url = f"http://us:pass@{server.host}/a.jpg"
    assert refusal(url, server.host) is Reason.REMOTE_NOT_ALLOWED
    assert target.requests == []
    assert read(url, server.host, target.host) == b"picture"
    assert target.requests == [(f"/b.jpg?{SECRET}", None)]


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("ftp://127.0.0.1/x", Reason.REMOTE_NOT_ALLOWED),
        ("file:///etc/hostname", Reason.UNREADABLE_IMAGE),
        ("data:,x", Reason.UNREADABLE_IMAGE),
        ("http://[/x", Reason.UNREADABLE_IMAGE),
    ],
)
def test_a_redirect_to_another_scheme_is_refused(serve, location, reason):
    server = serve(lambda handler: handler.send(302, Location=location))
    assert refusal(f"http://{server.host}/a.jpg", "127.0.0.1") is reason


def test_a_circle_of_redirects_ends(serve):
    server = serve(lambda handler: handler.send(302, Location="/a.jpg"))
    assert refusal(f"http://{server.host}/a.jpg", "127.0.0.1") is Reason.UNREADABLE_IMAGE


def stream_without_end(handler):
    handler.send_response(200)
    handler.end_headers()
    try:
        while True:
            handler.wfile.write(bytes(65536))
    except OSError:
        return


@pytest.mark.parametrize("answer", [stream_without_end, lambda handler: handler.send(200, length=10**12)])
def test_the_limit_holds_while_streaming_and_by_the_promised_length(serve, answer):
    server = serve(answer)
    with pytest.raises(RowError, match=r"found \d+ bytes, expected at most 1000") as caught:
        read(f"http://{server.host}/a.jpg", server.host)
    assert caught.value.reason is Reason.IMAGE_TOO_LARGE


def test_encoded_content_is_not_the_file(serve):
    server = serve(lambda handler: handler.send(200, b"zipped", Content_Encoding="gzip"))
    assert refusal(f"http://{server.host}/a.jpg", server.host) is Reason.UNREADABLE_IMAGE


@pytest.mark.parametrize(
    "url", ["http://", "http:///a.jpg", "http://h:port/a.jpg", "http://[::1/a.jpg", "http://h/\ud83d", "http://h:99999/a"]
)
def test_an_unusable_url_is_refused(url):
    assert refusal(url, "h") is Reason.UNSUPPORTED_REFERENCE


def test_an_archive_behind_http_is_not_read():
    assert refusal("https://h/a.zip!/b.jpg", "h") is Reason.UNSUPPORTED_REFERENCE
