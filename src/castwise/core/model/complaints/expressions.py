"""Evaluate expressions in a Python stack frame in which an error was raised, and find the operators that they call.

No user code runs. Names, attributes, items, arithmetic and functions of torch are evaluated. The value of an expression
that would run other code is unknown.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn

from castwise.core import _torch
from castwise.core.casting.trees import tensors_in

OF_MODULE: Final = "forward"
"""The name that stands for an operator's name if a module of ``torch.nn`` was called."""


_BINARY: Final[dict[type, tuple[str, Callable[[Any, Any], Any]]]] = {
    ast.MatMult: ("matmul", operator.matmul), ast.Add: ("add", operator.add), ast.Sub: ("sub", operator.sub),
    ast.Mult: ("mul", operator.mul), ast.Div: ("div", operator.truediv), ast.Pow: ("pow", operator.pow),
    ast.FloorDiv: ("floor_divide", operator.floordiv), ast.Mod: ("remainder", operator.mod),
    ast.Eq: ("eq", operator.eq), ast.NotEq: ("ne", operator.ne), ast.Lt: ("lt", operator.lt), ast.LtE: ("le", operator.le),
    ast.Gt: ("gt", operator.gt), ast.GtE: ("ge", operator.ge), ast.BitAnd: ("bitwise_and", operator.and_),
    ast.BitOr: ("bitwise_or", operator.or_),
}  # fmt: skip
_IN_PLACE: Final[dict[type, Callable[[Any, Any], Any]]] = {
    ast.MatMult: operator.imatmul, ast.Add: operator.iadd, ast.Sub: operator.isub, ast.Mult: operator.imul,
    ast.Div: operator.itruediv, ast.Pow: operator.ipow, ast.FloorDiv: operator.ifloordiv, ast.Mod: operator.imod,
}  # fmt: skip
_UNARY: Final[dict[type, tuple[str, Callable[[Any], Any]]]] = {
    ast.USub: ("neg", operator.neg), ast.UAdd: ("positive", operator.pos), ast.Invert: ("bitwise_not", operator.invert),
    ast.Not: ("", operator.not_),
}  # fmt: skip
_SPELLED: Final = {"getitem": "index", "setitem": "index_put_", "truediv": "div", "mod": "remainder"}
"""ATen's names of Python operators that have another name there."""
_PLAIN: Final = (
    len,
    int,
    float,
    bool,
    min,
    max,
    range,
    tuple,
    list,
    dict,
    sum,
    abs,
    isinstance,
    slice,
    zip,
    enumerate,
)
_NUMBERS_OF: Final = (Tensor, int, float, complex, bool, str, tuple, list, torch.Size, type(None))
_HOMES: Final = (
    "torch",
    "torch._C._nn",
    "torch._C._linalg",
    "torch._C._fft",
    "torch._C._special",
    "torch._C._sparse",
)
"""The ``__module__`` of torch's functions that are written in C."""
_PYTHON_HOMES: Final = (
    "torch.nn.functional", "torch.functional", "torch._tensor", "torch._jit_internal", "torch.sparse", "torch.linalg",
)  # fmt: skip
"""The ``__module__`` of torch's functions that are written in Python and run only operators."""
_NOT_AGAIN: Final = ("backward", "register_hook", "register_post_accumulate_grad_hook", "set_", "resize_")


class NotKnown(Exception):
    """Raised if the value of an expression cannot be found without running user code."""


