"""Read scripts, for code that rewrites them or checks them.

``files``: the files and their text. ``library``: the parser for rewriting, imported only when needed. ``view``: a script as
its tree, with the meaning of its names.
"""
