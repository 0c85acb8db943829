"""The only package that uses private or version-dependent torch API, one file per subject.

Every function here wraps one thing that PyTorch does not offer in public, says what it relies on, and is covered
by a test that would fail if a release changed it. Written against the releases that :mod:`castwise.core.session.canary` names, which
has self-checks for others.
"""

from castwise.core._torch import (
    autograd,
    calls,
    cpu,
    dispatcher,
    distributed,
    dynamo,
    grad_scaler,
    hooks,
    operators,
    optimizers,
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
    "grad_scaler",
    "hooks",
    "operators",
    "optimizers",
    "steps",
    "tensors",
]
