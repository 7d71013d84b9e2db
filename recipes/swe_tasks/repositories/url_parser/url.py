"""Takes addresses apart."""

from typing import NamedTuple
from urllib.parse import unquote_plus

PORTS = {"http": 80, "https": 443, "ftp": 21}


class Address(NamedTuple):
    scheme: str
    host: str
    port: int
    path: str
    query: dict


def parse_query(text):
    """Values by name; a name that occurs several times keeps all values."""
    query = {}
    for part in text.split("&"):
        if part:
            name, _, value = part.partition("=")
            query.setdefault(unquote_plus(name), []).append(unquote_plus(value))
    return query


def parse(text):
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in PORTS:
        raise ValueError(f"no address: {text!r}")
    rest, _, _fragment = rest.partition("#")
    rest, _, query = rest.partition("?")
    authority, slash, rest = rest.partition("/")
    path = slash + rest
    host, _, port = authority.partition(":")
    return Address(scheme, host.lower(), int(port or PORTS[scheme]), path or "/", parse_query(query))
