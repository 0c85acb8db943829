"""Real jobs that need no download: ``sine``, ``gpt`` and ``digits``, found by :func:`castwise.workload.find_workload`."""
