"""The only package that uses private or version-dependent torch API, one file per subject.

Every function here wraps one feature that PyTorch does not offer publicly, and says what it relies on. A test covers
each function and would fail if a PyTorch release changed the feature. The code was written against the releases listed
in :mod:`castwise.core.session.canary`, which has self-checks for other releases.
"""

from castwise.core._torch import (
    autograd,
    calls,
    cpu,
    dispatcher,
    distributed,
    dynamo,
    export,
    grad_scaler,
    hooks,
    operators,
    optimizers,
    release,
    steps,
    tensors,
)

__all__ = [
    "autograd",
    "calls",
    "cpu",
    "dispatcher",
    "distributed",
    "dynamo",
    "export",
    "grad_scaler",
    "hooks",
    "operators",
    "optimizers",
    "release",
    "steps",
    "tensors",
]
