"""Private autograd API: nodes of the graph and their saved tensors, and functions that run around backward passes."""

from __future__ import annotations

import functools
import heapq
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from castwise.core._torch.operators import OpOverload, operator_names, overload_kind


def graph_task_id() -> int:
    """Return the number of the backward pass that this thread is executing, or -1 outside of a backward pass."""
    return int(torch._C._current_graph_task_id())


def sequence_number() -> int:
    """Return the sequence number that the next autograd node created on this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


def running_node_number() -> int | None:
    """Return the sequence number of the autograd node that this thread is executing, or None outside of backward."""
    node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
    return None if node is None else int(node._sequence_nr())


def running_node() -> tuple[str, int] | None:
    """Return the name and sequence number of the autograd node that this thread executes, or None outside of backward.

    Nodes that accumulate gradients of leaves have the largest possible sequence number.
    """
    node = torch._C._current_autograd_node() if torch._C._current_graph_task_id() != -1 else None
    return None if node is None else (node.name(), int(node._sequence_nr()))


def failed_node(loss: torch.Tensor, error: BaseException, seconds: float) -> Any:
    """Find the autograd node whose backward raised an error, by calling the nodes of the graph again, each with zeros.

    A node that is called on its own only computes its formula: no hook runs and no ``.grad`` is written. Nodes that
    would run user code are left out. These are autograd Functions in Python, and nodes whose saved tensors a hook
    restores, as in activation checkpointing. Like autograd's engine, the search takes the newest node first.

    Args:
        loss: The loss whose backward pass failed.
        error: The exception that the backward pass raised.
        seconds: Time limit of the search, in seconds of this thread's CPU time.

    Returns:
        The node that raises the same error, or None if no node did so within the time limit.
    """
    from torch.autograd.function import BackwardCFunction

    seen: set[Any] = set()
    waiting: list[tuple[int, int, Any]] = []

    def add(node: Any) -> None:
        if node is not None and node not in seen and hasattr(node, "_sequence_nr"):
            seen.add(node)
            heapq.heappush(waiting, (-node._sequence_nr(), len(seen), node))

    add(loss.grad_fn)
    until = time.thread_time() + seconds
    while waiting and time.thread_time() < until:
        node = heapq.heappop(waiting)[2]
        for below, _ in node.next_functions:
            add(below)
        if isinstance(node, BackwardCFunction) or type(node).__name__ == "AccumulateGrad":
            continue
        try:
            if _brings_back(node):
                continue
            node(*[torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in node._input_metadata])
        except Exception as again:
            if type(again) is type(error) and str(again).partition("\n")[0] == str(error).partition("\n")[0]:
                return node
    return None


def _brings_back(node: Any) -> bool:
    """Whether a saved-tensor hook unpacks any tensor that a node has saved.

    Raises an error if the node's saved tensors have been freed by a backward pass.
    """
    saved = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
    tensors = [each for one in saved for each in (one if isinstance(one, (tuple, list)) else (one,))]
    return any(getattr(tensor, "unpack_hook", True) is not None for tensor in tensors)


def forward_of(node: Any) -> Iterator[tuple[OpOverload, dict[str, Any]]]:
    """Yield each operator that may have created an autograd node in the forward pass, with arguments to call the operator.

    The arguments are those that the node saved. A tensor that was not saved is replaced by zeros.
    """
    letters = re.sub(r"Backward\d*$", "", type(node).__name__).lower()
    names = {name.removeprefix("aten::").partition(".")[0] for name in operator_names("aten")}
    for name in sorted(name for name in names if name.replace("_", "") == letters and not name.endswith("_")):
        packet = getattr(torch.ops.aten, name)
        for overload in map(packet.__getattr__, packet.overloads()):
            if overload_kind(overload) == "functional":
                yield overload, _arguments_of(node, overload)


def _arguments_of(node: Any, overload: OpOverload) -> dict[str, Any]:
    arguments = overload._schema.arguments
    tensors = [argument.name for argument in arguments if str(argument.type) == "Tensor"]
    edges = (
        dict(zip(tensors, node.next_functions, strict=True))
        if len(node.next_functions) == len(tensors)
        else {}
    )
    given = {}
    for argument in arguments:
        kept = getattr(node, f"_saved_{argument.name}", None)
        if kept is not None:
            given[argument.name] = kept.detach() if isinstance(kept, torch.Tensor) else kept
        elif argument.name in tensors:
            below, index = edges.get(argument.name, (None, 0))
            like = node._input_metadata[0] if below is None else below._input_metadata[index]
            shape = getattr(node, f"_saved_{argument.name}_sym_sizes", like.shape)
            given[argument.name] = torch.zeros(tuple(shape), dtype=like.dtype, device=like.device)
        if edges.get(argument.name, (None, 0))[0] is not None:
            given[argument.name].requires_grad_()
    return given


ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__
"""The code of the Python function that starts every backward pass."""


def backward_of_scalar(loss: torch.Tensor) -> None:
    """Run ``loss.backward()`` for a scalar loss by calling autograd's engine directly.

    This avoids the checks of arguments in ``torch.autograd.backward``, which take some microseconds.
    """
    if type(loss) is not torch.Tensor or torch.compiler.is_compiling():
        torch.autograd.backward(loss)
        return
    torch.autograd.graph._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def leaves_below(outputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """Find the leaf tensors that accumulate gradients in a backward pass from some outputs.

    Returns:
        The leaf tensors, and whether there may be more of them. The latter is True if reentrant activation
        checkpointing rebuilds part of the graph only during backward.
    """
    found = [output for output in outputs if output.grad_fn is None and output.requires_grad]
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen, hides = set(waiting), False
    while waiting:
        node = waiting.pop()
        kind = type(node).__name__
        if kind == "AccumulateGrad":
            found.append(node.variable)
        hides = hides or kind == "CheckpointFunctionBackward"
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                waiting.append(below)
    return found, hides


_PRODUCTS = re.compile(
    r"[Mm]m(?=[A-Z])|[Mm]v(?=B)|Addr(?=B)|Conv(?!ert)|(?<!Upsample)Linear|[Dd]ot|^Trilinear|Rnn|Lstm|Gru|Attention"
)
_VIEWS = re.compile(
    r"^(T|View|UnsafeView|ReshapeAlias|Alias|Clone|Transpose|Permute|Expand|Unsqueeze|Squeeze|Slice|Select|Split\w*|Unbind)Backward"
)


def uses_of_leaves(
    outputs: Sequence[torch.Tensor],
) -> tuple[list[tuple[torch.Tensor, list[Any], list[Any]]], bool]:
    """Find the leaf tensors that a backward pass from some outputs reaches, and the autograd nodes that use them.

    Returns:
        A list and a bool. The list has an entry for each leaf: the leaf, the nodes that take the leaf as input, and
        the nodes that multiply the leaf, or a view of the leaf, by another tensor. A node that multiplies the leaf by
        itself, as a weight penalty does, is not among the latter. The bool says whether the graph contains autograd
        Functions written in Python, which may run operators that the graph does not show.
    """
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    above: dict[Any, list[Any]] = {node: [] for node in waiting}
    leaves: list[Any] = []
    while waiting:
        node = waiting.pop()
        for below, _ in node.next_functions:
            if below is None:
                continue
            if below not in above:
                above[below] = []
                (leaves if type(below).__name__ == "AccumulateGrad" else waiting).append(below)
            above[below].append(node)

    def viewed(node: Any) -> Any:
        while _VIEWS.match(type(node).__name__):
            node = node.next_functions[0][0]
        return node

    def products(nodes: Sequence[Any]) -> Iterator[Any]:
        for node in nodes:
            name = type(node).__name__
            if _VIEWS.match(name):
                yield from products(above[node])
            elif _PRODUCTS.search(name) and not isinstance(node, torch.autograd.function.BackwardCFunction):
                given = [viewed(below) for below, _ in node.next_functions if below is not None]
                if len(given) == 1 or any(each is not given[0] for each in given):
                    yield node

    found = [(leaf.variable, above[leaf], list(products(above[leaf]))) for leaf in leaves]
    return found, any(isinstance(node, torch.autograd.function.BackwardCFunction) for node in above)


def node_number(node: Any) -> int:
    """Return the sequence number of an autograd node, counted as in :func:`sequence_number`."""
    return int(node._sequence_nr())


def makes(node: Any) -> tuple[torch.dtype, int]:
    """Return the dtype and the number of dimensions of the tensor that an autograd node's operator computed in forward."""
    made = node._input_metadata[0]
    return made.dtype, len(made.shape)


