"""The precision decision as data: formats, operator tables and rules, the plan with its parts, its line and its description."""
