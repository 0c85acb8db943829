"""Models that produce NaN or infinities, with the right answer for each, and sound models with intended infinities."""
