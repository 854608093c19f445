"""What a folder holds, and what goes first."""
