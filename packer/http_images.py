"""Images behind http(s), only from hosts the recipe allows by name; redirects too stay among those."""

from __future__ import annotations

import base64
import http.client
import re
import ssl
import time
import urllib.error
import urllib.request
from typing import IO, Any
from urllib.parse import SplitResult, quote, unquote, urlsplit, urlunsplit

from packer import storage
from packer.format.errors import RowError
from packer.format.reasons import Reason
from packer.redact import one_line, safe_place
from packer.refusals import empty, missing, too_large, unreadable, unsupported

TIMEOUT_SECONDS = 30.0
"""Without a byte from the server."""
DEADLINE_SECONDS = 300.0
"""For one image in all."""
_BLOCK_BYTES = 64 << 10
_DEFAULT_PORTS = {"http": 80, "https": 443}
_PASSING_STATUS = frozenset({408, 425, 429})
_URL_CHARS = "%/:=&?~#+!$,;'@()*[]"


def fetch(url: str, allow_hosts: tuple[str, ...], max_bytes: int) -> bytes:
    """The bytes an allowed host answers with.

    Raises:
        RowError: host not allowed, missing, refused, empty, too large.
        StorageFault: when the host kept failing.
    """
    parts = _parsed(url)
    _check_host(parts, allow_hosts)
    request = _request(parts)
    opener = urllib.request.build_opener(_AllowedRedirects(allow_hosts))
    return storage.with_retries(lambda: _fetch_once(opener, request, url, max_bytes), safe_place(url))


def _parsed(url: str) -> SplitResult:
    try:
        url.encode()
        parts = urlsplit(url)
        if not parts.hostname or (parts.port or 0) < 0:
            raise ValueError("it names no host")
    except ValueError as error:
        raise unsupported(f"{safe_place(url)}: not a usable URL: {error}") from error
    return parts


def _check_host(parts: SplitResult, allow_hosts: tuple[str, ...]) -> None:
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)
    allowed = {re.sub(r"[\[\]]", "", entry).lower().rstrip(".") for entry in allow_hosts}
    if parts.scheme not in _DEFAULT_PORTS or allowed.isdisjoint((host, f"{host}:{port}")):
        shown = one_line(host if parts.port is None else f"{host}:{port}", 260)
        known = one_line(", ".join(sorted(allowed)) or "none", 500)
        what = f"found host {shown} ({one_line(parts.scheme, 20)}), allowed hosts: {known}"
        raise RowError(Reason.REMOTE_NOT_ALLOWED, f"{what}; add the host to `allow_hosts`, or download the images first")


def _request(parts: SplitResult) -> urllib.request.Request:
    user, has_user, host = parts.netloc.rpartition("@")
    path, query = quote(parts.path or "/", safe=_URL_CHARS), quote(parts.query, safe=_URL_CHARS)
    request = urllib.request.Request(urlunsplit((parts.scheme, host, path, query, "")))
    request.add_header("User-Agent", "bayplan")
    request.add_header("Accept-Encoding", "identity")
    if has_user:
        token = base64.b64encode(unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")
    return request


class _AllowedRedirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect only to a host that is allowed itself."""

    def __init__(self, allow_hosts: tuple[str, ...]) -> None:
        self._allow_hosts = allow_hosts

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage, newurl: str
    ) -> urllib.request.Request | None:
        _check_host(_parsed(newurl), self._allow_hosts)
        return super().redirect_request(req, fp, code, msg, headers, newurl)

    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage
    ) -> Any:
        try:
            return super().http_error_302(req, fp, code, msg, headers)
        except (RowError, ValueError):
            fp.close()  # urllib leaves the connection open when a redirect is refused
            raise

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _fetch_once(opener: urllib.request.OpenerDirector, request: urllib.request.Request, url: str, max_bytes: int) -> bytes:
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        with opener.open(request, timeout=TIMEOUT_SECONDS) as response:
            return _body(response, url, max_bytes, deadline)
    except urllib.error.HTTPError as error:
        with error:
            raise _status_error(error.code, url) from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise unreadable(url, f"the host's certificate is not valid: {error.reason.verify_message}") from error
        raise OSError(str(error.reason)) from error
    except http.client.InvalidURL as error:
        raise unsupported(f"{safe_place(url)}: not a usable URL") from error
    except ValueError as error:
        raise unreadable(url, "the host redirects to something that is not a URL") from error
    except http.client.HTTPException as error:
        raise OSError(f"broken answer ({type(error).__name__})") from error


def _body(response: http.client.HTTPResponse, url: str, max_bytes: int, deadline: float) -> bytes:
    if response.status not in (200, 203, 204):
        raise unreadable(url, f"found HTTP status {response.status}, expected 200")
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() not in ("", "identity"):
        raise unreadable(url, f"found content encoding {encoding[:50]}, expected none: the bytes would not be the file's")
    expected = response.length
    if expected is not None and expected > max_bytes:
        raise too_large(url, expected, max_bytes)
    data = bytearray()
    while block := response.read1(_BLOCK_BYTES):
        data += block
        if len(data) > max_bytes:
            raise too_large(url, len(data), max_bytes)
        if time.monotonic() > deadline:
            raise TimeoutError(f"not complete after {DEADLINE_SECONDS:g} seconds")
    if expected is not None and len(data) < expected:
        raise ConnectionError(f"found {len(data)} bytes, expected {expected}")
    if not data:
        raise empty(url)
    return bytes(data)


def _status_error(status: int, url: str) -> Exception:
    if status in (404, 410):
        return missing(url, f"the host answers HTTP {status}")
    if status >= 500 or status in _PASSING_STATUS:
        return OSError(f"HTTP {status}")
    return unreadable(url, f"the host answers HTTP {status}")
