"""The command line: thin commands over `app` and `config`."""
