"""Compare what castwise writes with its published schemas."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from castwise.commands.jobs.tune_result import TuneResult
from castwise.core.plans.plan import Plan
from castwise.core.schemas import schema

INSTALLED = importlib.util.find_spec("jsonschema") is not None


def check(name: str, value: Any) -> None:
    """Fail if a value does not follow a schema or has a key that the schema does not define."""
    errors = [f"{error.json_path}: {error.message}" for error in _validator(name).iter_errors(value)]
    assert not errors, "\n".join(errors)


@functools.cache
def _validator(name: str) -> Any:
    import jsonschema

    strict = _closed(schema(name))
    jsonschema.Draft202012Validator.check_schema(strict)
    return jsonschema.Draft202012Validator(strict)


def _closed(part: Any) -> Any:
    """Return a schema whose objects allow only the keys it defines."""
    if isinstance(part, dict):
        inner = {key: _closed(value) for key, value in part.items()}
        return {"additionalProperties": False, **inner} if "required" in part else inner
    return [_closed(item) for item in part] if isinstance(part, list) else part


def checked_plans(save: Callable[[Plan, Any], None]) -> Callable[[Plan, Any], None]:
    """Return a ``Plan.save`` that also checks the written file."""

    @functools.wraps(save)
    def checked(self: Plan, path: Any) -> None:
        save(self, path)
        check("plan", json.loads(Path(path).read_text(encoding="utf-8")))

    return checked


def checked_evidence(
    save: Callable[[TuneResult, Any], tuple[Path, ...]],
) -> Callable[[TuneResult, Any], tuple[Path, ...]]:
    """Return a ``TuneResult.save`` that also checks the written file."""

    @functools.wraps(save)
    def checked(self: TuneResult, folder: Any) -> tuple[Path, ...]:
        paths = save(self, folder)
        check("evidence", json.loads((Path(folder) / "evidence.json").read_text(encoding="utf-8")))
        return paths

    return checked
