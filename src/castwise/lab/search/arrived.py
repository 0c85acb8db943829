"""Write the notes of a search on a model that already has bf16 or fp16 tensors."""

from __future__ import annotations

from collections.abc import Iterator

from castwise.core.amounts import size
from castwise.core.model.arrival import low_tensors, more_bytes, widen_for
from castwise.core.plans.words import in_words
from castwise.lab.search.state import Search

AS_GIVEN = "as given"
"""Name of the table row for the model in the formats in which the user gave it."""


def widening_of(search: Search) -> bool | str:
    """Return the value of ``widen=`` with which the chosen plan is applied to the user's model; False if none is needed."""
    if not search.arrived or search.first is None:
        return False
    model = search.first.model
    widen: bool | str = widen_for(search.choice.plan, model, serves=search.serves)
    low = low_tensors(model)
    frozen = any(not p.requires_grad for name, p in model.named_parameters() if name in low)
    return widen if search.serves or frozen or not widen else True


def arrival_notes(search: Search) -> Iterator[str]:
    """Yield notes on widening the model to fp32, on its speed without widening, and on how to apply the chosen plan."""
    assert search.first is not None, "no model before the first stage has ended"
    model, serves = search.first.model, search.serves
    low = low_tensors(model)
    formats = " and ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in low.values()}))
    count = len(low)
    what, them = (
        (f"{count} tensors of the model were", "them") if count > 1 else ("1 tensor of the model was", "it")
    )
    yield (
        f"{what} given in {formats}. The fp32 plan widens {them} to fp32, which is exact and takes "
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
    widen = widening_of(search)
    how = "inference=True" if serves else "optimizer"
    said = f", widen={widen!r}" if widen else ""
    yield f"Apply the plan {in_words(search.choice.plan)} with amp.prepare(model, {how}{said})."