class Values:
    """Evaluates expressions with the variables of a Python stack frame in which an error was raised.

    ``texts`` collects the source expression of each tensor that was found, by the tensor's ``id``.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame, self._locals = frame, dict(frame.f_locals)
        self.texts: dict[int, str] = {}
        self._kept: list[Any] = []

    def call(self, node: ast.AST) -> tuple[str, Callable[..., Any], list[Any], dict[str, Any]]:
        """Return the operator's name, the function, and the arguments of an expression that calls an operator."""
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.BinOp):
            name, function = _BINARY[type(node.op)]
            return name, function, [self.of(node.left), self.of(node.right)], {}
        if isinstance(node, ast.AugAssign):
            left = self.of(node.target)
            function = _IN_PLACE[type(node.op)]
            return f"{_BINARY[type(node.op)][0]}_", function, [left, self.of(node.value)], {}
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            name, function = _BINARY[type(node.ops[0])]
            return name, function, [self.of(node.left), self.of(node.comparators[0])], {}
        if isinstance(node, ast.UnaryOp):
            name, unary = _UNARY[type(node.op)]
            return name, unary, [self.of(node.operand)], {}
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            target = node.targets[0]
            return (
                "index_put_",
                operator.setitem,
                [self.of(target.value), self.of(target.slice), self.of(node.value)],
                {},
            )
        if isinstance(node, ast.Subscript):
            return "index", operator.getitem, [self.of(node.value), self.of(node.slice)], {}
        raise NotKnown

    def _call(self, node: ast.Call) -> tuple[str, Callable[..., Any], list[Any], dict[str, Any]]:
        called = self.of(node.func)
        name, function, first = _operator(called)
        if not name:
            raise NotKnown
        args = list(first)
        for arg in node.args:
            args += self._spread(arg) if isinstance(arg, ast.Starred) else [self.of(arg)]
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is not None:
                kwargs[keyword.arg] = self.of(keyword.value)
            else:
                mapping = self.of(keyword.value)
                if type(mapping) is not dict:
                    raise NotKnown
                self._note_items(keyword.value, mapping.items())
                kwargs |= mapping
        return name, function, args, kwargs

    def _spread(self, node: ast.Starred) -> list[Any]:
        items = self.of(node.value)
        if not isinstance(items, tuple | list):
            raise NotKnown
        self._note_items(node.value, enumerate(items))
        return list(items)

    def written(self, node: ast.expr) -> list[ast.expr]:
        """Return the source of an argument, or the source of each item of an argument such as ``*args``."""
        if not isinstance(node, ast.Starred):
            return [node]
        return [item_of(node.value, index) for index in range(len(self.of(node.value)))]

    def _note_items(self, node: ast.expr, items: Any) -> None:
        for key, item in items:
            if isinstance(item, Tensor):
                self.texts.setdefault(id(item), f"{ast.unparse(node)}[{key!r}]")

    def of(self, node: ast.expr) -> Any:
        """Return the value of an expression."""
        value = self._of(node)
        if isinstance(value, Tensor):
            self.texts.setdefault(id(value), ast.unparse(node))
            self._kept.append(value)
        elif isinstance(value, tuple | list) and isinstance(node, ast.Name | ast.Attribute):
            self._note_items(node, enumerate(value))
        return value

    def _of(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                for known in (self._locals, self._frame.f_globals, vars(builtins)):
                    if node.id in known:
                        return known[node.id]
            case ast.Attribute():
                return _attribute(self.of(node.value), node.attr)
            case ast.Subscript():
                return self._look_up(self.of(node.value), self.of(node.slice))
            case ast.Slice():
                return slice(*[part and self.of(part) for part in (node.lower, node.upper, node.step)])
            case ast.Tuple() | ast.List():
                items = [
                    each
                    for item in node.elts
                    for each in (self._spread(item) if isinstance(item, ast.Starred) else [self.of(item)])
                ]
                return tuple(items) if isinstance(node, ast.Tuple) else items
            case ast.Dict() if None not in node.keys:
                return {
                    self.of(key): self.of(value)
                    for key, value in zip(node.keys, node.values, strict=True)
                    if key
                }
            case ast.IfExp():
                return self.of(node.body if self.of(node.test) else node.orelse)
            case ast.BoolOp():
                for part in node.values:
                    value = self.of(part)
                    if bool(value) is isinstance(node.op, ast.Or):
                        break
                return value
            case ast.Compare() if isinstance(node.ops[0], ast.Is | ast.IsNot) and len(node.ops) == 1:
                same = self.of(node.left) is self.of(node.comparators[0])
                return same is isinstance(node.ops[0], ast.Is)
            case ast.NamedExpr():
                return self.of(node.value)
            case ast.ListComp() | ast.GeneratorExp() if len(node.generators) == 1:
                return self._comprehension(node, node.generators[0])
            case ast.Call() if (plain := self._plain(node)) is not None:
                return plain(*[self.of(arg) for arg in node.args])
            case ast.Call() | ast.BinOp() | ast.UnaryOp() | ast.Compare():
                name, function, args, kwargs = self.call(node)
                if writes(name) or "out" in kwargs or name in ("index_put_",):
                    raise NotKnown
                if not isinstance(node, ast.Call) and not all(isinstance(arg, _NUMBERS_OF) for arg in args):
                    raise NotKnown
                if not _torch.operators.plain_tensors(tensors_in((args, kwargs))):
                    raise NotKnown  # operators on sharded tensors may wait for other ranks
                return function(*args, **kwargs)
        raise NotKnown

    def _plain(self, node: ast.Call) -> Callable[..., Any] | None:
        if not isinstance(node.func, ast.Name) or node.keywords:
            return None
        function = self.of(node.func)
        return function if any(function is plain for plain in _PLAIN) else None

    def _look_up(self, value: Any, index: Any) -> Any:
        if isinstance(value, Tensor) or type(value) in (list, tuple, dict, torch.Size, str):
            return value[index]
        if type(value) in (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, nn.Sequential):
            return value[index]
        raise NotKnown

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp, part: ast.comprehension) -> list[Any]:
        items = self.of(part.iter)
        if part.ifs or not isinstance(items, list | tuple | range | zip | enumerate | nn.ModuleList):
            raise NotKnown
        out, before = [], dict(self._locals)
        for item in items:
            self._assign(part.target, item)
            out.append(self.of(node.elt))
        self._locals = before
        return out

    def _assign(self, target: ast.expr, value: Any) -> None:
        if isinstance(target, ast.Name):
            self._locals[target.id] = value
        elif (
            isinstance(target, ast.Tuple)
            and isinstance(value, tuple | list)
            and len(value) == len(target.elts)
        ):
            for part, item in zip(target.elts, value, strict=True):
                self._assign(part, item)
        else:
            raise NotKnown


