"""The options of each optimization level, and the checks of options that the user overrides."""

from __future__ import annotations

from typing import Any

import torch

from castwise.bridges.compat.apex.amp._amp_state import warn_or_err

__all__ = ["BRIEFS", "LEVELS", "Properties"]

BRIEFS = {
    "O0": "Pure FP32 training.\n",
    "O1": "Insert automatic casts around Pytorch functions and Tensor methods.\n",
    "O2": "FP16 training with FP32 batchnorm and FP32 master weights.\n",
    "O3": "Pure FP16 training.",
}
"""Apex's description of each level, as ``initialize`` prints it."""
LEVELS: dict[str, tuple[Any, ...]] = {
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (torch.float16, False, True, True, "dynamic"),
    "O3": (torch.float16, False, False, False, 1.0),
}
"""The defaults of each level, in the order of the options ``cast_model_type``, ``patch_torch_functions``,
``keep_batchnorm_fp32``, ``master_weights`` and ``loss_scale``."""


class Properties:
    """The active options, as attributes. Setting an option checks whether the optimization level allows the value.

    Attributes:
        options: All options by name, in Apex's order.
    """

    options: dict[str, Any]

    def __init__(self) -> None:
        self.__dict__["options"] = {
            "enabled": False,
            "opt_level": None,
            "cast_model_type": None,
            "patch_torch_functions": False,
            "keep_batchnorm_fp32": None,
            "master_weights": None,
            "loss_scale": 1.0,
        }

    def set_level(self, level: str) -> None:
        """Set all options to the defaults of a level, without checks."""
        self.options.update(zip(self.options, (True, level, *LEVELS[level]), strict=True))

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.options:
            self.options[name] = _checked(name, value, self.options["opt_level"] == "O1")
        else:
            self.__dict__[name] = value


def _checked(name: str, value: Any, o1: bool) -> Any:
    """Return the normalised value of an option. If the level does not allow the value, call :func:`warn_or_err`."""
    match name:
        case "cast_model_type" if o1 and value not in (None, False, torch.float32):
            warn_or_err(
                "O1 inserts casts around Torch functions rather than model weights, so with O1, the model weights "
                "themselves should remain FP32. If you wish to cast the model to a different type, use opt_level='O2' "
                f"or 'O3'. cast_model_type was {value}"
            )
        case "patch_torch_functions" if value and not o1:
            warn_or_err(
                "Currently, patch_torch_functions=True should only be set by selecting opt_level='O1'."
            )
        case "keep_batchnorm_fp32":
            if o1 and value is not None:
                warn_or_err(
                    "With opt_level O1, batchnorm functions are automatically patched to run in FP32, so "
                    f"keep_batchnorm_fp32 should be None. keep_batchnorm_fp32 was {value}"
                )
            value = {"True": True, "False": False}.get(value, value)
            if not (value is None or isinstance(value, bool)):
                raise AssertionError(
                    "keep_batchnorm_fp32 must be a boolean, the string 'True' or 'False', or None, found "
                    f"keep_batchnorm_fp32={value}"
                )
        case "master_weights" if o1 and value is not None:
            warn_or_err(
                "It doesn't make sense to use master_weights with O1. With O1, your model weights themselves should be "
                "FP32."
            )
        case "loss_scale" if value != "dynamic":
            return float(value)
    return value
