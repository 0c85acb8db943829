"""Migration of scripts."""
