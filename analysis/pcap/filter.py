"""Filters in tcpdump's language, as far as conversations can decide them.

The language is that of pcap-filter(7): ``and`` and ``or`` have equal precedence and associate from the left, ``not``
binds tighter, and a name or number after ``and`` or ``or`` takes the qualifiers of the last primitive
(``port 80 or 443``). Filters look at one direction of a conversation at a time, so that ``src host A`` accepts what A
sends.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ringtap.analysis.pcap.layout import (
    ARP,
    ARP_CUT,
    NO_ADDRESSES,
    NO_PORTS,
    PORTS_CUT,
    RARP,
    RARP_CUT,
    ROCE,
    TARGET_PORT_CUT,
    is_ip,
)
from ringtap.errors import UsageError

Mask = npt.NDArray[np.bool_]

_TOKEN = re.compile(r"\s*(&&|\|\||[()!]|[\w.:/\\-]+|\S)", re.ASCII)
_WITH_PORTS = {"tcp": 6, "udp": 17}
_PROTOCOLS = {**_WITH_PORTS, "icmp": 1, "icmp6": 58, "sctp": 132}
_PROTOCOLS |= {"igmp": 2, "esp": 50, "ah": 51, "pim": 103, "vrrp": 112, "carp": 112}
_OF_ONE_FAMILY = {"icmp": 4, "igmp": 4, "vrrp": 4, "carp": 4, "icmp6": 6}
_FAMILIES = {"ip": 4, "ip6": 6}
_ADDRESSED = {"arp": (ARP, ARP_CUT), "rarp": (RARP, RARP_CUT)}
_NAMES = (*_PROTOCOLS, *_FAMILIES, *_ADDRESSED, "roce")
_TYPES = ("host", "net", "port", "portrange", "proto")
_SIDES = ("src", "dst")
_LINKS = {"and": "and", "&&": "and", "or": "or", "||": "or"}
_NOTS = ("not", "!")
_WORDS = {*_NAMES, *_TYPES, *_SIDES, *_LINKS, *_NOTS, "(", ")", "vxlan"}
# words of the language that need the packets themselves
_PACKETS_ONLY = {
    *("ether", "vlan", "mpls", "llc", "stp", "pppoes", "geneve", "wlan", "type", "subtype", "dir"),
    *("gateway", "broadcast", "multicast", "inbound", "outbound", "ifname", "on", "less", "greater", "len"),
    "protochain",
}
_DEEPEST = 200


@dataclass(frozen=True)
class Flows:
    """Flows that a filter decides on, one row per direction of a conversation.

    Attributes:
        protocol: protocol number of the IP header, shape (flows,).
        kind: ``layout.PLAIN``, ``layout.ROCE`` or another kind of `layout`.
        layer: 1 inside a tunnel.
        family: 4, 6 or ``layout.NO_ADDRESSES``; 0 for the row of all conversations beyond the limit.
        ends: addresses of source and destination as two big-endian halves, shape (2, flows, 2).
        ports: ports of source and destination, shape (2, flows).
    """

    protocol: npt.NDArray[np.uint8]
    kind: npt.NDArray[np.uint8]
    layer: npt.NDArray[np.uint8]
    family: npt.NDArray[np.uint8]
    ends: npt.NDArray[np.uint64]
    ports: npt.NDArray[np.uint16]

    @classmethod
    def of(cls, conversations: npt.NDArray[Any]) -> Flows:
        """Return the flows of rows of ``layout.CONVERSATION``."""
        both = [np.ascontiguousarray(conversations[name]).view(">u8").reshape(-1, 2) for name in ("a", "b")]
        ends = np.stack([np.stack(both, 1).reshape(-1, 2), np.stack(both[::-1], 1).reshape(-1, 2)]).astype(np.uint64)
        a, b = conversations["a_port"], conversations["b_port"]
        ports = np.stack([np.stack([a, b], 1).reshape(-1), np.stack([b, a], 1).reshape(-1)])
        protocol, kind, layer, family = (
            np.repeat(conversations[name], 2) for name in ("protocol", "kind", "layer", "family")
        )
        return cls(protocol, kind, layer, family, ends, ports)

    @property
    def is_ip(self) -> Mask:
        """Mask of the flows whose packets are IP."""
        return is_ip(self.kind)


@dataclass(frozen=True)
class _Judged:
    """Verdict of a part of a filter on each flow, evaluated from left to right until it is decided.

    As in tcpdump, the whole filter refuses a packet, even within ``not``, if it has to look at bytes that the capture
    cut off.

    Attributes:
        takes: mask of the flows that match, shape (flows,).
        refuses: mask of the flows refused for bytes that were cut off, shape (flows,); disjoint from ``takes``.
    """

    takes: Mask
    refuses: Mask

    @classmethod
    def of(cls, takes: Mask) -> _Judged:
        """Return the verdict of a test that needs no bytes that may have been cut off."""
        return cls(np.asarray(takes), np.zeros(len(takes), bool))

    def __and__(self, other: _Judged) -> _Judged:
        return _Judged(self.takes & other.takes, self.refuses | (self.takes & other.refuses))

    def __or__(self, other: _Judged) -> _Judged:
        undecided = ~self.takes & ~self.refuses
        return _Judged(self.takes | (undecided & other.takes), self.refuses | (undecided & other.refuses))

    def __invert__(self) -> _Judged:
        return _Judged(~self.takes & ~self.refuses, self.refuses)


def matches(words: str, conversations: npt.NDArray[Any]) -> Mask:
    """Return a mask of the flows that a filter accepts.

    Args:
        words: the filter; it may begin with ``vxlan and`` to match inside tunnels.
        conversations: rows of ``layout.CONVERSATION``.

    Returns:
        One value per flow, shape (2 * rows,).

    Raises:
        UsageError: the filter is wrong, or needs single packets.
    """
    return _Parser(words, Flows.of(conversations)).whole()


@dataclass(frozen=True)
class _Head:
    """Qualifiers before a name or number, such as ``tcp src port``."""

    name: str | None
    side: str
    type: str


class _Parser:
    def __init__(self, words: str, flows: Flows) -> None:
        self._text, self._flows = words, flows
        self._tokens = _TOKEN.findall(words)
        self._at = 0
        self._depth = 0
        for token in self._tokens:
            if token.lower() in _PACKETS_ONLY or (token not in _WORDS and not re.match(r"[\w.:/\\-]", token, re.ASCII)):
                raise UsageError(
                    f"{token!r} in the filter {words!r} cannot be told from conversations: "
                    f"write those packets to a file first, with tcpdump -r FILE -w PART '…', and read that"
                )

    def whole(self) -> Mask:
        layer = 0
        if not self._tokens:
            self._wrong("is empty")
        if self._peek() == "vxlan":
            self._at, layer = 1, 1
            if self._peek() in ("and", "&&"):
                self._at += 1
        inside = self._flows.layer == layer
        if layer and self._peek() is None:
            return np.asarray(inside)
        found, _ = self._expression()
        if self._peek() is not None:
            self._wrong(f"is not understood from {self._peek()!r} on")
        return np.asarray(found.takes & inside & (self._flows.family != 0))

    def _peek(self, ahead: int = 0) -> str | None:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else None

    def _wrong(self, what: str) -> NoReturn:
        raise UsageError(f"the filter {self._text!r} {what}; an example: 'src host 10.0.0.1 and tcp port 5001'")

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            self._wrong(f"is nested more than {_DEEPEST} deep")

    def _expression(self) -> tuple[_Judged, _Head | None]:
        """Parse terms joined from left to right; return the verdict, and the head that a name after them would take."""
        found, head = self._term()
        while (link := _LINKS.get(self._peek() or "")) is not None:
            self._at += 1
            if self._is_value():
                if head is None:
                    self._wrong(
                        f"has {self._peek()!r} with nothing that says what it is: write host, net or port before it"
                    )
                more = self._value(head)
            else:
                more, head = self._term()
            found = found & more if link == "and" else found | more
        return found, head

    def _is_value(self) -> bool:
        """True if a name or number follows, maybe in parentheses or negated."""
        ahead = 0
        while self._peek(ahead) in ("(", *_NOTS):
            ahead += 1
        token = self._peek(ahead)
        return token is not None and token not in _WORDS

    def _term(self) -> tuple[_Judged, _Head | None]:
        token = self._peek()
        if token in _NOTS:
            self._at += 1
            self._deeper()
            found, head = self._term()
            self._depth -= 1
            return ~found, head
        if token == "(" and not self._is_value():
            self._at += 1
            self._deeper()
            found, _ = self._expression()
            self._depth -= 1
            self._close()
            return found, None
        head = self._head()
        if head is None:
            return _Judged.of(self._protocol(str(self._tokens[self._at - 1]))), None
        return self._value(head), head

    def _close(self) -> None:
        if self._peek() != ")":
            self._wrong("lacks a closing parenthesis")
        self._at += 1

    def _head(self) -> _Head | None:
        """Parse the qualifiers that begin a primitive; None for a protocol's name alone."""
        name: str | None = None
        side, kind = "either", ""
        if self._peek() in _NAMES:
            name = self._tokens[self._at]
            self._at += 1
        if self._peek() in _SIDES:
            side = self._side()
        if self._peek() in _TYPES:
            kind = self._tokens[self._at]
            self._at += 1
        if not kind and side == "either":
            if name is None:
                self._wrong("ends too early" if self._peek() is None else f"is not understood from {self._peek()!r} on")
            if self._is_value() and self._peek() not in ("(", *_NOTS):
                self._wrong(f"lacks 'host', 'net' or 'port' before {self._peek()!r}")
            return None
        head = _Head(name, side, kind or "host")
        self._check(head)
        return head

    def _side(self) -> str:
        first, link, second = (self._peek(ahead) for ahead in range(3))
        if link in _LINKS and second in _SIDES and first != second:
            self._at += 3
            return "either" if _LINKS[link] == "or" else "both"
        self._at += 1
        return str(first)

    def _check(self, head: _Head) -> None:
        allowed: tuple[str, ...] = (*_FAMILIES, *_ADDRESSED)
        if head.type in ("port", "portrange"):
            allowed = tuple(_WITH_PORTS)
        elif head.type == "proto":
            allowed = tuple(_FAMILIES)
        if head.name is not None and head.name not in allowed:
            self._wrong(f"puts {head.name!r} before {head.type!r}, which takes only {', '.join(allowed)}")

    def _value(self, head: _Head) -> _Judged:
        """Parse a name or number after its head, or several of them in parentheses."""
        token = self._peek()
        if token in _NOTS:
            self._at += 1
            self._deeper()
            found = ~self._value(head)
            self._depth -= 1
            return found
        if token == "(":
            self._at += 1
            self._deeper()
            found = self._value(head)
            while (link := _LINKS.get(self._peek() or "")) is not None:
                self._at += 1
                more = self._value(head)
                found = found & more if link == "and" else found | more
            self._depth -= 1
            self._close()
            return found
        if token is None or token in _WORDS:
            self._wrong(f"lacks what comes after {head.type!r}" + (f", before {token!r}" if token else ""))
        self._at += 1
        if head.type == "proto":
            return _Judged.of(self._of_family(head) & (self._flows.protocol == self._protocol_number(token)))
        if head.type in ("port", "portrange"):
            return self._ports(head, token)
        return self._addresses(head, token)

    # --- primitives

    def _protocol(self, name: str) -> Mask:
        flows = self._flows
        if name == "roce":
            return np.asarray(flows.kind == ROCE)
        if name in _FAMILIES or name in _ADDRESSED:
            return self._named(name)
        found = (flows.protocol == _PROTOCOLS[name]) & flows.is_ip
        if name in _OF_ONE_FAMILY:
            found = found & (flows.family == _OF_ONE_FAMILY[name])
        return np.asarray(found)

    def _named(self, name: str) -> Mask:
        """Return a mask of the flows of an address family, or of ARP or RARP."""
        flows = self._flows
        if name in _ADDRESSED:
            return np.isin(flows.kind, _ADDRESSED[name])
        return np.asarray((flows.family == _FAMILIES[name]) & flows.is_ip)

    def _of_family(self, head: _Head) -> Mask:
        return self._flows.is_ip if head.name is None else self._named(head.name)

    def _protocol_number(self, token: str) -> int:
        name = token.removeprefix("\\")
        number = _PROTOCOLS.get(name) if name != token else self._number(token, 255)
        if number is None:
            self._wrong(f"has an unknown protocol {token!r}")
        return number

    def _number(self, token: str, most: int) -> int | None:
        """Parse a number in C notation; None if it is not one."""
        if not re.fullmatch(r"0[xX][0-9a-fA-F]{1,8}|0[0-7]{0,12}|[1-9][0-9]{0,9}", token):
            return None
        base = 16 if token[:2].lower() == "0x" else 8 if token.startswith("0") else 10
        number = int(token, base)
        if number > most:
            self._wrong(f"has {token}, where {most} is the most there is")
        return number

    def _ports(self, head: _Head, token: str) -> _Judged:
        low, _, high = token.partition("-") if head.type == "portrange" else (token, "", token)
        first, last = sorted((self._port(low, head), self._port(high or low, head)))
        numbers = (head.name,) if head.name else tuple(_WITH_PORTS)
        flows = self._flows
        carries = np.isin(flows.protocol, [_WITH_PORTS[name] for name in numbers]) & (flows.kind != NO_PORTS)
        both_cut = carries & (flows.kind == PORTS_CUT)
        cut = (both_cut, both_cut | (carries & (flows.kind == TARGET_PORT_CUT)))
        return self._on(head.side, (flows.ports >= first) & (flows.ports <= last) & carries, cut)

    def _port(self, token: str, head: _Head) -> int:
        number = self._number(token, 65535)
        if number is not None:
            return number
        try:
            return socket.getservbyname(token, *([head.name] if head.name else []))
        except (OSError, ValueError):
            self._wrong(f"has an unknown port {token!r}")

    def _addresses(self, head: _Head, token: str) -> _Judged:
        found = _Judged.of(np.zeros(len(self._flows.family), bool))
        networks = self._networks(head, token)
        if head.name is not None:
            family = _FAMILIES.get(head.name, 4)
            networks = [network for network in networks if network[0] == family]
        if not networks:
            self._wrong(f"has {head.name!r} before {token!r}, which is none")
        for family, value, mask in networks:
            bits = [np.uint64(part) for part in (mask >> 64, mask & (2**64 - 1))]
            want = [np.uint64(part) for part in (value >> 64, value & (2**64 - 1))]
            ends = self._flows.ends
            same = ((ends[..., 0] & bits[0]) == want[0]) & ((ends[..., 1] & bits[1]) == want[1])
            target = np.isin(self._flows.kind, (ARP_CUT, RARP_CUT)) & (family == 4)
            cut = (target & (self._flows.family == NO_ADDRESSES), target)
            found |= self._on(head.side, same & (self._flows.family == family), cut)
        return found if head.name is None else _Judged.of(self._named(head.name)) & found

    def _on(self, side: str, either: Mask, cut: tuple[Mask, Mask]) -> _Judged:
        """Combine the verdicts on source and destination for a side: ``src``, ``dst``, ``either`` or ``both``."""
        source, destination = (_Judged(found & ~gone, gone) for found, gone in zip(either, cut, strict=True))
        if side == "either":
            return source | destination
        if side == "both":
            return source & destination
        return source if side == "src" else destination

    def _networks(self, head: _Head, token: str) -> list[tuple[int, int, int]]:
        """Return the networks of an address, a network or a name: family, and address and mask of 128 bits each."""
        text, slash, length = token.partition("/")
        if slash and head.type != "net":
            self._wrong(f"has a mask in {token!r}: write net before it")
        if self._peek() == "mask" and head.type == "net":
            text_mask = self._peek(1) or ""
            self._at += 2
            return [(4, *self._network(4, _ipv4(text), _ipv4(text_mask), token))]
        if re.fullmatch(r"\d+(\.\d+){0,3}", text):
            octets = text.count(".") + 1
            given = _ipv4(text)
            bits = self._bits(length, 32, token) if slash else 8 * octets
            mask = (2**32 - 1) >> (32 - bits) << (32 - bits)
            return [(4, *self._network(4, given, mask, token))]
        if ":" in text:
            bits = self._bits(length, 128, token) if slash else 128
            try:
                given = int.from_bytes(socket.inet_pton(socket.AF_INET6, text), "big")
            except OSError:
                self._wrong(f"has no IPv6 address in {token!r}")
            return [(6, *self._network(6, given, (2**128 - 1) >> (128 - bits) << (128 - bits), token))]
        if slash or head.type == "net":
            self._wrong(f"has no network in {token!r}")
        return self._host(text)

    def _bits(self, text: str, most: int, token: str) -> int:
        if not text.isdecimal() or int(text[:6]) > most:
            self._wrong(f"has {token!r}, whose mask is not 0 to {most}")
        return int(text)

    def _network(self, family: int, given: int | None, mask: int | None, token: str) -> tuple[int, int]:
        if given is None or mask is None:
            self._wrong(f"has no IPv4 address in {token!r}")
        if given & ~mask:
            self._wrong(f"has bits beyond the mask in {token!r}")
        return (given << 96, mask << 96) if family == 4 else (given, mask)

    def _host(self, name: str) -> list[tuple[int, int, int]]:
        try:
            known = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            self._wrong(f"has an unknown host {name!r}")
        found = []
        for family, *_, address in known:
            packed = socket.inet_pton(family, str(address[0]).partition("%")[0])
            bits = 8 * len(packed)
            value = int.from_bytes(packed.ljust(16, b"\0"), "big")
            found.append((4 if bits == 32 else 6, value, (2**bits - 1) << (128 - bits)))
        return found


def _ipv4(text: str) -> int | None:
    """Parse an IPv4 address, octets that are missing as 0; None if it is not one."""
    octets = text.split(".")
    if len(octets) > 4 or not all(octet.isdecimal() and len(octet) < 4 and int(octet) < 256 for octet in octets):
        return None
    return int.from_bytes(bytes(map(int, octets)).ljust(4, b"\0"), "big")
