"""Casts through containers of every kind: rebuilt with their own type, or passed unchanged with a warning."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import pytest
import torch

from castwise.core.casting.trees import cast_floating, map_tensors, tensors_in, to_device

LOW = torch.ones(2, dtype=torch.bfloat16)


class Point(NamedTuple):
    x: torch.Tensor
    n: int


class Scaled(collections.namedtuple("Scaled", "x factor")):  # noqa: PYI024 - its __new__ is what is tested
    """A named tuple whose constructor takes other arguments than its fields."""

    def __new__(cls, x: torch.Tensor) -> Self:
        return super().__new__(cls, x, 2)


class Pair(tuple):  # type: ignore[type-arg]
    """A tuple that takes its items as separate arguments and has an attribute."""

    note = ""

    def __new__(cls, a: Any, b: Any) -> Self:
        return super().__new__(cls, (a, b))


class Stack(list):  # type: ignore[type-arg]
    """A list whose constructor takes no items."""

    def __init__(self) -> None:
        super().__init__()
        self.note = "kept"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    n: int = 3


@dataclasses.dataclass(frozen=True)
class ByHand:
    __slots__ = ("n", "x")
    x: torch.Tensor
    n: int


@dataclasses.dataclass
class Derived:
    x: torch.Tensor
    double: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.double = self.x * 2


class ReadOnly(Mapping[str, Any]):
    """An immutable mapping that is constructed from a dict."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = dict(data)

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


class Sealed(ReadOnly):
    """An immutable mapping that cannot be rebuilt."""

    def __init__(self, data: Mapping[str, Any], key: object = None) -> None:
        if key is None:
            raise TypeError("ask the factory")
        super().__init__(data)


def pair() -> Pair:
    out = Pair(LOW, 1)
    out.note = "kept"
    return out


def stack() -> Stack:
    out = Stack()
    out.append(LOW)
    return out


CONTAINERS: dict[str, Any] = {
    "tuple": (LOW, 1),
    "list": [LOW, 1],
    "dict": {"x": LOW, "n": 1},
    "named tuple": Point(LOW, 1),
    "named tuple with its own __new__": Scaled(LOW),
    "tuple with its own __new__": pair(),
    "list with its own __init__": stack(),
    "struct sequence": torch.return_types.max((LOW, torch.ones(2, dtype=torch.int64))),
    "mapping proxy": types.MappingProxyType({"x": LOW, "n": 1}),
    "read-only mapping": ReadOnly({"x": LOW}),
    "defaultdict": collections.defaultdict(list, x=LOW),
    "OrderedDict": collections.OrderedDict(x=LOW, n=1),
    "UserDict": collections.UserDict(x=LOW),
    "frozen dataclass with slots": Frozen(LOW),
    "frozen dataclass with slots by hand": ByHand(LOW, 1),
    "dataclass with a field that is not initialised": Derived(LOW),
    "nested": [({"a": types.MappingProxyType({"x": [Frozen(LOW)]})},)],
}


def tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]
    return found


@pytest.mark.parametrize("value", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_containers_are_rebuilt_with_their_own_type(value: Any) -> None:
    out = cast_floating(value, torch.float32)
    assert type(out) is type(value)
    found = tensors(out)
    assert found
    assert all(t.dtype in (torch.float32, torch.int64) for t in found)
    # The input is never modified.
    assert all(t.dtype in (torch.bfloat16, torch.int64) for t in tensors(value))
    assert cast_floating(out, torch.float32) is out
    assert getattr(out, "note", "kept") == "kept"
    if isinstance(value, collections.defaultdict):
        assert out.default_factory is list


def test_a_list_that_contains_itself() -> None:
    value: list[Any] = [LOW]
    value.append((value, {"x": LOW}))
    out = cast_floating(value, torch.float32)
    assert out[0].dtype is torch.float32
    assert out[1][0] is out
    assert out[1][1]["x"].dtype is torch.float32
    assert value[0] is LOW
    assert value[1][0] is value


def test_a_dict_and_a_dataclass_that_contain_themselves() -> None:
    value: dict[str, Any] = {"x": LOW}
    value["self"] = value
    out = cast_floating(value, torch.float32)
    assert out["self"] is out
    assert out["x"].dtype is torch.float32
    record = Derived(LOW)
    record.double = [record]  # type: ignore[assignment]
    made = cast_floating(record, torch.float32)
    assert made.double[0] is made
    assert made.x.dtype is torch.float32


def test_a_cycle_that_begins_at_a_tuple() -> None:
    inner: list[Any] = [LOW]
    value = (inner, LOW)
    inner.append(value)
    out = cast_floating(value, torch.float32)
    assert out[1].dtype is out[0][0].dtype is torch.float32


def test_what_is_shared_is_cast_once() -> None:
    shared = [LOW]
    out = cast_floating({"a": shared, "b": shared}, torch.float32)
    assert out["a"] is out["b"]


def test_what_cannot_be_rebuilt_passes_as_it_is_in_words() -> None:
    value = (Sealed({"x": LOW}, key=1), LOW)
    with pytest.warns(
        UserWarning, match=r"a Sealed cannot be rebuilt \(TypeError: ask the factory\).*a dict"
    ):
        out = cast_floating(value, torch.float32)
    assert out[0] is value[0]
    assert out[1].dtype is torch.float32


def test_model_outputs_of_transformers() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.CausalLMOutput(loss=None, logits=LOW, hidden_states=(LOW, LOW))
    out = cast_floating(value, torch.float32)
    assert type(out) is type(value)
    assert out.logits.dtype is out["logits"].dtype is out[1][0].dtype is torch.float32
    assert value.logits is LOW


def test_batches_of_any_shape_move() -> None:
    batch = {"a": (torch.ones(1), [torch.ones(2)]), "b": "text", "c": 3}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].is_meta
    assert moved["a"][1][0].is_meta
    assert (moved["b"], moved["c"]) == ("text", 3)


def test_tensors_are_found_in_their_order_wherever_they_lie() -> None:
    first, second, third = torch.ones(1), torch.ones(2), torch.ones(3)
    assert tensors_in({"a": (first, [second]), "b": "text", "c": 3, "d": third}) == [first, second, third]
    assert tensors_in(None) == []
