"""Real jobs that need no download: ``sine``, ``gpt`` and ``digits``, found by :func:`castwise.lab.workloads.workload.find_workload`."""
