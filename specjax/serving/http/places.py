"""How many connections there are, of whom, and what is kept for those who ask how the server is.

A connection is counted from the moment in which it is accepted, before any handshake of TLS, until its file is closed.
"""

import ipaddress
from collections import Counter
from collections.abc import Callable, Sequence

from specjax.errors import InputError

RESERVED = 4
"""Connections beyond the limit, for probes."""

PROBES = ("/health", "/metrics")
"""Paths that these may ask for."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ConnectionPlace:
    """A connection, as it is counted.

    Attributes:
        refusal: why nothing but a probe is answered; empty: everything is.
        is_silent: no request has come yet.
    """

    def __init__(self, places: "Places", owner: Network | None, refusal: str) -> None:
        self.refusal, self.is_silent = refusal, True
        self._places, self._owner, self._is_left = places, owner, False
        self._give_way: Callable[[], None] | None = None

    def on_give_way(self, give_way: Callable[[], None]) -> None:
        """Have ``give_way`` close the connection where another one needs its place."""
        self._give_way = give_way

    def give_way(self) -> None:
        """Another connection has this place now."""
        self.leave()
        if self._give_way is not None:
            self._give_way()

    def leave(self) -> None:
        """The connection is closed. A second time it changes nothing."""
        if not self._is_left:
            self._is_left = True
            self._places.left(self, self._owner)


class Places:
    """The connections of one server.

    Examples:
        >>> from specjax.serving.http.places import Places
        >>> places = Places(4)
        >>> [bool(places.take("10.0.0.1").refusal) for _ in range(2)]  # a quarter of them
        [False, True]
    """

    def __init__(self, max_connections: int, trusted: Sequence[str] = ()) -> None:
        """No connections yet.

        Args:
            max_connections: at a time. A quarter of them may be of one address.
            trusted: addresses, or networks, of which all may be: proxies, behind which there are many clients.

        Raises:
            InputError: what is trusted is no address.
        """
        self._max_connections, self._max_of_address = max_connections, -(-max_connections // 4)
        self._trusted = networks(trusted)
        self._count, self._of = 0, Counter[Network]()
        self._reserved: list[ConnectionPlace] = []  # the oldest first

    def take(self, address: str) -> ConnectionPlace:
        """Count a connection from ``address``; empty: nobody knows whence.

        Beyond the limits it has one of the reserved places. Are these taken, the oldest connection there that has asked for
        nothing gives way, and if all have asked, the oldest.
        """
        owner = network_of(address, self._trusted)
        refusal = ""
        if self._count >= self._max_connections:
            refusal = "too many connections; try again later"
        elif owner is not None and self._of[owner] >= self._max_of_address:
            refusal = "too many connections from this address; close some, or try again later"
        place = ConnectionPlace(self, owner, refusal)
        if not refusal:
            self._count += 1
            if owner is not None:
                self._of[owner] += 1
            return place
        if len(self._reserved) >= RESERVED:
            min(self._reserved, key=lambda each: not each.is_silent).give_way()
        self._reserved.append(place)
        return place

    def left(self, place: ConnectionPlace, owner: Network | None) -> None:
        """A connection is closed: `ConnectionPlace.leave` says so."""
        if place.refusal:
            self._reserved.remove(place)
            return
        self._count -= 1
        if owner is not None:
            self._of[owner] -= 1
            if not self._of[owner]:
                del self._of[owner]


def network_of(address: str, trusted: Sequence[Network]) -> Network | None:
    """The network whose clients are counted together with the one at an ``address``; None: they are not counted, for nobody
    knows whence they come, or it is ``trusted``.

    Examples:
        >>> from specjax.serving.http.places import network_of, networks
        >>> str(network_of("2001:db8::5", ())), network_of("10.0.0.1", networks(["10.0.0.0/8"]))
        ('2001:db8::/64', None)
    """
    if not address:
        return None
    parsed = ipaddress.ip_address(address.partition("%")[0])
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    if any(parsed in network for network in trusted):
        return None
    # Who has IPv6 has 64 bits of addresses.
    return ipaddress.ip_network((parsed, 64 if parsed.version == 6 else 32), strict=False)


def networks(names: Sequence[str]) -> list[Network]:
    """The networks that are named, an address being one of its own.

    Raises:
        InputError: one of the names is none.

    Examples:
        >>> from specjax.serving.http.places import networks
        >>> networks(["127.0.0.1", "10.0.0.0/8"])
        [IPv4Network('127.0.0.1/32'), IPv4Network('10.0.0.0/8')]
    """
    found: list[Network] = []
    for name in names:
        try:
            found.append(ipaddress.ip_network(name))
        except ValueError as error:
            raise InputError(
                f"trusted_proxy={name!r}: {error}; give an address such as 10.0.0.7, or a network such as 10.0.0.0/8"
            ) from None
    return found
