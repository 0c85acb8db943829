"""What watches a running training."""
