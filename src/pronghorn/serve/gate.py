"""Which requests are let in, by their headers: the names in Host and Origin, and the length of the body.

A web page in a browser on this machine can send requests here. Its own name may lead to 127.0.0.1 (DNS rebinding): the Host
header then has that name. Or it posts to 127.0.0.1 directly: the browser then adds its Origin. Both are refused.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from email.message import Message

from pronghorn.serve.asked import SHOWN, RequestError

LARGEST_BODY = 8 << 20
NAME_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._~-]+)(?::([0-9]{0,5}))?")
NUMBER = re.compile(r"0*([0-9]{1,12})")


def is_loopback(name: str) -> bool:
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def require_known_names(headers: Message, version: str, *, local: bool, names: Collection[str] = ()) -> None:
    """`local`: only names of loopback, and `names`, lead here. Otherwise any Host may."""
    hosts = headers.get_all("Host", [])
    if len(hosts) > 1 or (not hosts and version != "HTTP/1.0"):
        raise RequestError(f"{len(hosts)} Host headers instead of one")
    host = host_of(hosts[0]) if hosts else "localhost"
    if not host:
        raise RequestError(f"the Host header `{hosts[0][:SHOWN]}` is not a host name")
    if local and not (is_loopback(host) or host in names):
        known = " or a name that was given" if names else ""
        raise RequestError(f"the Host header `{host[:SHOWN]}` is not this machine's loopback interface{known}", status=403)
    for origin in headers.get_all("Origin", []):
        scheme, _, place = origin.partition("://")
        name = host_of(place) if scheme in ("http", "https") else ""
        if not (is_loopback(name) or name in names or (not local and place == hosts[0])):
            raise RequestError(f"requests from web pages are not answered (Origin: {origin[:SHOWN]})", status=403)


def host_of(text: str) -> str:
    """The host of `host:port`, in lower case and without brackets; empty: it is none."""
    found = NAME_AND_PORT.fullmatch(text.strip())
    return found[1].strip("[]").lower().removesuffix(".") if found else ""


def body_length(headers: Message, *, needed: bool, largest: int = LARGEST_BODY) -> int:
    """From Content-Length. `needed`: the method has a body."""
    lengths = headers.get_all("Content-Length", [])
    if headers.get_all("Transfer-Encoding") or (needed and not lengths):
        raise RequestError("the length of the body is unknown; send Content-Length, without Transfer-Encoding", status=411)
    if not lengths:
        return 0
    if len(lengths) > 1 or not lengths[0].strip().isdecimal() or not lengths[0].isascii():
        raise RequestError(f"Content-Length `{', '.join(lengths)[:SHOWN]}` is not a number of bytes")
    found = NUMBER.fullmatch(lengths[0].strip())
    if found is None or int(found[1]) > largest:
        raise RequestError(f"the body is larger than {largest >> 20} MB", status=413)
    return int(found[1])
