"""The limits on connections, in all and per address, and the connections reserved for probes.

A connection counts from the moment it is accepted, before any TLS handshake, until it is closed.
"""

import ipaddress
from collections import Counter
from collections.abc import Callable, Sequence

from specjax.errors import InputError

RESERVED = 4
"""The number of connections beyond the limit, for probes."""

PROBES = ("/health", "/ping", "/metrics")
"""The paths that the reserved connections may request."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ConnectionPlace:
    """The place of one connection within the limits.

    Attributes:
        refusal: why only probes are answered; empty: all requests are.
        has_no_request: whether no request has arrived yet.
    """

    def __init__(self, places: "Places", owner: Network | None, refusal: str) -> None:
        self.refusal, self.has_no_request = refusal, True
        self._places, self._owner, self._is_closed = places, owner, False
        self._give_way: Callable[[], None] | None = None

    def on_give_way(self, give_way: Callable[[], None]) -> None:
        """Set the function that closes the connection if another one needs its place."""
        self._give_way = give_way

    def give_way(self) -> None:
        """Leave the place to another connection, and close this one."""
        self.leave()
        if self._give_way is not None:
            self._give_way()

    def leave(self) -> None:
        """Note that the connection is closed. Further calls have no effect."""
        if not self._is_closed:
            self._is_closed = True
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
        """Start without connections.

        Args:
            max_connections: the largest number of connections. One address may have a quarter.
            trusted: addresses or networks without a limit of their own, such as proxies.

        Raises:
            InputError: A trusted name is not an address or network.
        """
        self._max_connections, self._max_of_address = max_connections, -(-max_connections // 4)
        self._trusted = networks(trusted)
        self._count, self._of = 0, Counter[Network]()
        self._reserved: list[ConnectionPlace] = []  # the oldest first

    def take(self, address: str) -> ConnectionPlace:
        """Return the place of a new connection from ``address``; empty: the address is unknown.

        Beyond the limits the connection gets a reserved place. If all of these are in use, the
        oldest connection there without a request is closed, or else the oldest one.
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
            min(self._reserved, key=lambda reserved: not reserved.has_no_request).give_way()
        self._reserved.append(place)
        return place

    def left(self, place: ConnectionPlace, owner: Network | None) -> None:
        """Free the place of a closed connection. `ConnectionPlace.leave` calls it."""
        if place.refusal:
            self._reserved.remove(place)
            return
        self._count -= 1
        if owner is not None:
            self._of[owner] -= 1
            if not self._of[owner]:
                del self._of[owner]


def network_of(address: str, trusted: Sequence[Network]) -> Network | None:
    """Return the network whose clients share a limit with the one at ``address``.

    None: the client has no such limit, because its address is unknown or ``trusted``.

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
    # A subscriber of IPv6 usually has a whole /64 network of addresses.
    return ipaddress.ip_network((parsed, 64 if parsed.version == 6 else 32), strict=False)


def networks(names: Sequence[str]) -> list[Network]:
    """Return the named networks. An address is a network of its own.

    Raises:
        InputError: A name is not an address or network.

    Examples:
        >>> from specjax.serving.http.places import networks
        >>> networks(["127.0.0.1", "10.0.0.0/8"])
        [IPv4Network('127.0.0.1/32'), IPv4Network('10.0.0.0/8')]
    """
    parsed: list[Network] = []
    for name in names:
        try:
            parsed.append(ipaddress.ip_network(name))
        except ValueError as error:
            raise InputError(
                f"trusted_proxy={name!r}: {error}; give an address such as 10.0.0.7, or a network"
                " such as 10.0.0.0/8"
            ) from None
    return parsed
