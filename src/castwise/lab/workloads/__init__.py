"""Training jobs that need no download: ``sine``, ``gpt`` and ``digits``; see :func:`castwise.lab.workloads.workload.find_workload`."""
