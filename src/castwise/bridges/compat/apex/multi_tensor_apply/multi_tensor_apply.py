"""The class ``MultiTensorApply``, in the module in which Apex defines it."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["MultiTensorApply"]


class MultiTensorApply:
    """A placeholder whose call raises an error, because Apex's CUDA kernels are not available."""

    available = False
    import_err = ImportError("Apex's CUDA extension amp_C is not part of castwise")

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> NoReturn:
        """Raise an error.

        Raises:
            RuntimeError: Always, since castwise has no kernels to call.
        """
        raise RuntimeError(
            "multi_tensor_applier: castwise does not include Apex's kernels; use torch.nn.utils.get_total_norm for norms and "
            "optimizers of torch.optim for updates"
        )
