"""Which layers to replace together, chosen on one text and measured on another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phistate.audit.interventions import Price

Prices = Mapping[int, Mapping[str, Price]]
"""Layer index → candidate label → what replacing that one layer costs."""

CHEAPEST = "cheapest of all"
CHEAPEST_MAP = "cheapest map"


@dataclass(frozen=True)
class Plan:
    """Layers replaced together, each by a candidate."""

    name: str
    """A candidate's label, or the rule by which each layer got its own."""
    replaced: Mapping[int, str]
    """Layer index → candidate label, the cheapest first."""
    expected: float
    """The sum of the single prices, on the text used for choosing."""


@dataclass(frozen=True)
class MeasuredPlan:
    """A plan and what it costs on text it was not chosen on."""

    plan: Plan
    price: Price


def counts(layers: int) -> list[int]:
    """1, 2, 4, … and all.

    Example:
        >>> counts(30)
        [1, 2, 4, 8, 16, 30]
    """
    powers = [2**n for n in range(layers.bit_length()) if 2**n < layers]
    return [*powers, layers]


def cumulative(prices: Prices, baselines: Sequence[str]) -> list[Plan]:
    """The n cheapest layers by each candidate, by each layer's cheapest one, and by its cheapest linear map.

    Args:
        prices: measured on the text used for choosing.
        baselines: labels that are no linear maps.
    """
    labels = list(next(iter(prices.values())))
    maps = [label for label in labels if label not in baselines]
    rules: list[tuple[str, list[str]]] = [(label, [label]) for label in labels]
    if len(maps) > 1:
        rules.append((CHEAPEST_MAP, maps))
    if len(labels) > max(1, len(maps)):
        rules.append((CHEAPEST, labels))
    return [
        _plan(name, _ranked(prices, taken)[:count], prices) for name, taken in rules for count in counts(len(prices))
    ]


def under(prices: Prices, labels: Sequence[str], threshold: float, name: str) -> Plan:
    """Every layer that one of ``labels`` replaces for less than ``threshold`` nats, each by its cheapest."""
    cheap = [(layer, label) for layer, label in _ranked(prices, labels) if prices[layer][label].cost < threshold]
    return _plan(name, cheap, prices)


def measure(
    plans: Sequence[Plan], price: Callable[[Mapping[int, str]], Price], step: Callable[[], None]
) -> list[MeasuredPlan]:
    """Each plan's price; plans that replace the same layers alike are measured once.

    Args:
        plans: what to measure.
        price: the price of replacing layers by candidates, on text not used for choosing.
        step: called after each plan.
    """
    known: dict[frozenset[tuple[int, str]], Price] = {}
    measured = []
    for plan in plans:
        key = frozenset(plan.replaced.items())
        if key not in known:
            known[key] = price(plan.replaced)
        measured.append(MeasuredPlan(plan, known[key]))
        step()
    return measured


def _ranked(prices: Prices, labels: Sequence[str]) -> list[tuple[int, str]]:
    """Each layer with the cheapest of ``labels``, the cheapest layer first; ties by layer, then as given."""
    best = {layer: min(labels, key=lambda label: of_layer[label].cost) for layer, of_layer in prices.items()}
    return sorted(best.items(), key=lambda item: (prices[item[0]][item[1]].cost, item[0]))


def _plan(name: str, chosen: Sequence[tuple[int, str]], prices: Prices) -> Plan:
    return Plan(name, dict(chosen), sum(prices[layer][label].cost for layer, label in chosen))
