"""Run the first stage of a search: compute fp32 gradients or outputs, and find the parts and operators of the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from castwise.core.casting.trees import cast_floating, tensors_in, to_device
from castwise.core.model.arrival import as_given, low_tensors, store_, widen_
from castwise.core.plans.formats import LOW_DTYPES
from castwise.core.plans.plan import Plan
from castwise.lab.parity.batches import epochs_of, same_batch
from castwise.lab.parity.parity import ParityTest, coarsest, is_adam
from castwise.lab.parity.probes import Prober
from castwise.lab.passes.isolation import seed_all
from castwise.lab.passes.regions import Part, find_parts, operators_used
from castwise.lab.search.context import Context
from castwise.lab.search.repair import NumericsSearch
from castwise.lab.serve.comparison import OUTPUT_BATCHES, OutputTest, output_test
from castwise.lab.timing.runners import build_model, served
from castwise.lab.timing.served import libraries
from castwise.lab.workloads.workload import make_optimizer

MICROBATCHES = 8


@dataclass(frozen=True)
class Reference:
    """What the first stage of a search finds: the model, its fp32 gradients on a few batches, and its parts.

    Attributes:
        model: The model as the workload builds it.
        optimizer: Class name of its optimizer.
        arrived: Whether the user's model already stores some tensors in a low format.
        as_given: The plan that runs such a model unchanged. It is shown in the results and never chosen.
        test: The parity test, with its reference gradients.
        parts: The parts of the model for which the search can choose a format.
        numerics: Tests plans against the reference gradients, and repairs plans that fail.
        used: ATen operators that run in the forward pass of a training step.
        images: Whether the memory format matters, because the model has convolutions over images.
    """

    model: nn.Module
    optimizer: str
    arrived: bool
    as_given: Plan | None
    test: ParityTest
    parts: tuple[Part, ...]
    numerics: NumericsSearch
    used: frozenset[str]
    images: bool


def refer(context: Context) -> Reference:
    """Compute fp32 gradients on a few batches, and find the parts of the model and the operators that it runs."""
    settings, workload, ranks, journal = context.settings, context.workload, context.ranks, context.journal
    model = build_model(workload, context.device, settings.seed)
    trained = model.parameters()
    optimizer = (
        workload.optimizer(trained) if settings.goal == "numerics" else make_optimizer(workload, trained)
    )
    if context.device.type == "cpu":  # an accelerator that was queried does not survive a fork
        context.home.import_soon(libraries(type(made).__module__ for made in (*model.modules(), optimizer)))
    adam = ranks.at("the optimizer").same(is_adam(optimizer))
    prober = Prober(
        model, workload.loss, iter(workload.batches(settings.seed)), context.device, seed=settings.seed,
        call=f"tune({workload.name!r})", dither=coarsest(settings.formats),
    )  # fmt: skip
    test = ParityTest(prober, settings.accumulate * settings.world_size, adam, workload.optimizer)
    journal.tell(f"fp32 gradients of {MICROBATCHES} batches, and fp32 against itself")
    test.reference(MICROBATCHES)
    micros = prober.micros
    if all(same_batch(micros[0].batch, micro.batch) for micro in micros[1:]):
        journal.notes.append(
            "Every batch is the same, so the data has no noise: gradient errors are compared with the signal alone, and "
            "fresh batches test nothing new."
        )
    if test.repeat > 0.0:
        journal.notes.append(
            f"The loss is not deterministic: the same pass repeated in fp32 differs by {test.repeat:.2g} of an "
            "update. A plan whose own difference is not much larger is undecided."
        )

    def step() -> torch.Tensor:
        return workload.loss(prober.model, micros[0].batch)

    seed_all(settings.seed)
    parts = ranks.at("the regions").same(find_parts(prober.model, step))
    ran = [prober.model.get_submodule(path) for part in parts for path in part.paths]
    return Reference(
        model=model, optimizer=type(optimizer).__name__, arrived=bool(low_tensors(model)), as_given=as_given(model),
        test=test, parts=parts, numerics=NumericsSearch(test, parts, journal.tell, ranks, context.left_s),
        used=ranks.at("the operators").same(operators_used(step)),
        images=any(isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)) for module in ran),
    )  # fmt: skip


@dataclass(frozen=True)
class Served:
    """What the first stage of a search for inference finds: the model in evaluation mode, and the tests of its outputs.

    Attributes:
        test: The test on the batches of the search.
        fresh: Makes the test on fresh batches.
        model: The model as the workload builds it.
        arrived: Whether the user's model already stores some tensors in a low format.
        as_given: The plan that runs such a model unchanged. It is shown in the results and never chosen.
        parts: The parts of the model for which the search can choose a format.
        used: ATen operators that run in a call.
        images: Whether the memory format matters, because the model has convolutions over images.
        samples: The number of samples of a batch.
        batch_bytes: The bytes of a batch.
        weight_bytes: The bytes of the model's parameters and buffers in fp32.
    """

    test: OutputTest
    fresh: Callable[[], OutputTest]
    model: nn.Module
    arrived: bool
    as_given: Plan | None
    parts: tuple[Part, ...]
    used: frozenset[str]
    images: bool
    samples: int
    batch_bytes: int
    weight_bytes: int


def refer_served(context: Context) -> Served:
    """Compute the fp32 outputs of some batches, and find the parts of the model and the operators that it runs."""
    settings, workload, ranks, journal = (
        context.settings,
        epochs_of(context.workload),
        context.ranks,
        context.journal,
    )
    model = build_model(workload, context.device, settings.seed).eval()
    given = as_given(model)

    def test(seed: int) -> OutputTest:
        return output_test(workload, model, context.device, iter(workload.batches(seed)), settings.seed)

    journal.tell(f"fp32 outputs of {OUTPUT_BATCHES} batches")
    first = test(settings.seed)
    journal.notes += filter(None, [first.not_compared])
    batch = to_device(next(iter(workload.batches(settings.seed))), context.device)
    arrived = widen_(model)
    once = served(workload, model, cast_floating(batch, torch.float32, LOW_DTYPES) if arrived else batch)
    parts = ranks.at("the regions").same(find_parts(model, once))
    used = ranks.at("the operators").same(operators_used(once))
    images = any(
        isinstance(model.get_submodule(path), (nn.Conv2d, nn.ConvTranspose2d))
        for part in parts
        for path in part.paths
    )
    tensors, weights = tensors_in(batch), [*model.parameters(), *model.buffers()]
    weight_bytes = sum(tensor.nbytes for tensor in weights)
    store_(model, arrived)
    return Served(
        first, functools.cache(lambda: test(settings.seed + 1)), model, bool(arrived), given, parts, used, images,
        samples=max([tensor.shape[0] for tensor in tensors if tensor.dim()], default=1) or 1,
        batch_bytes=sum(tensor.nbytes for tensor in tensors), weight_bytes=weight_bytes,
    )  # fmt: skip
