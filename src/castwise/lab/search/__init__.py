"""Choose a precision plan by experiment."""
