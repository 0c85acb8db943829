"""``apex.multi_tensor_apply.multi_tensor_apply``: the class under its full path."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["MultiTensorApply"]


class MultiTensorApply:
    """Placeholder that reports that Apex's kernels are not available."""

    available = False
    import_err = ImportError("Apex's CUDA extension amp_C is not part of castwise")

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> NoReturn:
        """Raise an error.

        Raises:
            RuntimeError: Always: there is no ``op`` to call.
        """
        raise RuntimeError(
            "multi_tensor_applier: castwise does not include Apex's kernels; use torch.nn.utils.get_total_norm for norms and "
            "optimizers of torch.optim for updates"
        )
