"""Read scripts as text: find lines with precision errors, and rewrite scripts for castwise."""
