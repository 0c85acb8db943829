"""A script, as the rules of a check see it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import libcst as cst

from castwise.bridges.scripts.lint.result import Fault
from castwise.bridges.scripts.reading.torch_amp import AUTOCAST, SCALER, AmpCall, amp_calls
from castwise.bridges.scripts.reading.view import View


class Script(View):
    """A script, as the rules see it.

    Raises:
        SyntaxError: The script cannot be parsed.
    """

    def __init__(self, text: str, path: Path) -> None:
        super().__init__(text)
        self.path = path
        self.autocasts = amp_calls(self, AUTOCAST)
        self.scalers = self._scalers()
        self._by_name: dict[str, list[cst.Call]] = defaultdict(list)
        for call, _ in self.calls:
            self._by_name[self.code(call.func)].append(call)
        imports = (node for node in self.nodes if isinstance(node, (cst.Import, cst.ImportFrom)))
        self.imports = "\n".join(map(self.code, imports))

    def _scalers(self) -> Mapping[str, AmpCall]:
        """GradScalers by the name to which they are bound, ``self.scaler`` too; names of several scalers are left out."""
        found: dict[str, list[AmpCall]] = {}
        for call in amp_calls(self, SCALER):
            targets = self.targets(self.parent(call.node))
            if len(targets) == 1:
                found.setdefault(self.code(targets[0]), []).append(call)
        return {name: calls[0] for name, calls in found.items() if len(calls) == 1}

    def methods(self, of: str, method: str) -> list[cst.Call]:
        """Calls of a method of the object with a name."""
        return self._by_name.get(f"{of}.{method}", [])

    def fault(self, node: cst.CSTNode, rule: str, why: str, instead: str) -> Fault:
        """Report an error at a node."""
        return Fault(self.path, self.line(node), rule, why, instead)
