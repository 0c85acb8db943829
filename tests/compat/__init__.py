"""Drop-ins."""
