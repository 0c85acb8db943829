"""The options of an optimization level, and what may be overridden."""

from __future__ import annotations

from typing import Any

import torch

from castwise.compat.apex.amp._amp_state import warn_or_err

__all__ = ["LEVELS", "OptLevel", "Properties"]


class Properties:
    """The options in force, as attributes; setting one checks it against the level.

    Attributes:
        options: All of them by name, in Apex's order.
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

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.options:
            self.__dict__[name] = value
            return
        check = getattr(self, f"_check_{name}", None)
        self.options[name] = value if check is None else check(value)

    @property
    def _is_o1(self) -> bool:
        return bool(self.options["opt_level"] == "O1")

    def _check_cast_model_type(self, value: Any) -> Any:
        if self._is_o1 and value is not None and value is not False and value is not torch.float32:
            warn_or_err(
                "O1 inserts casts around Torch functions rather than model weights, so with O1, the model weights "
                "themselves should remain FP32. If you wish to cast the model to a different type, use opt_level='O2' "
                f"or 'O3'. cast_model_type was {value}"
            )
        return value

    def _check_patch_torch_functions(self, value: Any) -> Any:
        if not self._is_o1 and value:
            warn_or_err(
                "Currently, patch_torch_functions=True should only be set by selecting opt_level='O1'."
            )
        return value

    def _check_keep_batchnorm_fp32(self, value: Any) -> Any:
        if self._is_o1 and value is not None:
            warn_or_err(
                "With opt_level O1, batchnorm functions are automatically patched to run in FP32, so "
                f"keep_batchnorm_fp32 should be None. keep_batchnorm_fp32 was {value}"
            )
        value = {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value
        if value is not None and not isinstance(value, bool):
            raise AssertionError(
                "keep_batchnorm_fp32 must be a boolean, the string 'True' or 'False', or None, found "
                f"keep_batchnorm_fp32={value}"
            )
        return value

    def _check_master_weights(self, value: Any) -> Any:
        if self._is_o1 and value is not None:
            warn_or_err(
                "It doesn't make sense to use master_weights with O1. With O1, your model weights themselves should be "
                "FP32."
            )
        return value

    def _check_loss_scale(self, value: Any) -> Any:
        return value if value == "dynamic" else float(value)


class OptLevel:
    """One level: its options and what Apex prints of it.

    Args:
        brief: One line.
        options: Its values of all options but ``enabled``, in Apex's order.
    """

    def __init__(self, brief: str, *options: Any) -> None:
        self.brief = brief
        self._options = options

    def __call__(self, properties: Properties) -> Properties:
        """Set the options, in place."""
        properties.options.update(zip(properties.options, (True, *self._options), strict=True))
        return properties


LEVELS = {
    "O3": OptLevel("O3:  Pure FP16 training.", "O3", torch.float16, False, False, False, 1.0),
    "O2": OptLevel(
        "O2:  FP16 training with FP32 batchnorm and FP32 master weights.\n",
        "O2", torch.float16, False, True, True, "dynamic",
    ),
    "O1": OptLevel(
        "O1:  Insert automatic casts around Pytorch functions and Tensor methods.\n",
        "O1", None, True, None, None, "dynamic",
    ),
    "O0": OptLevel("O0:  Pure FP32 training.\n", "O0", torch.float32, False, None, False, 1.0),
}  # fmt: skip
"""Every level by name."""
