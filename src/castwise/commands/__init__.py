"""The jobs behind the commands, and the commands' arguments, exit codes and progress."""
