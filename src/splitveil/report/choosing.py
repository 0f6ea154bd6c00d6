"""Which rows of a comparison are shown, in which order, and in which columns."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import eq, ge, gt, itemgetter, le, lt, ne

from splitveil.errors import ConfigError, unknown
from splitveil.report.published import Published, reported
from splitveil.report.quantities import Quantity, find_quantity
from splitveil.report.rows import Found, Group

SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": le, ">=": ge, "!=": ne, "==": eq, "=": eq, "<": lt, ">": gt,
}  # fmt: skip
_FILTER = re.compile(rf"\s*([\w-]*)\s*({'|'.join(SIGNS)})\s*(.*?)\s*")
_AND = re.compile(r"\s+and\s+")


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A condition on rows: a number against the row's mean, or a text that may hold `*`."""

    quantity: Quantity
    sign: str
    value: float | str

    def __str__(self) -> str:
        shown = f"{self.value:g}" if isinstance(self.value, float) else self.value
        return f"{self.quantity.key} {self.sign} {shown}"

    def allows(self, group: Group, said: Published | None = None) -> bool:
        """Whether a row fulfils it; a row without the number does not.

        A text is equal if it is so in all records of the row, and different if it is in all.
        """
        if isinstance(self.value, float):
            mean = self.quantity.mean(group, said)
            if mean is None:
                return False
            if math.isclose(mean, self.value, rel_tol=1e-9):
                return self.sign in {"=", "==", "<=", ">="}
            return SIGNS[self.sign](mean, self.value)
        words = self.quantity.words(group)
        pattern = ".*".join(re.escape(part) for part in self.value.split("*"))
        met = [re.fullmatch(pattern, word) is not None for word in words]
        return not any(met) if self.sign == "!=" else bool(met) and all(met)


@dataclass(frozen=True, kw_only=True)
class Order:
    """A quantity to sort by; what was not measured stands last in either direction."""

    quantity: Quantity
    descending: bool = False


@dataclass(frozen=True, kw_only=True)
class View:
    """What is shown of a comparison.

    Rows that meet every filter, sorted (least private first unless said), in the columns asked for,
    with differences to the row `against` instead of those of our defence to all others.
    """

    where: tuple[Filter, ...] = ()
    sort: tuple[Order, ...] = ()
    columns: tuple[Quantity, ...] | None = None
    against: str | None = None


def parse_filters(text: str) -> tuple[Filter, ...]:
    """Filters from words such as "defence=veil and accuracy>=90%".

    >>> [str(f) for f in parse_filters("net=thin-* and accuracy >= 90%")]
    ['net = thin-*', 'accuracy >= 0.9']
    """
    return tuple(_filter(part) for part in _AND.split(text.strip()))


def _filter(text: str) -> Filter:
    found = _FILTER.fullmatch(text)
    if found is None or not found[1] or not found[3]:
        raise ConfigError(
            f"a filter is KEY OP VALUE, got '{text}'; OP is one of {', '.join(SIGNS)}, "
            "for example: --where 'accuracy>=.9 and net=thin-*'"
        )
    key, sign, said = found.groups()
    quantity = find_quantity(key, "filter")
    if quantity.numbers is None:
        if sign not in {"=", "==", "!="}:
            raise ConfigError(
                f"{key} is a text, got '{text}'; compare it with = or !=, for example {key}={said}"
            )
        return Filter(quantity=quantity, sign=sign, value=said)
    return Filter(quantity=quantity, sign=sign, value=_value(quantity, sign, said))


def _value(quantity: Quantity, sign: str, said: str) -> float:
    key = quantity.key
    try:
        value = float(said.removesuffix("%")) / (100 if said.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ConfigError(
            f"{key} is a number, got '{said}'; write for example {key}>=0.5 or {key}>=50%"
        )
    if quantity.column.unit == "%" and abs(value) > 1 and not said.endswith("%"):
        raise ConfigError(
            f"{key} is a share from 0 to 1, got {said}; write {key}{sign}{said}% or "
            f"{key}{sign}{value / 100:g}"
        )
    return value


def parse_order(text: str) -> tuple[Order, ...]:
    """What to sort by, from keys with commas between; a minus means descending.

    >>> [(order.quantity.key, order.descending) for order in parse_order("net,-mse")]
    [('net', False), ('mse', True)]
    """
    keys = [key.strip() for key in text.split(",")]
    return tuple(
        Order(
            quantity=find_quantity(key.removeprefix("-").strip(), "column to sort by"),
            descending=key.startswith("-"),
        )
        for key in keys
    )


def ordered(
    groups: Sequence[Group], orders: Sequence[Order], published: Mapping[str, Published]
) -> tuple[Group, ...]:
    """Rows sorted by the first order, ties by the next, then as they were."""
    made = list(groups)
    for order in reversed(orders):
        pairs = [(_key(order.quantity, g, reported(g, published)), g) for g in made]
        known = [pair for pair in pairs if pair[0] is not None]
        known.sort(key=itemgetter(0), reverse=order.descending)
        made = [g for _, g in known] + [g for key, g in pairs if key is None]
    return tuple(made)


def _key(quantity: Quantity, group: Group, said: Published | None) -> float | str | None:
    if quantity.numbers is None:
        return ", ".join(quantity.words(group)) or None
    return quantity.mean(group, said)


def chosen(found: Found, view: View, published: Mapping[str, Published]) -> Found:
    """The rows that meet every filter; the row to compare against always stays."""
    names = {group.name for group in found.groups}
    if view.against is not None and view.against not in names:
        raise ConfigError(unknown("row to compare against", view.against, names))
    left = found.groups
    for condition in view.where:
        met = [condition.allows(g, reported(g, published)) for g in left]
        if not any(met):
            raise ConfigError(
                f"no row has {condition}; {_met(condition, left, published)}. Loosen the filter"
            )
        left = tuple(g for g, good in zip(left, met, strict=True) if good or g.name == view.against)
    return replace(found, groups=left)


def _met(condition: Filter, groups: Sequence[Group], published: Mapping[str, Published]) -> str:
    """The values that the rows do have."""
    quantity = condition.quantity
    if quantity.numbers is None:
        words = sorted({word for group in groups for word in quantity.words(group)})
        return f"{quantity.key} is {', '.join(words)}" if words else f"none has a {quantity.key}"
    means = [m for g in groups if (m := quantity.mean(g, reported(g, published))) is not None]
    if not means:
        return f"none has a {quantity.key}"
    return f"{quantity.key} lies in [{min(means):.6g}, {max(means):.6g}]"
