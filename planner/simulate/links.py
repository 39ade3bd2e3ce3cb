"""Transfers that share links at flow level: every flow has one rate on its whole route, and the
rates are max-min fair (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2).

A rate changes only when a flow starts or ends that it shares links with, directly or through
others; rates of flows that share no link are never looked at again.
"""

from collections.abc import Collection, Mapping, Sequence


def fair_rates(routes: Mapping[int, Sequence[int]], widths: Sequence[float]) -> dict[int, float]:
    """Max-min fair rates by progressive filling: the link with the smallest share per flow gives
    that share to all its flows, which then take it from their other links, and so on.

    Args:
        routes: per flow, the links that it takes, at least one.
        widths: per link, its bandwidth in bytes/s.

    Returns:
        per flow, its rate in bytes/s.

    Two flows share link 0, of which one goes on over the narrower link 1:

    >>> fair_rates({7: (0,), 8: (0, 1)}, (10.0, 2.0))
    {8: 2.0, 7: 8.0}
    """
    flows_on: dict[int, set[int]] = {}
    for flow, route in routes.items():
        for link in route:
            flows_on.setdefault(link, set()).add(flow)
    left = {link: widths[link] for link in flows_on}
    rates: dict[int, float] = {}
    while flows_on:
        rate, link = min((left[link] / len(flows), link) for link, flows in flows_on.items())
        for flow in sorted(flows_on[link]):
            rates[flow] = rate
            for taken in routes[flow]:
                left[taken] -= rate
                flows_on[taken].remove(flow)
        flows_on = {link: flows for link, flows in flows_on.items() if flows}
    return rates


class Links:
    """The links of a topology and the flows that are on them now.

    A flow is an integer that the caller chooses; rates are in bytes/s.
    """

    def __init__(self, widths: Sequence[float]) -> None:
        self._widths = widths
        self._routes: dict[int, Sequence[int]] = {}
        self._flows_on: list[set[int]] = [set() for _ in widths]
        self._touched: dict[int, None] = {}

    def add(self, flow: int, route: Sequence[int]) -> None:
        """Puts a flow on its links."""
        self._routes[flow] = route
        for link in route:
            self._flows_on[link].add(flow)
        self._touched[flow] = None

    def remove(self, flow: int) -> None:
        """Takes a flow off its links."""
        self._touched.pop(flow, None)
        for link in self._routes.pop(flow):
            flows = self._flows_on[link]
            flows.remove(flow)
            if flows:
                # One will do: the others on the link are found from it.
                self._touched[min(flows)] = None

    @property
    def stale(self) -> bool:
        """Whether flows came or went since the rates were last asked for."""
        return bool(self._touched)

    def new_rates(self) -> dict[int, float]:
        """Rates of all flows that may have another one since this was last asked for."""
        rates: dict[int, float] = {}
        for flow in self._touched:
            if flow not in rates:
                rates |= self._rates_around(flow)
        self._touched.clear()
        return rates

    def _rates_around(self, flow: int) -> dict[int, float]:
        route = self._routes[flow]
        if all(len(self._flows_on[link]) == 1 for link in route):
            return {flow: min(self._widths[link] for link in route)}
        return fair_rates({one: self._routes[one] for one in self._coupled(flow)}, self._widths)

    def _coupled(self, flow: int) -> Collection[int]:
        """The flow and all that share links with it, directly or through others, ascending."""
        found, reached, ahead = {flow}, set(), [flow]
        while ahead:
            for link in self._routes[ahead.pop()]:
                if link not in reached:
                    reached.add(link)
                    ahead += self._flows_on[link] - found
                    found |= self._flows_on[link]
        return sorted(found)
