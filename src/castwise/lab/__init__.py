"""Run experiments on a copy of a model: time plans, test gradients, search for a plan, inspect numerics.

Two more subpackages watch a training run (``watch``) and define what experiments run on (``workloads``).
"""
