"""Selects flows with filters in tcpdump's language, as far as conversations can decide them.

The language is that of pcap-filter(7): ``and`` and ``or`` have equal precedence and associate from the left, ``not``
binds tighter, and a name or number after ``and`` or ``or`` takes the qualifiers of the last primitive
(``port 80 or 443``). Filters look at one direction of a conversation at a time, so that ``src host A`` accepts what A
sends.
"""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyparsing as pp

from ringtap.analysis.pcap import scan_dtypes as dtypes
from ringtap.core.check_api_arguments import instance_of
from ringtap.core.errors import UsageError

Mask = npt.NDArray[np.bool_]

_TOKEN = re.compile(r"\s*([\w.:/\\-]+|[()!]|&&|\|\||)(\S*)", re.ASCII)
_WORD_ENDS = r"(?![\w.:/\\-])"
_WITH_PORTS = {"tcp": 6, "udp": 17}
_PROTOCOLS = {**_WITH_PORTS, "icmp": 1, "icmp6": 58, "sctp": 132}
_PROTOCOLS |= {"igmp": 2, "esp": 50, "ah": 51, "pim": 103, "vrrp": 112, "carp": 112}
_OF_ONE_FAMILY = {"icmp": 4, "igmp": 4, "vrrp": 4, "carp": 4, "icmp6": 6}
_FAMILIES = {"ip": 4, "ip6": 6}
_ADDRESSED = {"arp": (dtypes.ARP, dtypes.ARP_CUT), "rarp": (dtypes.RARP, dtypes.RARP_CUT)}
_NAMES = (*_PROTOCOLS, *_FAMILIES, *_ADDRESSED, "roce")
_TYPES = ("host", "net", "port", "portrange", "proto")
_SIDES = ("src", "dst")
_WORDS = (*_NAMES, *_TYPES, *_SIDES, "and", "or", "not", "vxlan")
# words of the language that need the packets themselves
_PACKETS_ONLY = (
    *("ether", "vlan", "mpls", "llc", "stp", "pppoes", "geneve", "wlan", "type", "subtype", "dir"),
    *("gateway", "broadcast", "multicast", "inbound", "outbound", "ifname", "on", "less", "greater", "len"),
    "protochain",
)
_AND = ("and", "&&")
_BEGINNINGS = "a protocol, host, net, port, portrange or proto"
_FRAMES = 4000  # frames of the interpreter, enough for 200 nested parentheses


