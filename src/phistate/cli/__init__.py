"""The command ``phistate``, one file a command."""
