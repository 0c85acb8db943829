"""Run a script abstractly, to see what it does with losses, gradients, scalers, weights and checkpoints.

``machine`` executes a script in a ``trace``, with ``values`` of which it knows only what concerns precision: ``statements``,
``expressions``, ``calls`` of functions of the program, ``binding`` of names, and ``decisions`` of tests; ``flow`` is how
statements leave the code around them. Of libraries it knows ``names``, ``objects``, ``methods`` and ``functions``.
``rules`` follows the uses of mixed precision and reports errors. ``program``: the files that are executed.
"""
