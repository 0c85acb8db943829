"""Tools that look at what a plan does inside of a model; each leaves the model as it was."""
