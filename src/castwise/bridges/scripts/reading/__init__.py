"""Read scripts, for code that rewrites them or checks them.

``library``: the parser, imported only when needed. ``files``: the files and their text. ``view``: a script as
a tree, with the meaning of its names. ``torch_amp``: its uses of torch.amp, low formats and optimizers.
"""
