"""What a finding of each rule says.

Sources: torch's documentation of torch.amp ("Automatic Mixed Precision examples": unscale before clipping, one scaler
for a run, its state in checkpoints), the issue reports behind these rules, and the uses that castwise's sessions
refuse.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Severity = Literal["error", "warning"]


class Rule(NamedTuple):
    """What a finding of a rule says.

    Attributes:
        severity: ``error`` if the training or a checkpoint is wrong, ``warning`` if it is worse or slower than it
            could be.
        why: The effect.
        instead: What to write.
    """

    severity: Severity
    why: str
    instead: str


RULES = {
    "fp16-on-cpu": Rule(
        "warning",
        "CPUs compute fp16 by converting to fp32 and back, and keep the small range of fp16: gradients below 6e-8 become zero",
        'torch.autocast("cpu", dtype=torch.bfloat16); castwise doctor measures how fast this CPU is in each format',
    ),
    "cuda-hard-coded": Rule(
        "warning",
        "when the script falls back to the CPU, autocast and GradScaler for CUDA have no effect: everything runs in fp32",
        "torch.amp.autocast(device_type, ...) and torch.amp.GradScaler(device_type) with the type of the chosen device",
    ),
    "scaler-with-bf16": Rule(
        "warning",
        "bf16 has fp32's range, so a loss scale gains nothing; it costs a check of all gradients and, until a scale is found, "
        "skipped steps",
        "leave the GradScaler out, or make it with enabled=False, where autocast uses bf16: loss.backward(), optimizer.step()",
    ),
    "clip-before-unscale": Rule(
        "error",
        "gradients are still multiplied by the loss scale (65536 at first) here, so nearly all are clipped, and after "
        "unscaling their norm is too small by the factor of the loss scale",
        "scaler.unscale_(optimizer) before clipping; with castwise: amp.step(optimizer, max_norm=...)",
    ),
    "scaler-not-updated": Rule(
        "error",
        "the scaler's update() is never called: the loss scale never changes, and while it is too large every step is skipped",
        "scaler.update() after scaler.step(optimizer)",
    ),
    "step-on-scaled-gradients": Rule(
        "error",
        "the gradients come from a loss that the scaler has scaled, so this update is too large by the factor of the loss scale, "
        "and infinities reach the weights",
        "scaler.step(optimizer); scaler.update()",
    ),
    "scaler-in-the-loop": Rule(
        "error",
        "the loop makes a new scaler each time, while the optimizer stays: the loss scale starts again at 65536, and steps are skipped "
        "until the right scale is found again",
        "torch.amp.GradScaler(...) once, before the loop",
    ),
    "scaler-not-saved": Rule(
        "warning",
        "the optimizer is saved, but the scaler is not: a resumed run starts at a loss scale of 65536 and skips steps until the right "
        "scale is found again",
        '{..., "scaler": scaler.state_dict()}, and scaler.load_state_dict(...) when the run resumes',
    ),
    "scheduler-on-skipped-steps": Rule(
        "warning",
        "the scheduler moves in every iteration, also when the scaler skips the step because of an overflow: the learning rate runs "
        "ahead of the updates",
        "scale = scaler.get_scale() before scaler.update(), and the scheduler's step() only if scaler.get_scale() >= scale; with "
        "castwise: if amp.step(optimizer): scheduler.step()",
    ),
    "backward-inside-autocast": Rule(
        "warning",
        "backward runs inside the autocast region: operators of the backward that are not replayed from the forward are cast once more; "
        "torch advises against it",
        "end the with block after the loss is computed, and call backward outside of it",
    ),
    "fp16-without-scaler": Rule(
        "error",
        "the forward ran under fp16 autocast and the loss is not scaled: gradients below 6e-8 become zero in fp16",
        "scaler = torch.amp.GradScaler(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); or autocast in bf16",
    ),
    "unscale-each-microbatch": Rule(
        "error",
        "gradients that are accumulated over several microbatches are unscaled more than once: what was accumulated before is divided "
        "by the loss scale again",
        "unscale_ and clip only in the iteration that calls scaler.step(optimizer)",
    ),
    "checkpoint-rounded": Rule(
        "error",
        "the checkpoint holds the optimizer's state, to resume from, but weights that were rounded here: each resume loses the small "
        "updates since",
        "save the fp32 weights for resuming; export a low copy to a file of its own",
    ),
    "contexts-joined-by-and": Rule(
        "error",
        "`a and b` gives one of the two contexts, and only that one is entered: the other has no effect",
        "with a, b:",
    ),
    "low-weights-without-masters": Rule(
        "error",
        "the weights are stored in a low format and trained without masters: updates below 1/256 (bf16) or 1/2048 (fp16) of a weight "
        "are rounded away, and Adam's eps of 1e-8 is zero in fp16",
        'keep them in fp32 and use autocast; or castwise.Amp("bf16-master") and amp.prepare(model, optimizer), which keeps fp32 masters',
    ),
    "loss-in-fp16": Rule(
        "error",
        "outputs are fp16, and so the loss is computed in fp16: its sums overflow above 65504, and its small terms become zero",
        "the loss of outputs.float()",
    ),
    "unused-precision-option": Rule(
        "warning",
        "this option of precision is parsed, but nothing reads it: the script runs in the same precision with and without it",
        "use the option where autocast and GradScaler are made, or remove it",
    ),
}