def casts_to(node: Any, dtype: torch.dtype) -> bool:
    """Whether an autograd node is a cast to ``dtype``."""
    return type(node).__name__ == "ToCopyBackward0" and makes(node)[0] is dtype


def hides_operators(node: Any) -> bool:
    """Whether an autograd node stands for operators that the graph does not show.

    Code compiled by AOTAutograd and DataParallel's copies of parameters have such nodes.
    """
    return type(node).__name__ in ("CompiledFunctionBackward", "BroadcastBackward")


_around_backward: tuple[Callable[..., Any], ...] = ()
_ENGINE: Any = torch.autograd.Variable._execution_engine


def around_backward(run: Callable[..., Any]) -> Callable[[], None]:
    """Make ``run`` a wrapper around every backward pass of the process.

    ``backward``, ``autograd.grad`` and the transforms of torch.func share one engine, so ``run`` wraps all of them.
    This relies on torch looking the engine up at each backward pass. torch passes the state of the calling thread to
    the engine, including the autocast state.

    Args:
        run: Called instead of the engine's function, with that function and its arguments: outputs, gradients of
            outputs and so on. Must call the function.

    Returns:
        A function that removes the wrapper.
    """
    global _around_backward
    home: Any = torch.autograd.Variable
    _around_backward = (*_around_backward, run)
    home._execution_engine = _Engine()

    def undo() -> None:
        global _around_backward
        _around_backward = tuple(other for other in _around_backward if other is not run)
        if not _around_backward:
            home._execution_engine = _ENGINE

    return undo


