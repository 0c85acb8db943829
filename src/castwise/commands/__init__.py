"""The command line of castwise: ``cli`` parses arguments and prints results, and ``jobs`` does the work of the commands."""
