"""Connections between ranks and an aggregator: who takes part in a job, and until when.

A connection is TCP with lines of JSON; datagrams go to the same port. The aggregator sends a
challenge, and the rank proves that it has the token, which is not sent itself. The answer has the
rank's secret for datagrams. The connection stays open: its end reveals that the other side died.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

from slipstream.errors import CommunicationError, InvalidArgumentError, SlipstreamError

TOKEN_VARIABLE = "SLIPSTREAM_AGGREGATION_TOKEN"
VERSION = 1
_MAX_LINE_BYTES = 65536
_BUFFER_BYTES = 8 << 20
# Linux constants that the socket module lacks: options as root, and of IPv4 and IPv6.
_FORCED = {socket.SO_SNDBUF: 32, socket.SO_RCVBUF: 33}
_RECEIVE_MARKS = {socket.AF_INET: 13, socket.AF_INET6: 66}
_DISCOVER_MTU, _MTU = (
    {socket.AF_INET: 10, socket.AF_INET6: 23},
    {socket.AF_INET: 14, socket.AF_INET6: 24},
)
_FRAGMENT, _NEVER_FRAGMENT = 0, 2
_CAPABLE_OF_MARKS = 2


class AggregationError(CommunicationError):
    """A job cannot be summed by an aggregator, or no longer.

    Attributes:
        admission: whether the aggregator only lacks room: the ring is the usual alternative.
    """

    admission = False


def parse_address(text: str, argument: str = "address") -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[IPV6]:PORT``.

    Raises:
        InvalidArgumentError: it is not one.
    """
    host, colon, port = text.strip().rpartition(":") if isinstance(text, str) else ("", "", "")
    if not (host and colon and port.isdecimal() and int(port) < 65536):
        raise InvalidArgumentError(
            argument, f"{text!r} is not HOST:PORT", remedy="for example 127.0.0.1:4700"
        )
    return host.strip("[]"), int(port)


def need_named(host: str, argument: str) -> None:
    """Raise an `InvalidArgumentError` if `host` means all addresses of this machine."""
    addresses = []
    with contextlib.suppress(OSError):  # unknown: the caller cannot listen on it
        # The resolver also knows "0" and other spellings.
        addresses = [entry[4][0] for entry in socket.getaddrinfo(host, None)]
    if any(ipaddress.ip_address(str(address)).is_unspecified for address in addresses):
        raise InvalidArgumentError(
            argument, f"'{host}' would listen on every network of this machine",
            remedy="name the address of one interface, or 127.0.0.1",
        )  # fmt: skip


def proof(token: str, challenge: str, request: Mapping[str, Any]) -> str:
    """Return the proof that a request's sender has the token."""
    text = f"{challenge}{json.dumps(request, sort_keys=True)}"
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def for_datagrams(datagrams: socket.socket, *, fragments: bool) -> None:
    """Set large buffers, congestion marks (ECN), and whether IP may fragment datagrams."""
    family = datagrams.family
    six = family == socket.AF_INET6
    for option, forced in _FORCED.items():
        try:
            datagrams.setsockopt(socket.SOL_SOCKET, forced, _BUFFER_BYTES)
        except OSError:  # needs root
            datagrams.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
    level = socket.IPPROTO_IPV6 if six else socket.IPPROTO_IP
    marks = socket.IPV6_TCLASS if six else socket.IP_TOS
    datagrams.setsockopt(level, marks, _CAPABLE_OF_MARKS)
    datagrams.setsockopt(level, _RECEIVE_MARKS[family], 1)
    datagrams.setsockopt(level, _DISCOVER_MTU[family], _FRAGMENT if fragments else _NEVER_FRAGMENT)


def path_mtu(datagrams: socket.socket) -> int:
    """Return the largest packet, in bytes, that a connected socket's path is known to carry."""
    level = socket.IPPROTO_IPV6 if datagrams.family == socket.AF_INET6 else socket.IPPROTO_IP
    return datagrams.getsockopt(level, _MTU[datagrams.family])


def socket_address(like: socket.socket, address: tuple[str, int]) -> bytes:
    """Return the C structure of an address of the same family as a socket's."""
    host = socket.getaddrinfo(*address, like.family, socket.SOCK_DGRAM)[0][4][0]
    number = socket.inet_pton(like.family, str(host))
    head = struct.pack("=H", like.family) + struct.pack("!H", address[1])
    if like.family == socket.AF_INET6:
        return head + bytes(4) + number + bytes(4)
    return head + number + bytes(8)


class Lines:
    """A connection that carries objects as lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._pending = b""

    def send(self, **message: Any) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def try_send(self, **message: Any) -> None:
        """Send a message unless the connection has ended, which `receive` reports."""
        with contextlib.suppress(OSError):
            self.send(**message)

    def receive(self) -> dict[str, Any] | None:
        """Return the next object; None at the end of the connection, or after an invalid line."""
        while b"\n" not in self._pending:
            if len(self._pending) > _MAX_LINE_BYTES:
                return None
            data = self.connection.recv(4096)
            if not data:
                return None
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    def close(self) -> None:
        """Close the connection; a `receive` in another thread returns None."""
        with contextlib.suppress(OSError):  # it may have ended
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def join(
    address: str, token: str, request: Mapping[str, Any], who: str, timeout_s: float
) -> tuple[Lines, dict[str, Any]]:
    """Join a job, once all of its ranks have; return the connection and the answer.

    Args:
        request: job (str), ranks (list of int), world, slots and payload (bytes).
        who: rank and job in errors.
        timeout_s: time limit for all ranks to join.

    Raises:
        AggregationError: no aggregator answers, or it refuses.
    """
    host, port = parse_address(address)
    refused = ""
    try:
        lines = Lines(socket.create_connection((host, port), timeout=min(timeout_s, 5.0)))
    except OSError as error:
        raise AggregationError(
            f"{who} cannot reach an aggregator at {address}: {error.strerror or error}",
            remedy="start one: slipstream cluster aggregate serve",
        ) from error
    try:
        greeting = lines.receive() or {}
        if greeting.get("slipstream_aggregation") != VERSION:
            raise AggregationError(
                f"{address} is not an aggregator of this version", where=who,
                remedy="check the address; run the same slipstream on all machines",
            )  # fmt: skip
        sent = dict(request)
        lines.send(**sent, proof=proof(token, str(greeting.get("challenge")), sent))
        lines.connection.settimeout(timeout_s)
        answer = lines.receive()
        refused = "the connection ended" if answer is None else str(answer.get("error", ""))
    except OSError as error:
        lines.close()
        raise AggregationError(
            f"{who} got no answer from the aggregator at {address} within {timeout_s:g} s",
            remedy="check that all ranks of the job call attach",
        ) from error
    except SlipstreamError:
        lines.close()
        raise
    if refused or answer is None:
        lines.close()
        failure = AggregationError(
            f"the aggregator at {address} refused {who}: {refused}",
            remedy=answer.get("remedy") if answer else None,
        )
        failure.admission = bool(answer and answer.get("admission"))
        raise failure
    lines.connection.settimeout(None)
    return lines, answer
