"""Monitor a running training: sample statistics, raise alarms, audit the plan against fp32, record steps, and recover."""

from __future__ import annotations

from castwise.lab.watch.alarms import LINES, Line
from castwise.lab.watch.monitor import Monitor
from castwise.lab.watch.records import Alarm, Audit, MonitorReport, RegionSample, Sample

__all__ = ["LINES", "Alarm", "Audit", "Line", "Monitor", "MonitorReport", "RegionSample", "Sample"]