class _Engine(type(_ENGINE)):  # type: ignore[misc]
    """Autograd's engine, with a ``run_backward`` that calls all wrappers added by :func:`around_backward`."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        call = _ENGINE.run_backward
        for run in _around_backward:
            call = functools.partial(run, call)
        return call(*args, **kwargs)


def around_python_backward(enter: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Call ``enter`` before the backward of each autograd Function written in Python, and a second function afterwards.

    Autograd Functions of torch and of castwise are left out, since they set their precision themselves. This relies on
    the engine looking ``apply`` up on the class of the node each time.

    Args:
        enter: Called before the backward. Returns the function to call after the backward, even if the backward fails.

    Returns:
        A function that removes the wrapper.
    """
    base: Any = torch.autograd.function.BackwardCFunction
    original = base.apply

    def apply(node: Any, *args: Any) -> Any:
        if getattr(node, "_forward_cls", base).__module__.partition(".")[0] in ("torch", "castwise"):
            return original(node, *args)
        leave = enter()
        try:
            return original(node, *args)
        finally:
            leave()

    base.apply = apply

    def undo() -> None:
        base.apply = original

    return undo


def is_returned(leaf: torch.Tensor) -> bool:
    """Whether the running backward pass returns the gradient of a leaf instead of accumulating it into ``leaf.grad``.

    ``torch.autograd.grad`` does so for its inputs.
    """
    if not leaf.requires_grad:
        return False
    try:
        torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(leaf).node)
    except RuntimeError as error:
        return "autograd.grad()" in str(error)
    return False


def on_graph_task_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass has finished, but not if the backward pass fails."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
