"""What the commands do, and their arguments, exit codes and progress."""
