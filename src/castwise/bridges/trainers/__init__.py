"""Plans in other people's trainers, one module for each library; it is imported by name, and needs that library."""
