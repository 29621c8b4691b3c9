"""A store with latency: enough of S3 over HTTP on this machine for NVIDIA's multi-storage client, which all contestants use.

    python benchmarks/loader_store.py FOLDER SECONDS

Every request is answered after the latency, each connection by a thread of its own. `GET /requests` tells how many there were.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import yaml

BUCKET, PROFILE = "bucket", "store"
LATENCY_SECONDS = 0.020


class Handler(BaseHTTPRequestHandler):
    # HTTP/1.0, so that no connection outlives its request: the client keeps them open over a fork, and two loader workers of
    # Energon then read each other's answers from the socket they inherited.
    wbufsize = -1  # headers and body leave together, or the client's delayed acknowledgement costs 40 ms
    disable_nagle_algorithm = True
    folder = Path()
    latency_seconds = LATENCY_SECONDS
    num_requests = 0

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        url = urlsplit(self.path)
        if url.path == "/requests":
            self._send(200, str(Handler.num_requests).encode())
            return
        Handler.num_requests += 1
        time.sleep(self.latency_seconds)
        key = unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/")
        if not key:
            self._send(200, self._listing(parse_qs(url.query)))
        elif (self.folder / key).is_file():
            self._send_file(self.folder / key, with_body=with_body)
        else:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>" if with_body else b"")

    def _send_file(self, path: Path, *, with_body: bool) -> None:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            start, end = 0, found.st_size
            if wanted := self.headers["Range"]:
                first, last = wanted.removeprefix("bytes=").split("-")
                start, end = int(first), min(end, int(last) + 1) if last else end
            data = os.pread(file.fileno(), end - start, start) if with_body else b""
        headers = {"Last-Modified": formatdate(found.st_mtime, usegmt=True), "ETag": f'"{found.st_mtime_ns:x}"'}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{found.st_size}"
        self._send(206 if wanted else 200, data, headers, end - start)

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None, size: int | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if size is None else size))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()

    def _listing(self, query: dict[str, list[str]]) -> bytes:
        """All keys below a prefix; folders are told apart where a delimiter is asked for."""
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        items: dict[str, str] = {}
        for path in sorted(self.folder.rglob("*")):
            key = path.relative_to(self.folder).as_posix()
            if not path.is_file() or not key.startswith(prefix):
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            if found:
                name = escape(prefix + head + delimiter)
                items[name] = f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"
            else:
                items[key] = (
                    f"<Contents><Key>{escape(key)}</Key><Size>{path.stat().st_size}</Size><ETag>x</ETag>"
                    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(items.values())}</ListBucketResult>".encode()

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    request_queue_size = 512  # the usual 5 turns away many that come at once, and they try again after a second


@contextmanager
def serving(folder: Path, latency_seconds: float = LATENCY_SECONDS) -> Iterator[str]:
    """Serve a folder; the URL of the server. `msc://store` leads to it in this process and its children."""
    command = [sys.executable, __file__, str(folder), str(latency_seconds)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        address = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        provider = {"type": "s3", "options": {"base_path": BUCKET, "endpoint_url": address, "region_name": "us-east-1"}}
        keys = {"type": "S3Credentials", "options": {"access_key": "test", "secret_key": "test"}}
        profile = {"storage_provider": provider, "credentials_provider": keys}
        config = folder.with_name(f"{folder.name}-msc.yaml")
        config.write_text(yaml.safe_dump({"profiles": {PROFILE: profile}}))
        os.environ["MSC_CONFIG"] = str(config)
        yield address
    finally:
        server.terminate()
        server.wait()


def num_requests(address: str) -> int:
    """What the server answered so far."""
    with urllib.request.urlopen(f"{address}/requests") as answer:
        return int(answer.read())


def main() -> None:
    Handler.folder, Handler.latency_seconds = Path(sys.argv[1]), float(sys.argv[2])
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
