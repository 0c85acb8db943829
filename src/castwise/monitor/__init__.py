"""What watches a running training: sampled statistics, alarms, and audits of the plan against fp32."""

from __future__ import annotations

from castwise.monitor.alarms import LINES, Line
from castwise.monitor.monitor import Monitor
from castwise.monitor.records import Alarm, Audit, MonitorReport, RegionSample, Sample

__all__ = ["LINES", "Alarm", "Audit", "Line", "Monitor", "MonitorReport", "RegionSample", "Sample"]
