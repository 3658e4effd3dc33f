"""How much each address may use: lines `address NETWORK QUOTA…` of the users file."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import msgspec

from qb.core.rights.principals import Quotas

ALL = "*"
OF_ADDRESSES = ("rate", "connections", "in_flight")  # an address makes nothing that stays: a user does
UNLIMITED = Quotas()


class AddressQuotas(msgspec.Struct, frozen=True):
    """What each address in a network may use."""

    network: str  # an address, a network, or `*`: each address that is not loopback
    quotas: Quotas

    @property
    def parsed(self) -> IPv4Network | IPv6Network | None:
        """The network; None is `*`. Raises ValueError."""
        return None if self.network == ALL else ip_network(self.network)


def source_of(host: str) -> tuple[str, bool]:
    """Return what counts as one address, and whether it is loopback. A network of IPv6 (/64) is one."""
    address = ip_address(host)
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return source_of(str(address.ipv4_mapped))
        if not address.is_loopback:
            return f"{IPv6Address(int(address) >> 64 << 64)}/64", False
    return str(address), address.is_loopback


def quotas_of(lines: Iterable[AddressQuotas], source: str) -> Quotas:
    """Return what one source_of() may use: what its narrowest network says."""
    address = ip_address(source.partition("/")[0])
    best, found = -2, UNLIMITED
    for line in lines:
        network = line.parsed
        if network is None:
            narrow, covers = -1, not address.is_loopback
        else:
            narrow, covers = network.prefixlen, address.version == network.version and address in network
        if covers and narrow > best:
            best, found = narrow, line.quotas
    return found
