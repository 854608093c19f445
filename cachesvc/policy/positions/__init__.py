"""Worth of copies that come and go by themselves, windows and recurrent states, beside that of blocks."""
