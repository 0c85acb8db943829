"""Plans in other trainers: one module per library, imported by name, which needs that library."""
