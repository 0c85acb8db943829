"""Write the notes of a search on a model that already has bf16 or fp16 tensors."""

from __future__ import annotations

from collections.abc import Iterator

from castwise.core.amounts import size
from castwise.core.model.arrival import low_tensors, more_bytes, widen_for
from castwise.core.plans.words import in_words
from castwise.lab.search.state import Search

AS_GIVEN = "as given"
"""Name of the table row for the model in the formats in which the user gave it."""


def arrival_notes(search: Search) -> Iterator[str]:
    """Yield notes on widening the model to fp32, on its speed without widening, and on how to apply the chosen plan."""
    assert search.first is not None, "no model before the first stage has ended"
    model, serves = search.first.model, search.serves
    low = low_tensors(model)
    formats = " and ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in low.values()}))
    yield (
        f"{len(low)} tensor{'s' * (len(low) > 1)} of the model {'were' if len(low) > 1 else 'was'} given in {formats}. The fp32 plan widens them to fp32, which is exact and takes "
        f"{size(more_bytes(low.values()))} more memory."
    )
    if search.race is None:
        pass
    elif search.as_given is None:
        yield f"The model as given was not timed: its {'' if serves else 'trained '}parameters are stored in several formats."
    else:
        updates = search.updates_as_given
        lost = f"; {updates.why}" if updates is not None and updates.why else ""
        yield f"The row {AS_GIVEN!r} is the model in its own formats, under {search.as_given}. It is never chosen{lost}."
    widen = widen_for(search.choice.plan, model, serves=serves)
    if serves:
        said = f", widen={widen!r}" * bool(widen)
        yield f"Apply the plan {in_words(search.choice.plan)} with amp.prepare(model, inference=True{said})."
        return
    frozen = any(not p.requires_grad for name, p in model.named_parameters() if name in low)
    said = f", widen={(widen if frozen else True)!r}" if widen else ""
    yield f"Apply the plan {in_words(search.choice.plan)} with amp.prepare(model, optimizer{said})."
