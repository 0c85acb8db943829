"""How scripts are read, by whoever rewrites them or looks for faults in them.

``library``: the parser, which castwise does without until then. ``files``: which files, and their text. ``view``: a script as
a tree, and what its names mean. ``torch_amp``: what it makes of torch.amp, low formats and optimizers.
"""