@dataclass(frozen=True)
class Flows:
    """Flows to be filtered, one row per direction of a conversation.

    Attributes:
        protocol: protocol number of the IP header, shape (flows,).
        kind: ``PLAIN``, ``ROCE`` or another kind of `scan_dtypes`.
        layer: 1 inside a tunnel.
        family: 4, 6 or ``scan_dtypes.NO_ADDRESSES``; 0 for the row of all conversations beyond the limit.
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
        """Return the flows of rows of ``scan_dtypes.CONVERSATION``."""
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
        return dtypes.is_ip(self.kind)


@dataclass(frozen=True)
class _Verdict:
    """Verdict of a part of a filter on each flow, evaluated from left to right until it is decided.

    As in tcpdump, the whole filter rejects a packet, even within ``not``, if it has to look at bytes that the capture
    cut off.

    Attributes:
        accepts: mask of the flows that match, shape (flows,).
        rejects: mask of the flows rejected for bytes that were cut off, shape (flows,); disjoint from ``accepts``.
    """

    accepts: Mask
    rejects: Mask

    @classmethod
    def of(cls, accepts: Mask) -> _Verdict:
        """Return the verdict of a test that needs no bytes that may have been cut off."""
        return cls(np.asarray(accepts), np.zeros(len(accepts), bool))

    def __and__(self, other: _Verdict) -> _Verdict:
        return _Verdict(self.accepts & other.accepts, self.rejects | (self.accepts & other.rejects))

    def __or__(self, other: _Verdict) -> _Verdict:
        undecided = ~self.accepts & ~self.rejects
        return _Verdict(self.accepts | (undecided & other.accepts), self.rejects | (undecided & other.rejects))

    def __invert__(self) -> _Verdict:
        return _Verdict(~self.accepts & ~self.rejects, self.rejects)


@dataclass(frozen=True)
class _Head:
    """Qualifiers before a name or number, such as ``tcp src port``."""

    name: str | None
    side: str
    type: str


# maps the qualifiers before a part of a filter to its verdict and the qualifiers for a name or number after it
_Part = Callable[["_Primitives", _Head | None], tuple[_Verdict, _Head | None]]


def _negated(found: pp.ParseResults) -> _Part:
    def part(primitives: _Primitives, head: _Head | None) -> tuple[_Verdict, _Head | None]:
        verdict, head = found[-1](primitives, head)
        return ~verdict, head

    return part


def _joined(found: pp.ParseResults) -> _Part:
    """Join parts from left to right."""
    first, *rest = found

    def part(primitives: _Primitives, head: _Head | None) -> tuple[_Verdict, _Head | None]:
        verdict, head = first(primitives, head)
        for link, following in zip(rest[::2], rest[1::2], strict=True):
            more, head = following(primitives, head)
            verdict = verdict & more if link in _AND else verdict | more
        return verdict, head

    return part


@cache
def _grammar() -> pp.ParserElement:
    """Return the grammar of filters; it yields True for a leading ``vxlan``, else False, and the expression's parts."""

    def word(*words: str, signs: str = "") -> pp.ParserElement:
        return pp.Regex(f"(?:{'|'.join(words)}){_WORD_ENDS}{signs}", re.ASCII)

    link, negation = word("and", "or", signs=r"|&&|\|\|"), word("not", signs="|!")
    opened, closed = pp.Suppress("("), pp.Suppress(")").set_name("a closing parenthesis")
    reserved = rf"(?!(?:{'|'.join(_WORDS)}|(?i:{'|'.join(_PACKETS_ONLY)})){_WORD_ENDS})"
    text = pp.Regex(rf"{reserved}[\w.:/\\-]+", re.ASCII).set_name("a name or a number")
    value, term, values, terms = (pp.Forward() for _ in range(4))

    masked = text + pp.Opt(pp.Suppress(word("mask")) - text)
    masked.set_parse_action(lambda found: lambda primitives, head: (primitives.value(head, *found), head))
    negated_value = (negation + value).set_parse_action(_negated)
    value <<= (masked | negated_value | opened + values + closed).set_name("a name or a number")
    values <<= (value + (link - value)[...]).set_parse_action(_joined)

    both_sides = word("src") + link + word("dst") | word("dst") + link + word("src")
    both_sides.set_parse_action(lambda found: "both" if found[1] in _AND else "either")
    side = both_sides | word(*_SIDES)
    name, kind = word(*_NAMES), word(*_TYPES)
    head = pp.Opt(name, None) + (side + pp.Opt(kind, "host") | pp.Empty().set_parse_action(lambda: "either") + kind)
    head.set_parse_action(lambda found: _Head(*found))
    qualified = (head - value).set_parse_action(lambda found: lambda primitives, _: found[1](primitives, found[0]))
    protocol = name.copy().add_parse_action(lambda found: lambda primitives, _: (primitives.protocol(found[0]), None))
    inner = (opened + terms + closed).set_parse_action(
        lambda found: lambda primitives, _: (found[0](primitives, None)[0], None)
    )
    negated_term = (negation + term).set_parse_action(_negated)
    term <<= (qualified | protocol | negated_term | inner).set_name(_BEGINNINGS)
    terms <<= (term + (link - (value | term))[...]).set_parse_action(_joined)
    tunnel = pp.Opt(word("vxlan").set_parse_action(lambda: True) + pp.Suppress(pp.Opt(word("and", signs="|&&"))), False)
    return tunnel + (pp.StringEnd() | terms + pp.StringEnd().set_name("'and' or 'or'")).set_name(_BEGINNINGS)


def matches(words: str, conversations: npt.NDArray[Any]) -> Mask:
    """Return a mask of the flows that a filter accepts.

    Args:
        words: the filter; it may begin with ``vxlan and`` to match inside tunnels.
        conversations: rows of ``scan_dtypes.CONVERSATION``.

    Returns:
        One value per flow, shape (2 * rows,).

    Raises:
        UsageError: the filter is wrong, or needs single packets.
    """
    primitives = _Primitives(words, Flows.of(conversations))
    if not instance_of(words, str, "the filter").strip():
        primitives.wrong("is empty")
    most = sys.getrecursionlimit()
    sys.setrecursionlimit(most + _FRAMES)
    try:
        inside, *parts = _grammar().parse_with_tabs().parse_string(words)
        mask = primitives.flows.layer == int(inside)
        for part in parts:
            mask = mask & part(primitives, None)[0].accepts & (primitives.flows.family != 0)
        return np.asarray(mask)
    except pp.ParseBaseException as error:
        primitives.explain(error)
    except RecursionError:
        primitives.wrong("is nested too deep")
    finally:
        sys.setrecursionlimit(most)


