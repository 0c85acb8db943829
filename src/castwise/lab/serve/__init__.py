"""Models that are served: are their outputs as good as fp32's?

- ``parity``: ``output_parity``.
- ``comparison``: the test in single steps, for callers that judge many plans.
- ``runs``: runs a model in fp32, with rounded weights and inputs, and under plans.
- ``outputs``: names outputs, decides what each is for, and measures how two runs of a batch differ.
- ``verdicts``: decides from these differences, with intervals over batches.
- ``result``: what ``output_parity`` returns.
"""
