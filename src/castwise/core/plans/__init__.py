"""Define plans as data: numeric formats, rules for operators, and the plan with its parts and its forms as text."""
