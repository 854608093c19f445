"""The command line: `cachesvc`."""