class _Primitives:
    """Primitives of a filter, tested on flows.

    Args:
        words: the whole filter, for messages.
        flows: the flows.
    """

    def __init__(self, words: str, flows: Flows) -> None:
        self._text, self.flows = words, flows

    def wrong(self, what: str) -> NoReturn:
        """Raise an error about the filter."""
        raise UsageError(f"the filter {self._text!r} {what}; an example: 'src host 10.0.0.1 and tcp port 5001'")

    def explain(self, error: pp.ParseBaseException) -> NoReturn:
        """Raise an error about the place at which the grammar does not match."""
        found = _TOKEN.match(self._text, error.loc)
        assert found is not None
        token = found[1] or found[2]
        if (token and not found[1]) or token.lower() in _PACKETS_ONLY:
            raise UsageError(
                f"{token!r} in the filter {self._text!r} needs single packets, which conversations do not hold: "
                f"write those packets to a file first, with tcpdump -r FILE -w PART '…', and read that"
            )
        where = f"is not understood from {token!r} on, at character {found.start(1) + 1}" if token else "ends too early"
        self.wrong(f"{where}: {error.msg[:1].lower()}{error.msg[1:]}")

    def protocol(self, name: str) -> _Verdict:
        """Test for a protocol."""
        flows = self.flows
        if name == "roce":
            return _Verdict.of(flows.kind == dtypes.ROCE)
        if name in _FAMILIES or name in _ADDRESSED:
            return _Verdict.of(self._named(name))
        found = (flows.protocol == _PROTOCOLS[name]) & flows.is_ip
        if name in _OF_ONE_FAMILY:
            found = found & (flows.family == _OF_ONE_FAMILY[name])
        return _Verdict.of(found)

    def value(self, head: _Head | None, token: str, mask: str | None = None) -> _Verdict:
        """Test for a name or number, with the qualifiers before it."""
        if head is None:
            self.wrong(f"has {token!r} with nothing that says what it is: write host, net or port before it")
        allowed: tuple[str, ...] = (*_FAMILIES, *_ADDRESSED)
        if head.type in ("port", "portrange"):
            allowed = tuple(_WITH_PORTS)
        elif head.type == "proto":
            allowed = tuple(_FAMILIES)
        if head.name is not None and head.name not in allowed:
            self.wrong(f"puts {head.name!r} before {head.type!r}, which takes only {', '.join(allowed)}")
        if mask is not None and head.type != "net":
            self.wrong(f"has a mask after {token!r}: write net before it")
        if head.type == "proto":
            family = self.flows.is_ip if head.name is None else self._named(head.name)
            return _Verdict.of(family & (self.flows.protocol == self._protocol_number(token)))
        return self._ports(head, token) if head.type in ("port", "portrange") else self._addresses(head, token, mask)

    def _named(self, name: str) -> Mask:
        """Return a mask of the flows of an address family, or of ARP or RARP."""
        flows = self.flows
        if name in _ADDRESSED:
            return np.isin(flows.kind, _ADDRESSED[name])
        return np.asarray((flows.family == _FAMILIES[name]) & flows.is_ip)

    def _protocol_number(self, token: str) -> int:
        name = token.removeprefix("\\")
        number = _PROTOCOLS.get(name) if name != token else self._number(token, 255)
        if number is None:
            self.wrong(f"has an unknown protocol {token!r}")
        return number

    def _number(self, token: str, most: int) -> int | None:
        """Parse a number in C notation; None if it is not one."""
        if not re.fullmatch(r"0[xX][0-9a-fA-F]{1,8}|0[0-7]{0,12}|[1-9][0-9]{0,9}", token):
            return None
        base = 16 if token[:2].lower() == "0x" else 8 if token.startswith("0") else 10
        number = int(token, base)
        if number > most:
            self.wrong(f"has {token}, but {most} is the largest possible number")
        return number

    def _ports(self, head: _Head, token: str) -> _Verdict:
        low, _, high = token.partition("-") if head.type == "portrange" else (token, "", token)
        first, last = sorted((self._port(low, head), self._port(high or low, head)))
        numbers = (head.name,) if head.name else tuple(_WITH_PORTS)
        flows = self.flows
        carries = np.isin(flows.protocol, [_WITH_PORTS[name] for name in numbers]) & (flows.kind != dtypes.NO_PORTS)
        both_cut = carries & (flows.kind == dtypes.PORTS_CUT)
        cut = (both_cut, both_cut | (carries & (flows.kind == dtypes.TARGET_PORT_CUT)))
        return self._on(head.side, (flows.ports >= first) & (flows.ports <= last) & carries, cut)

    def _port(self, token: str, head: _Head) -> int:
        number = self._number(token, 65535)
        if number is not None:
            return number
        try:
            return socket.getservbyname(token, *([head.name] if head.name else []))
        except (OSError, ValueError):
            self.wrong(f"has an unknown port {token!r}")

    def _addresses(self, head: _Head, token: str, given_mask: str | None) -> _Verdict:
        found = _Verdict.of(np.zeros(len(self.flows.family), bool))
        networks = self._networks(head, token, given_mask)
        if head.name is not None:
            family = _FAMILIES.get(head.name, 4)
            networks = [network for network in networks if network[0] == family]
        if not networks:
            self.wrong(f"has {head.name!r} before {token!r}, which has no such address")
        for family, value, mask in networks:
            bits = [np.uint64(part) for part in (mask >> 64, mask & (2**64 - 1))]
            want = [np.uint64(part) for part in (value >> 64, value & (2**64 - 1))]
            ends = self.flows.ends
            same = ((ends[..., 0] & bits[0]) == want[0]) & ((ends[..., 1] & bits[1]) == want[1])
            target = np.isin(self.flows.kind, (dtypes.ARP_CUT, dtypes.RARP_CUT)) & (family == 4)
            cut = (target & (self.flows.family == dtypes.NO_ADDRESSES), target)
            found |= self._on(head.side, same & (self.flows.family == family), cut)
        return found if head.name is None else _Verdict.of(self._named(head.name)) & found

    def _on(self, side: str, either: Mask, cut: tuple[Mask, Mask]) -> _Verdict:
        """Combine the verdicts on source and destination for a side: ``src``, ``dst``, ``either`` or ``both``."""
        source, destination = (_Verdict(found & ~gone, gone) for found, gone in zip(either, cut, strict=True))
        if side == "either":
            return source | destination
        if side == "both":
            return source & destination
        return source if side == "src" else destination

    def _networks(self, head: _Head, token: str, given_mask: str | None) -> list[tuple[int, int, int]]:
        """Return the networks of an address, a network or a name: family, and address and mask of 128 bits each."""
        text, slash, length = token.partition("/")
        if slash and head.type != "net":
            self.wrong(f"has a mask in {token!r}: write net before it")
        if given_mask is not None:
            return [(4, *self._network(4, _ipv4(text), _ipv4(given_mask), token))]
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
                self.wrong(f"has no IPv6 address in {token!r}")
            return [(6, *self._network(6, given, (2**128 - 1) >> (128 - bits) << (128 - bits), token))]
        if slash or head.type == "net":
            self.wrong(f"has no network in {token!r}")
        return self._host(text)

    def _bits(self, text: str, most: int, token: str) -> int:
        if not text.isdecimal() or int(text[:6]) > most:
            self.wrong(f"has {token!r}, whose mask is not 0 to {most}")
        return int(text)

    def _network(self, family: int, given: int | None, mask: int | None, token: str) -> tuple[int, int]:
        if given is None or mask is None:
            self.wrong(f"has no IPv4 address in {token!r}")
        if given & ~mask:
            self.wrong(f"has bits beyond the mask in {token!r}")
        return (given << 96, mask << 96) if family == 4 else (given, mask)

    def _host(self, name: str) -> list[tuple[int, int, int]]:
        try:
            known = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            self.wrong(f"has an unknown host {name!r}")
        found = []
        for family, *_, address in known:
            packed = socket.inet_pton(family, str(address[0]).partition("%")[0])
            bits = 8 * len(packed)
            value = int.from_bytes(packed.ljust(16, b"\0"), "big")
            found.append((4 if bits == 32 else 6, value, (2**bits - 1) << (128 - bits)))
        return found


def _ipv4(text: str) -> int | None:
    """Parse an IPv4 address, with 0 for missing octets; None if it is not one."""
    octets = text.split(".")
    if len(octets) > 4 or not all(octet.isdecimal() and len(octet) < 4 and int(octet) < 256 for octet in octets):
        return None
    return int.from_bytes(bytes(map(int, octets)).ljust(4, b"\0"), "big")
