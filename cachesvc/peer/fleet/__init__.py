"""Other daemons as this one knows them: where they are, how they are called, what they have."""
