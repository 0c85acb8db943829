"""Drop-ins for other libraries."""
