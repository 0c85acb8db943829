"""The precision decision as data: formats, operator tables and rules, the plan, its parts, its line, and text."""
