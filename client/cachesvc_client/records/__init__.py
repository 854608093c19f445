"""State of a lease, its sequences and steps: plain records that do no input or output."""