def item_of(node: ast.expr, key: object) -> ast.expr:
    """Return the source of one item of a sequence or mapping, given the source of the whole."""
    return ast.Subscript(node, ast.Constant(key), ast.Load())  # type: ignore[arg-type]


def handed_on(node: ast.AST | None, outer: FrameType, callee: FrameType) -> dict[int, str]:
    """Return the source expressions of the tensors that were passed to a function, by the tensors' ``id``.

    Args:
        node: The expression that called the function.
        outer: The stack frame that contains this expression.
        callee: The stack frame of the function.
    """
    if not isinstance(node, ast.Call):
        return {}
    code, given, values = callee.f_code, callee.f_locals, Values(outer)
    names = list(code.co_varnames[: code.co_argcount])
    behind = code.co_argcount + code.co_kwonlyargcount
    rest: Any = ()
    kwargs = dict(given)
    if code.co_flags & inspect.CO_VARARGS:
        rest = given.get(code.co_varnames[behind])
        behind += 1
    if code.co_flags & inspect.CO_VARKEYWORDS:
        kwargs |= given.get(code.co_varnames[behind]) or {}
    pairs: list[tuple[Any, ast.expr]] = []
    with contextlib.suppress(Exception):  # an item of unknown length ends the known positions
        called = None
        with contextlib.suppress(NotKnown):
            called = values.of(node.func)
        if names[:1] == ["self"] and not isinstance(called, types.FunctionType):
            del names[0]
        written = [each for arg in node.args for each in values.written(arg)]
        pairs += zip([*map(given.get, names), *(rest or ())], written, strict=False)
    with contextlib.suppress(Exception):
        for keyword in node.keywords:
            if keyword.arg is not None:
                pairs.append((kwargs.get(keyword.arg), keyword.value))
            else:
                pairs += [(kwargs.get(key), item_of(keyword.value, key)) for key in values.of(keyword.value)]
    for value, text in list(pairs):
        if isinstance(value, tuple | list):
            inside = (
                text.elts
                if isinstance(text, ast.Tuple | ast.List)
                else [item_of(text, i) for i in range(len(value))]
            )
            pairs += zip(value, inside, strict=False)
    return {id(value): ast.unparse(text) for value, text in reversed(pairs) if isinstance(value, Tensor)}


