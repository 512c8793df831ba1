"""The bytes behind an http or https URL, from public addresses alone, bounded in size and time."""

import http.client
import ipaddress
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from onereplay.errors import MediaError

TIMEOUT_S = 20.0
"""The longest wait for an answer of the server, and for the whole of a body, in seconds."""


def fetch(url: str, name: str, max_bytes: int) -> bytes:
    """The body behind a URL.

    Every connection, a redirect's too, goes to an address that was checked to be public, the very one that was checked:
    a name that resolves to another address the second time gains nothing. Proxies of the environment are not used.

    Args:
        url: http or https, without a user name.
        name: what errors call the source.
        max_bytes: of the body.

    Raises:
        MediaError: no such URL, no public address, an answer that is no success, too many bytes, or too slow.
    """
    deadline = time.monotonic() + TIMEOUT_S
    _check_url(url, name)
    request = urllib.request.Request(url, headers={"User-Agent": "onereplay", "Accept": "image/*, video/*, */*;q=0.5"})
    try:
        with _opener().open(request, timeout=TIMEOUT_S) as response:
            return _read_body(response, name, max_bytes, deadline)
    except urllib.error.HTTPError as err:
        err.close()
        raise MediaError(name, f"the server answers {err.code} {err.reason}") from err
    except (OSError, ValueError, http.client.HTTPException) as err:
        if isinstance(err, MediaError):
            raise
        raise MediaError(name, f"cannot be fetched: {err}") from err


def _check_url(url: str, name: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError as err:
        raise MediaError(name, f"not a URL: {err}") from err
    if parts.scheme.lower() not in ("http", "https"):
        raise MediaError(name, "only http and https URLs are fetched")
    if parts.username is not None or parts.password is not None:
        raise MediaError(name, "a URL with a user name or password is refused")


def _read_body(response: Any, name: str, max_bytes: int, deadline: float) -> bytes:
    promised = int(response.headers.get("Content-Length") or 0)
    body = bytearray()
    while promised <= max_bytes and (chunk := response.read1(1 << 16)):
        body += chunk
        if time.monotonic() > deadline:
            raise MediaError(name, f"not fetched within {TIMEOUT_S:g} seconds")
        if len(body) > max_bytes:
            break
    if max(promised, len(body)) > max_bytes:
        raise MediaError(name, f"larger than the {max_bytes:,} bytes that are fetched at most")
    if len(body) < promised:
        raise MediaError(name, f"the connection ended after {len(body):,} of {promised:,} bytes")
    return bytes(body)


def _opener() -> urllib.request.OpenerDirector:
    """An opener that knows http, https and checked redirects: no files, no FTP, no proxies."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        _HTTPHandler(),
        _HTTPSHandler(),
        _RedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    return opener


class _RedirectHandler(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_url(newurl, newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _HTTPConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        self.sock = _connect(self.host, self.port, self.timeout)


class _HTTPSConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        plain = _connect(self.host, self.port, self.timeout)
        self.sock = ssl.create_default_context().wrap_socket(plain, server_hostname=self.host)


class _HTTPHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HTTPConnection, req)


class _HTTPSHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HTTPSConnection, req)


def _connect(host: str, port: int, timeout: float | None) -> socket.socket:
    """A connection to the first address of a host that answers, after all of them were found public."""
    addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in addresses:
        if not is_public(address):
            raise ValueError(f"{host} is {address}, not a public address; fetch it yourself and pass the bytes")
    error: OSError = OSError(f"{host} has no address")
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout)
        except OSError as err:
            error = err
    raise error


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether an address is on the public internet; one that carries an IPv4 address is judged by that one too."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour or (ip.teredo and ip.teredo[1])
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if inner and not is_public(str(inner)):
            return False
        if ip.ipv4_mapped:
            return True
    return ip.is_global and not ip.is_multicast
