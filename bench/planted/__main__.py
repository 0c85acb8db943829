"""Check the suite itself: fragile models fail in training; models with the place in fp32 and sound models do not."""

from __future__ import annotations

import dataclasses
import sys

import torch

from castwise import Plan, Region
from planted.cases import CASES
from planted.judge import judge, reference

if __name__ == "__main__":
    torch.set_num_threads(1)
    only = sys.argv[1:]
    for case in CASES:
        if only and case.name not in only:
            continue
        fragile, sound = case.workload(sound=False), case.workload(sound=True)
        fp32, fp32_sound = reference(fragile), reference(sound)
        for low in ("bf16", "fp16"):
            plan = Plan.preset(f"{low}-mixed")
            cured = dataclasses.replace(plan, regions=(Region(case.fragile, compute="fp32"),))
            says = [judge(fragile, plan, fp32), judge(fragile, cured, fp32), judge(sound, plan, fp32_sound)]
            want = [low in case.formats, False, False]
            marks = ["ok" if s.fails == w else "WRONG" for s, w in zip(says, want, strict=True)]
            print(f"{case.name:14} {low} fp32 {says[0].reference:.3f}±{says[0].margin:.3f}",
                  *(f"| {m} {s.loss:.3f} {s.why}" for m, s in zip(marks, says, strict=True)), flush=True)  # fmt: skip
