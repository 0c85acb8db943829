"""Apply a plan to a model: decide in which format each module computes and is stored, and cast tensors between modules.

The package also explains dtype errors.
"""
