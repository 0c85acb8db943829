"""Reading scripts as text: which lines are wrong about precision, and rewriting them for castwise."""
