"""Plans in other trainers: one module per library, which needs that library and is imported by name."""