def writes(name: str) -> bool:
    """Whether an operator of this name writes to its first argument."""
    return name.endswith("_") and not name.endswith("__")


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute of a value, or raise :class:`NotKnown` if reading it would run user code."""
    kind = type(value)
    if isinstance(value, Tensor):
        if _torch.operators.plain_tensors([value]):
            return getattr(value, name)
        raise NotKnown
    if isinstance(value, types.ModuleType):
        if name in vars(value) or value.__name__.partition(".")[0] == "torch":
            return getattr(value, name)
        raise NotKnown
    if _torch.operators.operator_name(value) or value in (torch.Size, torch.dtype):
        return getattr(value, name)
    if vars(object)["__getattribute__"] is not inspect.getattr_static(kind, "__getattribute__"):
        if isinstance(value, type) and value is Tensor:
            return getattr(value, name)
        if not isinstance(value, tuple | list | dict | str | int | float | torch.dtype | torch.device):
            raise NotKnown
    own = getattr(value, "__dict__", {})
    for known in (own, *(own.get(table, {}) for table in ("_parameters", "_buffers", "_modules"))):
        if (known is own or isinstance(value, nn.Module)) and isinstance(known, dict) and name in known:
            return known[name]
    found = inspect.getattr_static(kind, name, NotKnown)
    if found is NotKnown or isinstance(found, property) or hasattr(type(found), "__get__"):
        c_made = inspect.ismethoddescriptor(found) and not isinstance(found, staticmethod | classmethod)
        if found is not NotKnown and (
            isinstance(found, types.GetSetDescriptorType | types.MemberDescriptorType | types.FunctionType)
            or type(found).__name__ == "_tuplegetter"
            or (c_made and isinstance(found, types.MethodDescriptorType))
        ):
            return getattr(value, name)
        raise NotKnown
    return found


def _operator(called: Any) -> tuple[str, Callable[..., Any], tuple[Any, ...]]:
    """Return the operator's name, the function to call and its first arguments, for a torch function or operator.

    The name is empty if ``called`` is anything else. For a method, the first argument is the tensor.
    """
    name = _torch.operators.operator_name(called)
    if name:
        return name, called, ()
    if isinstance(called, nn.Module):
        return OF_MODULE, _forward_of(called), ()
    name = str(getattr(called, "__name__", ""))
    owner = getattr(called, "__self__", None)
    home = str(getattr(called, "__module__", None) or "")
    python = isinstance(called, types.FunctionType | types.MethodType)
    if name in _NOT_AGAIN or not name:
        return "", called, ()
    if isinstance(owner, Tensor):
        if python and home != "torch._tensor":
            return "", called, ()
        method = name
        return (
            _atens(name),
            lambda tensor, *args, **kwargs: getattr(tensor, method)(*args, **kwargs),
            (owner,),
        )
    if python:
        return (_atens(name) if home in _PYTHON_HOMES else ""), called, ()
    if isinstance(called, types.MethodDescriptorType | types.WrapperDescriptorType):
        return (_atens(name) if issubclass(Tensor, called.__objclass__) else ""), called, ()
    if isinstance(called, types.BuiltinFunctionType) and home in _HOMES:
        return _atens(name), called, ()
    if isinstance(owner, str | list | tuple | dict) and name in ("size", "numel", "index", "count", "get"):
        return name, called, ()
    return "", called, ()


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    """Return the ``forward`` of a module of ``torch.nn``, which runs without hooks and on copies of the module's buffers."""
    if type(module) is nn.Sequential:
        parts = list(map(_forward_of, module))
        return lambda given: functools.reduce(lambda value, part: part(value), parts, given)
    plain = _torch.operators.plain_tensors([*module.parameters(), *module.buffers()])
    own = type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)
    if (
        not own
        or next(module.children(), None) is not None
        or isinstance(module, nn.SyncBatchNorm)
        or not plain
    ):
        raise NotKnown
    alone = object.__new__(type(module))
    buffers = {name: b if b is None else b.detach().clone() for name, b in vars(module)["_buffers"].items()}
    alone.__dict__.update(module.__dict__, _buffers=buffers)
    return alone.forward


def _atens(name: str) -> str:
    """Return ATen's name of a Python method; that of ``__rmatmul__`` is ``matmul``."""
    if not (name.startswith("__") and name.endswith("__")):
        return name
    bare = name.strip("_")
    if bare in _SPELLED:
        return _SPELLED[bare]
    aten = torch.ops.aten
    for prefix in ("", "r", "i"):
        known = bare.removeprefix(prefix) if bare.startswith(prefix) else ""
        known = _SPELLED.get(known, known)
        if known and hasattr(aten, known):
            return f"{known}_" if prefix == "i" else known
    return bare
