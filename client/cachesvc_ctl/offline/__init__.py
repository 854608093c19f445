"""An index as a file: ``cachesvc dump`` writes it, ``cachesvc load`` studies it without a daemon."""
